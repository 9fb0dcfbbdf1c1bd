"""Trains and saves after every step until somebody kills it; run by test_save_kill.py.

    save_loop.py FILE LEVEL KIND at-once|later|sharded

With `sharded` FILE is the folder of a sharded checkpoint, of this one process.

For every line on its standard input it forks a process that does so, which spares the time that importing torch takes.
That one says "ready" with its number, then the number of each step whose file is known to be on the disk; when it is
dead, this one says "dead".
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

import torch

import preamp

from .runs import Run

save, save_async, load = preamp.checkpoint.save, preamp.checkpoint.save_async, preamp.checkpoint.load


def tell(step: int) -> None:
    """In one write: whoever is killed between a number and the end of its line has the next word put behind it."""
    os.write(sys.stdout.fileno(), f"{step}\n".encode())


def main(path: Path, level: str, kind: str, when: str) -> None:
    torch.set_num_threads(1)
    run, first, pending = Run(level, kind), 0, None
    ballast = torch.zeros(60_000)  # so that a save takes a while
    if when == "sharded" and (path / "latest").exists():
        preamp.checkpoint.load_sharded(path, **run.objects)
        first = run.session.steps
    elif path.is_file():
        first = load(path, **run.objects)["step"]
    print(f"ready {os.getpid()}", flush=True)
    for step in range(first, 1_000_000):
        run.step(step, factor=float("inf") if step % 7 == 3 else 1.0)
        if when == "at-once":
            save(path, **run.objects, step=step + 1, ballast=ballast)
        elif when == "sharded":
            preamp.checkpoint.save_sharded(path, **run.objects)
        else:
            if pending is not None:
                pending.result()
                tell(step)
            pending = save_async(path, **run.objects, step=step + 1, ballast=ballast)
            continue
        tell(step + 1)


if __name__ == "__main__":
    torch.set_num_threads(1)
    warm = Run(*sys.argv[2:4])  # imports the rest of torch
    warm.steps(0, 1)
    if sys.argv[4] == "sharded":
        with tempfile.TemporaryDirectory() as folder:
            preamp.checkpoint.save_sharded(folder, **warm.objects)
            preamp.checkpoint.load_sharded(folder, **warm.objects)
    warm.close()
    for _ in sys.stdin:
        child = os.fork()
        if child == 0:
            try:
                main(Path(sys.argv[1]), *sys.argv[2:])
            finally:
                os._exit(1)
        os.waitpid(child, 0)
        print("dead", flush=True)
