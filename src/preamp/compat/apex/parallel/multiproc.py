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
    with ExitStack() as at_end:
        processes: list[subprocess.Popen[bytes]] = []
        for rank in range(int(number)):
            log = None if rank == 0 else at_end.enter_context(open(f"GPU_{rank}.log", "wb"))
            line = [sys.executable, *arguments, "--world-size", number, "--rank", str(rank)]
            processes.append(subprocess.Popen(line, stdout=log, stderr=subprocess.STDOUT if log else None))
            at_end.callback(processes[-1].terminate)  # without a partner its collectives would wait for minutes
        while not any(states := [process.poll() for process in processes]):
            if None not in states:
                return 0
            time.sleep(0.05)
        return next(state for state in states if state)


if __name__ == "__main__":
    sys.exit(main())
