"""How the doctor is begun: around a script in a process of its own, or from code. The parent needs no torch.

A process is made to watch itself by an environment variable, and a folder from which Python loads a module.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

VARIABLE = "PREAMP_DOCTOR"
"""The environment variable that asks for it; JSON: folder, base, every, steps, replay; offset, full, first_step."""
HOOK = str(Path(__file__).parent / "importable")
"""The folder whose `sitecustomize` begins the watching."""


def watched_environment(environment: Mapping[str, str], options: Mapping[str, Any]) -> dict[str, str]:
    """The environment of a process that is to be watched."""
    before = environment.get("PYTHONPATH", "")
    path = os.pathsep.join(part for part in (HOOK, before) if part)
    return {**environment, VARIABLE: json.dumps(options), "PYTHONPATH": path}
