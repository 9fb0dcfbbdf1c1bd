"""SIGKILL at random moments of a process that trains and saves: the last good checkpoint is there, and is right.

Trains and saves after every step until somebody kills it.

    -m tests.reliability.test_save_kill FILE LEVEL KIND at-once|later|sharded

With `sharded` FILE is the folder of a sharded checkpoint, of this one process.

For every line on its standard input it forks a process that does so, which spares the time that importing torch takes.
That one says "ready" with its number, then the number of each step whose file is known to be on the disk; when it is
dead, this one says "dead".
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
import torch

import preamp

from .runs import Run, alike, seeded

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


ROOT = Path(__file__).resolve().parents[2]


class Loops:
    """Processes that train and save, one after another, and the violent end of each."""

    def __init__(self, *arguments: object) -> None:
        line = [sys.executable, "-m", "tests.reliability.test_save_kill", *map(str, arguments)]
        self.process = subprocess.Popen(line, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def _started(self) -> int:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write("go\n")
        self.process.stdin.flush()
        ready, number = self.process.stdout.readline().split()
        assert ready == "ready"
        return int(number)

    def _killed(self, number: int) -> int:
        os.kill(number, signal.SIGKILL)
        assert self.process.stdout is not None
        said = []
        while (line := self.process.stdout.readline()) not in ("dead\n", ""):
            said.append(int(line))
        assert line == "dead\n"
        return said[-1] if said else -1

    def killed_after(self, seconds: float) -> int:
        """Start one and kill it; the last step that it told to be on the disk, or -1."""
        number = self._started()
        time.sleep(seconds)
        return self._killed(number)

    def seconds_for(self, saves: int) -> float:
        """How long one takes for that many saves, on this machine as busy as it is; it is killed then."""
        number, begin = self._started(), time.monotonic()
        assert self.process.stdout is not None
        for _ in range(saves):
            assert int(self.process.stdout.readline()) >= 0
        taken = time.monotonic() - begin
        self._killed(number)
        return taken

    def __enter__(self) -> Loops:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.communicate()


def uninterrupted(level: str, kind: str, steps: int) -> dict[str, object]:
    run = Run(level, kind)
    for step in range(steps):
        run.step(step, factor=float("inf") if step % 7 == 3 else 1.0)
    state = run.state()
    run.close()
    return state


def loaded(path: Path, run: Run, when: str) -> int:
    """Load what is there, whose seals hold; its step."""
    if when == "sharded":
        preamp.checkpoint.load_sharded(path, **run.objects)
        return run.session.steps
    return int(preamp.checkpoint.load(path, **run.objects)["step"])


def kill_often(folder: Path, kills: int, level: str, kind: str, when: str, seed: str) -> None:
    path, chance, last = folder / "last.pt", seeded(seed), 0
    there = path / "latest" if when == "sharded" else path
    print(f"seed {seed!r}")
    with Loops(path, level, kind, when) as loops:
        longest = loops.seconds_for(3)
        shutil.rmtree(folder)  # for kills before there is anything
        folder.mkdir()
        for kill in range(kills):
            after = chance.uniform(0, longest)
            told = loops.killed_after(after)
            where = f"kill {kill} after {after:.4f} s, seed {seed!r}"
            if not there.exists():
                assert told == -1 and last == 0, where
                continue
            run = Run(level, kind)
            step = loaded(path, run, when)
            assert step >= max(told, last), where
            assert step <= max(told, last) + 2, f"{where}: a step that nobody took"
            if kill % 4 == 0 or kill == kills - 1:
                assert alike(run.state(), uninterrupted(level, kind, step)), where
            run.close()
            left = [name for name in os.listdir(there.parent) if name != there.name]
            assert len(left) <= (4 if when == "sharded" else 2), (
                f"{where}: leftovers of earlier kills were not cleared: {left}"
            )
            last = step
    assert last > 0, "no kill came late enough for a save to end"


CASES = [("O2", "preamp", "at-once", 10), ("O1", "torch", "later", 10), ("O1", "preamp", "sharded", 10)]
CASES += [(o, kind, when, 13) for o in ("O1", "O2") for kind in ("torch", "preamp") for when in ("at-once", "later")]
CASES += [("O4", "torch", "sharded", 20)]


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.skipif(os.name != "posix", reason="SIGKILL is POSIX's")
@pytest.mark.parametrize(("level", "kind", "when", "kills"), CASES)
def test_killed_while_saving(level: str, kind: str, when: str, kills: int, tmp_path: Path) -> None:
    kill_often(tmp_path, kills, level, kind, when, f"{kills} {level} {kind} {when}")


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
