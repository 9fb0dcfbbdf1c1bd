"""SIGKILL at random moments of a process that trains and saves: the last good checkpoint is there, and is right."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import preamp

from .runs import Run, alike, seeded

ROOT = Path(__file__).resolve().parents[2]


class Loops:
    """Processes that train and save, one after another, and the violent end of each."""

    def __init__(self, *arguments: object) -> None:
        line = [sys.executable, "-m", "tests.reliability.save_loop", *map(str, arguments)]
        self.process = subprocess.Popen(line, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def killed_after(self, seconds: float) -> int:
        """Start one and kill it; the last step that it told to be on the disk, or -1."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write("go\n")
        self.process.stdin.flush()
        ready, number = self.process.stdout.readline().split()
        assert ready == "ready"
        time.sleep(seconds)
        os.kill(int(number), signal.SIGKILL)
        said = []
        while (line := self.process.stdout.readline()) not in ("dead\n", ""):
            said.append(int(line))
        assert line == "dead\n"
        return said[-1] if said else -1

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


def kill_often(folder: Path, kills: int, level: str, kind: str, when: str, seed: str) -> None:
    path, chance, last = folder / "last.pt", seeded(seed), 0
    print(f"seed {seed!r}")
    with Loops(path, level, kind, when) as loops:
        for kill in range(kills):
            after = chance.uniform(0, 0.05)
            told = loops.killed_after(after)
            where = f"kill {kill} after {after:.4f} s, seed {seed!r}"
            if not path.exists():
                assert told == -1 and last == 0, where
                continue
            run = Run(level, kind)
            step = preamp.checkpoint.load(path, **run.objects)["step"]  # its seal and digest hold
            assert step >= max(told, last), where
            assert step <= max(told, last) + 2, f"{where}: a step that nobody took"
            if kill % 4 == 0 or kill == kills - 1:
                assert alike(run.state(), uninterrupted(level, kind, step)), where
            run.close()
            left = [name for name in os.listdir(folder) if name != "last.pt"]
            assert len(left) <= 2, f"{where}: leftovers of earlier kills were not cleared: {left}"
            last = step
    assert last > 0, "no kill came late enough for a save to end"


DEFAULT = [("O2", "preamp", "at-once", 10), ("O1", "torch", "later", 10)]
SLOW = [
    (level, kind, when, 13) for level in ("O1", "O2") for kind in ("torch", "preamp") for when in ("at-once", "later")
]


@pytest.mark.skipif(os.name != "posix", reason="SIGKILL is POSIX's")
@pytest.mark.parametrize(("level", "kind", "when", "kills"), DEFAULT)
def test_killed_while_saving(level: str, kind: str, when: str, kills: int, tmp_path: Path) -> None:
    kill_often(tmp_path, kills, level, kind, when, f"{level} {kind} {when}")


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.skipif(os.name != "posix", reason="SIGKILL is POSIX's")
@pytest.mark.parametrize(("level", "kind", "when", "kills"), SLOW)
def test_killed_while_saving_a_hundred_times(level: str, kind: str, when: str, kills: int, tmp_path: Path) -> None:
    kill_often(tmp_path, kills, level, kind, when, f"slow {level} {kind} {when}")
