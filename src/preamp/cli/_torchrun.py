"""The same command on several processes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence


def torchrun(processes: int, arguments: Sequence[str]) -> int:
    """`preamp ARGUMENTS` as so many processes of one group; the status of the first that failed, 0 if none did."""
    line = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    # each process would take all cores else, and torchrun would give it one
    threads = os.environ.get("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // processes)))
    environment = {**os.environ, "OMP_NUM_THREADS": threads}
    kept = [one for index, one in enumerate(arguments) if not _asks_for_this(arguments, index)]
    return subprocess.run([*line, "-m", "preamp", *kept], env=environment, check=False).returncode


def _asks_for_this(arguments: Sequence[str], index: int) -> bool:
    """Whether an argument is --nproc or its number, which torchrun would take for an option of its own."""
    return arguments[index].startswith("--nproc") or (index > 0 and arguments[index - 1] == "--nproc")
