"""The one place that states the version, and tells whether a command line asks for nothing else."""

import os
import sys

__version__ = "0.1.0"


def only_version_is_asked() -> bool:
    """Whether this process is `preamp --version`, or `python -m preamp --version`: they answer without torch."""
    line = getattr(sys, "argv", [])
    if line[1:] != ["--version"]:
        return False
    return os.path.basename(line[0]) in ("preamp", "preamp.exe") or sys.orig_argv[-3:-1] == ["-m", "preamp"]
