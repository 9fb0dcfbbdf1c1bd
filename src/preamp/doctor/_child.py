"""The doctor inside the process of the script: begins when the script imports torch."""

from __future__ import annotations

import atexit
import gc
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ._current import set_current
from ._first_step import FirstStep
from ._full import run_in_full
from ._patches import Patches
from ._records import JsonLines, Recorder
from ._seeds import Seeds
from ._watch import Watch

VARIABLE = "PREAMP_DOCTOR"
"""The environment variable that asks for it; JSON: folder, base, every, steps, replay; offset, full, first_step."""


HOOK = str(Path(__file__).parent / "_importable")
"""The folder whose `sitecustomize` begins the watching."""


def watched_environment(environment: Mapping[str, str], asked: Mapping[str, Any]) -> dict[str, str]:
    """The environment of a process that is to be watched."""
    before = environment.get("PYTHONPATH", "")
    path = os.pathsep.join(part for part in (HOOK, before) if part)
    return {**environment, VARIABLE: json.dumps(asked), "PYTHONPATH": path}


def begin() -> None:
    """Watch this process until it ends."""
    asked = json.loads(os.environ[VARIABLE])
    rank = int(os.environ.get("RANK", "0") or 0)
    path = Path(asked["folder"]) / f"rank{rank}-{os.getpid()}.jsonl"
    recorder = Recorder(JsonLines(path), rank=rank)
    patches = Patches()
    Seeds(patches, asked.get("offset", 0))
    if asked.get("full"):
        run_in_full(patches)
    watch = Watch(recorder, Path(asked["base"]), asked["every"], asked["steps"], asked["replay"])
    if asked.get("first_step") and not rank:
        watch.on_first_gradients = FirstStep(Path(asked["first_step"]), watch.names).write
    set_current(watch)
    watch.start()
    atexit.register(watch.end)
    gc.freeze()  # the models are looked for among what is made from here on: torch alone is 300,000 objects
