"""The plan against bytes that two processes counted (`plan_ranks`): FSDP2, DDP, ZeroRedundancyOptimizer."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
from torch import nn

from preamp.plan import plan

from . import plan_ranks


@pytest.fixture(scope="module")
def counted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What two processes counted (`plan_ranks`)."""
    line = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    folder = tmp_path_factory.mktemp("ranks")
    ran = subprocess.run([*line, plan_ranks.__file__], capture_output=True, text=True, cwd=folder, timeout=240)
    assert ran.returncode == 0, ran.stderr[-3000:]
    told: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    return told


@pytest.mark.parametrize("level", ["O0", "O2", "O4", "O5", "O5 --no-reshard", "O5 --states 8bit"])
def test_fsdp2_on_two_ranks(counted: dict[str, Any], level: str) -> None:
    seen = counted[f"fsdp2 {level}"]
    paper = plan(
        plan_ranks.build(), level=level.split()[0], world=2, shard="fsdp2", reshard="--no-reshard" not in level,
        states="8bit" if "8bit" in level else "float32",
    )  # fmt: skip
    for kind in ("parameters", "gradients", "states"):
        assert paper.bytes_of(kind) == seen[kind]
    gathers = paper.bytes_of("all-gather, forward") + paper.bytes_of("all-gather, backward")
    reduced = paper.bytes_of("reduce-scatter of gradients")
    assert seen["sent"] == {"_allgather_base_": gathers, "_reduce_scatter_base_": reduced}
    assert paper.sent == gathers + reduced


def test_fsdp2_gathers_units(counted: dict[str, Any]) -> None:
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
    paper = plan(model, level="O5", world=2, shard="fsdp2", units=4)
    assert [paper.bytes_of("gathered weights")] == [2 * one for one in counted["units"]["one"]]
    assert counted["units"]["left"] == 0
    kept = plan(model, level="O5", world=2, shard="fsdp2", units=4, reshard=False)
    assert kept.bytes_of("gathered weights") == counted["units --no-reshard"]["left"] > 0


@pytest.mark.parametrize("level", ["O0", "O4", "O5", "O5 --bucket-view"])
def test_ddp_on_two_ranks(counted: dict[str, Any], level: str) -> None:
    seen, view = counted[f"ddp {level}"], "view" in level
    paper = plan(plan_ranks.build(), level=level.split()[0], world=2, shard="ddp", bucket_view=view)
    for kind in ("parameters", "gradients", "masters", "states"):
        assert paper.bytes_of(kind) == seen[kind]
    assert paper.bytes_of("all-reduce of gradients") == paper.sent == seen["reduced"]  # 2 (N-1)/N is 1
    assert paper.bytes_of("gradient buckets") == (0 if view else seen["reduced"])
    assert (seen["gradients lie in"] < len(list(plan_ranks.build().parameters()))) == view


@pytest.mark.parametrize("what", ["O0", "O5", "O5 split 8bit"])
def test_zero1_on_two_ranks(counted: dict[str, Any], what: str) -> None:
    seen, words = counted[f"zero1 {what}"], what.split()
    options = {"master": "split", "states": "8bit"} if len(words) > 1 else {}
    level = "O5,norms=bf16" if words[0] == "O5" else "O0"
    paper = plan(plan_ranks.build(), level=level, world=2, shard="zero1", **options)
    for kind in ("parameters", "gradients"):
        assert paper.bytes_of(kind) == seen[kind]
    for kind in ("masters", "states"):
        assert paper.bytes_of(kind) == pytest.approx(seen[f"{kind} of all ranks"] / 2, abs=4)
    largest = max(p.numel() for p in plan_ranks.build().parameters()) * 4
    assert abs(paper.bytes_of("masters") - seen["masters"]) <= largest
