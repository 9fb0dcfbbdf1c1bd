"""The doctor inside the process of the script: begins when the script imports torch."""

from __future__ import annotations

import atexit
import json
import os
from pathlib import Path

from ._records import JsonLines, Recorder
from ._watch import Watch, set_current

VARIABLE = "PREAMP_DOCTOR"
"""The environment variable that asks for it; JSON: folder, base, every, steps, replay."""


def begin() -> None:
    """Watch this process until it ends."""
    asked = json.loads(os.environ[VARIABLE])
    rank = int(os.environ.get("RANK", "0") or 0)
    path = Path(asked["folder"]) / f"rank{rank}-{os.getpid()}.jsonl"
    recorder = Recorder(JsonLines(path), rank=rank)
    watch = Watch(recorder, Path(asked["base"]), asked["every"], asked["steps"], asked["replay"])
    set_current(watch)
    watch.start()
    atexit.register(watch.end)
