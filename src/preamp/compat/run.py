"""`preamp run`: a script or module as it is, in processes that find `apex`."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from ..errors import PreampError
from .install import environment


class NothingToRun(PreampError, FileNotFoundError):
    """The script to run is not there."""


def command(target: str, arguments: Sequence[str], as_module: bool) -> list[str]:
    """The command line of the interpreter that runs us, flags included. `NothingToRun` if there is no such script."""
    if target.startswith("-"):
        raise NothingToRun(f"there is no option {target}; this command's own are listed by --help, and come first")
    if not as_module and not Path(target).exists():
        raise NothingToRun(
            f"there is no script {target!r} in {Path.cwd()}. Write its path, as in path/to/script.py, or "
            "-m package.module for what is run by python -m"
        )
    flags: list[str] = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    return [sys.executable, *flags, *(["-m"] if as_module else []), target, *arguments]


def run(target: str, arguments: Sequence[str], as_module: bool) -> int:
    """Run it in place of this process (where the system can: then this does not return); its exit status.

    `apex` is importable in that process and in all that it starts, however it starts them: the folder that holds it is
    on PYTHONPATH.
    """
    line = command(target, arguments, as_module)
    sys.stdout.flush()
    sys.stderr.flush()
    if os.name == "posix":
        os.execve(line[0], line, environment())
    return subprocess.call(line, env=environment())
