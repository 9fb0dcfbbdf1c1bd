"""Start one process of a script per GPU: `python -m preamp.compat.apex.parallel.multiproc [--nproc N] script args...`.

Every process gets `--world-size N --rank i` appended to its arguments, in place of what it says there already. Rank 0
writes to the terminal, the others to GPU_i.log. N is, in this order: `--nproc`, a `--world-size` among the script's
arguments, the environment's WORLD_SIZE, the number of GPUs, 1.
"""

from __future__ import annotations

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
    arguments = list(sys.argv[1:] if argv is None else argv)
    world = None
    if arguments and (arguments[0] == "--nproc" or arguments[0].startswith("--nproc=")):
        world, arguments = _taken(arguments, "--nproc")
    if not arguments:
        raise ValueError("no script to start: python -m preamp.compat.apex.parallel.multiproc [--nproc N] script args")
    given, arguments = _taken(arguments, "--world-size")
    _, arguments = _taken(arguments, "--rank")
    source = world or given or os.environ.get("WORLD_SIZE") or str(torch.cuda.device_count() or 1)
    if not source.isdigit() or int(source) < 1:
        raise ValueError(f"the number of processes is {source!r}: pass --nproc with a whole number from 1 up.")
    return _run([sys.executable, *arguments], int(source))


def _taken(arguments: Sequence[str], option: str) -> tuple[str | None, list[str]]:
    """The value of `option`, given as two words or with "=", and the arguments without it."""
    rest, value = list(arguments), None
    for place, word in enumerate(rest):
        if word.startswith(option + "="):
            value = word.partition("=")[2]
            del rest[place]
            break
        if word == option:
            value = rest[place + 1] if place + 1 < len(rest) else ""
            del rest[place : place + 2]
            break
    return value, rest


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
