"""One report from several processes, some of them real."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from preamp.cli._doctor import run_doctor
from preamp.doctor.records import Rank
from preamp.doctor.tell.report import all_findings
from preamp.report import Finding

DDP = """
import torch, torch.distributed as dist
from torch import nn
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
torch.manual_seed(rank)
for step in range(5):
    x = torch.randn(16, 8)
    if step == 3 and rank == 1:
        x[5] = float("inf")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model(x).float().square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if rank == 0:
        print(loss.item().hex())
dist.destroy_process_group()
"""


def rank_of(number: int, skipped: list[bool], scales: list[float], *findings: Finding) -> Rank:
    steps: list[dict[str, Any]] = [
        {"step": i, "loss": 1.0, "scale": scale, "skipped": skip, "bad": None, "schedules": 0, "updates": 1,
         "schedule_at": None}
        for i, (skip, scale) in enumerate(zip(skipped, scales, strict=True))
    ]  # fmt: skip
    return Rank(number, list(findings), steps)


def test_ranks_that_part_are_told_with_the_step() -> None:
    same = [1024.0, 1024.0, 512.0]
    agree = [rank_of(0, [False, True, False], same), rank_of(1, [False, True, False], same)]
    assert not all_findings(agree, Path())
    (found,) = all_findings([rank_of(0, [False] * 3, same), rank_of(1, [False, True, False], same)], Path())
    assert (found.code, found.severity, found.step) == ("PA203", "error", 1)
    assert found.evidence == {"rank 0": "skipped False", "rank 1": "skipped True"}
    other = [rank_of(0, [False] * 3, same), rank_of(1, [False] * 3, [1024.0, 256.0, 256.0])]
    assert [f.step for f in all_findings(other, Path())] == [1]


def test_a_finding_of_several_ranks_is_one_with_the_first_of_them() -> None:
    late, early = (Finding("PA205", "warning", "near the top", module="a", step=step) for step in (7, 3))
    ranks = [rank_of(0, [False], [1.0], late), rank_of(1, [False], [1.0], early)]
    (found,) = all_findings(ranks, Path())
    assert found.step == 3
    assert found.evidence == {"ranks": [0, 1], "first on rank": 1}


def test_a_doctor_that_each_rank_starts_keeps_the_reports_of_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "train.py").write_text("print(1)")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank in "01":
        monkeypatch.setenv("RANK", rank)
        run_doctor(
            "train.py", [], False, out=Path("out"), json_file=Path("told.json"), every=50, steps=None, replay=False,
            strict=False,
        )  # fmt: skip
        assert Path(f"out-rank{rank}", "report.html").exists()
    assert sorted(path.name for path in tmp_path.glob("told*")) == ["told-rank0.json", "told-rank1.json"]


@pytest.mark.slow
def test_torchrun_gives_one_report_that_names_the_rank(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(DDP)
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "train.py"]
    alone = subprocess.run([sys.executable, *launch], capture_output=True, text=True, cwd=tmp_path, timeout=120)
    assert alone.returncode == 0, alone.stderr
    doctor = [sys.executable, "-m", "preamp", "doctor", "--out", "out", *launch]
    ran = subprocess.run(doctor, capture_output=True, text=True, cwd=tmp_path, timeout=120)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout == alone.stdout
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert [process["rank"] for process in report["processes"]] == [0, 1]
    bad = next(f for f in report["findings"] if f["code"] == "PA207")
    assert (bad["step"], bad["evidence"]["ranks"], bad["evidence"]["entries of the batch"]) == (3, [1], [5])
    assert "an input was inf" in bad["message"]


FSDP = DDP.replace("nn.parallel.DistributedDataParallel(", "shard(").replace(
    "from torch import nn\n",
    """from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
def shard(model):
    return fully_shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32))
""",
)


@pytest.mark.slow
def test_sharded_models_are_looked_at_and_never_called_by_one_process_alone(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(FSDP)
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "train.py"]
    alone = subprocess.run([sys.executable, *launch], capture_output=True, text=True, cwd=tmp_path, timeout=120)
    line = [sys.executable, "-m", "preamp", "doctor", "--every", "2", "--out", "out", *launch]
    watched = subprocess.run(line, capture_output=True, text=True, cwd=tmp_path, timeout=200)
    assert (watched.returncode, watched.stdout) == (alone.returncode, alone.stdout), watched.stderr
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert not any(process["failed"] for process in report["processes"])
    assert report["steps"] == 5
    kinds = {row["kind"] for row in report["processes"][0]["telemetry"][0]["rows"]}
    assert kinds == {"activation", "activation gradient", "weight", "gradient"}
    (found,) = [finding for finding in report["findings"] if finding["code"] == "PA207"]
    assert (found["file"], found["step"], found["evidence"]) == (
        "train.py", 3, {"entries of the batch": [5], "ranks": [1]},
    )  # fmt: skip
