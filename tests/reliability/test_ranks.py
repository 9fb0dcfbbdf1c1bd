"""Several ranks, and a fault in one of them: all skip together, none waits for ever, and a killed job goes on."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

import preamp

from .runs import LEVELS, alike, seeded

HERE = Path(__file__).parent
EXAMPLE = HERE.parents[1] / "examples" / "elastic.py"


def launcher(*arguments: object, restarts: int = 0) -> list[str]:
    line = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    return [*line, "--monitor-interval", "0.1", "--max-restarts", str(restarts), *map(str, arguments)]


class Job:
    """A job that runs in the background; whatever happens, neither it nor its ranks outlive the block."""

    def __init__(self, *line: str, folder: Path) -> None:
        self._output = folder / "output.txt"  # a pipe that nobody reads would fill up and stop it
        with self._output.open("w") as file:
            self.process = subprocess.Popen(
                line, cwd=folder, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
            )

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        for number in [*(number for number, _ in self.ranks()), self.process.pid]:
            with suppress(ProcessLookupError):
                os.kill(number, signal.SIGKILL)
        self.process.wait()

    @property
    def said(self) -> str:
        return self._output.read_text(encoding="utf-8", errors="replace")

    def ended(self, timeout: float) -> int:
        """Its exit status, once it has ended."""
        try:
            return self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"it hangs:\n{self.said[-4000:]}") from None

    def ranks(self) -> list[tuple[int, int]]:
        """(process number, rank) of its ranks that live now."""
        found = []
        for entry in Path("/proc").iterdir() if Path("/proc").exists() else ():
            if entry.name.isdigit():
                try:
                    parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                    mine = parent == self.process.pid
                    variables = (entry / "environ").read_bytes().split(b"\0") if mine else []
                except (OSError, ValueError):
                    continue
                found += [(int(entry.name), int(v[5:])) for v in variables if v.startswith(b"RANK=")]
        return found


@pytest.mark.slow
def test_an_exception_in_one_rank_ends_the_job(tmp_path: Path) -> None:
    """Rank 1 raises in its forward pass; rank 0, which waits for its gradients, is not left behind."""
    with Job(*launcher(HERE / "ranks_script.py", "raises"), folder=tmp_path) as job:
        assert job.ended(120) != 0 and "ZeroDivisionError: in the forward pass" in job.said, job.said[-3000:]


@pytest.mark.slow
def test_a_rank_that_waits_for_one_that_does_not_come_ends_with_an_error(tmp_path: Path) -> None:
    """Rank 1 catches its exception and does nothing more: rank 0 is not to hang, but to say what happened."""
    with Job(*launcher(HERE / "ranks_script.py", "sulks"), folder=tmp_path) as job:
        assert job.ended(90) != 0 and "rank 1 has caught it and waits" in job.said, job.said[-3000:]
        assert "rank 0 ends at step 3: " in job.said, job.said[-3000:]


def wait_for(path: Path, step: int, job: Job) -> int:
    """Wait until a checkpoint has reached a step; which it is then."""
    limit = time.monotonic() + 120
    while time.monotonic() < limit:
        reached = preamp.checkpoint.load(path)["step"] if path.exists() else 0
        if reached >= step:
            return int(reached)
        assert job.process.poll() is None, job.said[-4000:]
        time.sleep(0.02)
    raise AssertionError(f"step {step} was not reached:\n{job.said[-4000:]}")


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc").exists(), reason="finds the ranks in /proc")
@pytest.mark.parametrize(("level", "victims"), [("O2", (1,)), *((level, (1, 0)) for level in LEVELS)], ids=str)
def test_a_killed_rank_and_an_elastic_restart(level: str, victims: tuple[int, ...], tmp_path: Path) -> None:
    """SIGKILL of one rank after another, somewhere in a step; the end is that of a run nobody disturbed."""
    chance, steps = seeded(f"elastic {level}"), 400
    whole, broken = tmp_path / "whole.pt", tmp_path / "broken.pt"
    line = [EXAMPLE, "--level", level, "--steps", steps, "--save-every", 5, "--checkpoint"]
    ran = subprocess.run(launcher(*line, whole), capture_output=True, text=True, cwd=tmp_path, timeout=120)
    assert ran.returncode == 0, ran.stderr[-3000:]
    with Job(*launcher(*line, broken, restarts=2), folder=tmp_path) as job:
        at = 0
        for victim in victims:
            at = wait_for(broken, at + 20, job)
            time.sleep(chance.uniform(0, 0.05))
            [number] = [number for number, rank in job.ranks() if rank == victim]
            os.kill(number, signal.SIGKILL)
        status, said = job.ended(120), job.said
    assert status == 0, said[-6000:]
    starts = [int(step) for step in re.findall(r"rank 0 goes on at step (\d+)", said)]
    if "terminate called without an active exception" in said:  # gloo's threads, when a rank had done all and left:
        starts = [step for step in starts if step < steps]  # the launcher starts both anew, and nothing is left to do
    assert len(starts) == len(victims) and steps not in starts, said[-3000:]
    ours, theirs = preamp.checkpoint.load(broken), preamp.checkpoint.load(whole)
    assert ours["step"] == steps
    assert alike({**ours, "digest": ""}, {**theirs, "digest": ""})
