"""Start one process of a script per GPU: `python -m preamp.compat.apex.parallel.multiproc script args...`.

Every process gets `--world-size N --rank i` appended to its arguments, in place of what it says there already. Rank 0
writes to the terminal, the others to GPU_i.log. N is, in this order: a `--world-size` among the arguments,
the environment's WORLD_SIZE, the number of GPUs, 1.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack

import torch


def main(argv: Sequence[str] | None = None) -> int:
    """Run the script in all processes and return the first exit status that is not 0; the rest is then ended."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    number = os.environ.get("WORLD_SIZE") or torch.cuda.device_count() or 1
    parser.add_argument("--world-size", type=int, default=number)
    parser.add_argument("--rank")
    parser.add_argument("script")
    given, arguments = parser.parse_known_args(argv)
    processes: list[subprocess.Popen[bytes]] = []
    with ExitStack() as logs:
        for rank in range(given.world_size):
            log = None if rank == 0 else logs.enter_context(open(f"GPU_{rank}.log", "wb"))
            own = ["--world-size", str(given.world_size), "--rank", str(rank)]
            processes.append(subprocess.Popen([sys.executable, given.script, *arguments, *own], stdout=log, stderr=log))
    while None in (states := [process.poll() for process in processes]) and not any(states):
        time.sleep(0.05)
    for process in processes:
        process.terminate()  # without a partner its collectives would wait for minutes
    return next((state for state in states if state), 0)


if __name__ == "__main__":
    sys.exit(main())
