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
    """Run the script in all processes and return the first exit status that is not 0; the rest is then ended.

    ValueError for a number of processes that is none, and when no script is given.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for option in ("--world-size", "--rank"):
        parser.add_argument(option)
    given, arguments = parser.parse_known_args(argv)
    if not arguments:
        raise ValueError("no script to start: python -m preamp.compat.apex.parallel.multiproc script args...")
    number = given.world_size or os.environ.get("WORLD_SIZE") or str(torch.cuda.device_count() or 1)
    if not number.isdigit() or int(number) < 1:
        raise ValueError(f"the number of processes is {number!r}: pass --world-size with a whole number from 1 up.")
    return _run([sys.executable, *arguments], int(number))


def _run(command: Sequence[str], world: int) -> int:
    with ExitStack() as open_files:
        processes: list[subprocess.Popen[bytes]] = []
        try:
            for rank in range(world):
                log = None if rank == 0 else open_files.enter_context(open(f"GPU_{rank}.log", "wb"))
                ranked = [*command, "--world-size", str(world), "--rank", str(rank)]
                processes.append(subprocess.Popen(ranked, stdout=log, stderr=subprocess.STDOUT if log else None))
            return _wait(processes)
        finally:
            for process in processes:
                if process.poll() is None:
                    process.terminate()  # without a partner its collectives would wait for minutes
            for process in processes:
                process.wait()


def _wait(processes: Sequence[subprocess.Popen[bytes]]) -> int:
    """0 when all have ended well; the status of the first seen to fail as soon as one has."""
    while True:
        states = [process.poll() for process in processes]
        failed = next((state for state in states if state), None)
        if failed is not None:
            return failed
        if all(state == 0 for state in states):
            return 0
        time.sleep(0.05)


if __name__ == "__main__":
    sys.exit(main())
