"""How the doctor is begun: around a script in a process of its own, or from code. The parent needs no torch.

A process is made to watch itself by an environment variable, and a folder from which Python loads a module.
"""

from __future__ import annotations

from pathlib import Path

VARIABLE = "PREAMP_DOCTOR"
"""The environment variable that asks for it; JSON: folder, base, every, steps, replay; offset, full."""
HOOK = str(Path(__file__).parent / "importable")
"""The folder whose `sitecustomize` begins the watching."""
