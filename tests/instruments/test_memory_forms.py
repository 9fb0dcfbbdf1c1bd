"""What the pages say of AdamW's forms: counted bytes, and losses of the committed runs beside float32 masters."""

from __future__ import annotations

import json
import statistics
from functools import partial
from pathlib import Path

import pytest
import torch
from benchmarks.options import OPTIONS
from benchmarks.rivals import TOLD, WAYS, FlashOptimsCodes, bytes_of, frozen
from tools.docs_results import newest

from preamp.optim import AdamW
from preamp.zoo import TASKS

ROOT = Path(__file__).resolve().parents[2]
BYTES = {
    "torch AdamW, float32 weights": 16, "torch AdamW, bfloat16 weights": 8, "torch AdamW, masters by hand": 16,
    "master float32": 16, "master split": 14, "master split24": 13, "no master, stochastic rounding": 12,
    "master float32, 8-bit states": 10.03, "master split, 8-bit states": 8.03, "master split24, 8-bit states": 7.03,
    "no master, stochastic rounding, 8-bit states": 6.03, "master split24, 8-bit states, released": 5.03,
}  # fmt: skip


@pytest.mark.parametrize("name", BYTES)
def test_bytes_are_counted(name: str) -> None:
    assert round(bytes_of(name), 2) == BYTES[name]


def test_the_committed_table_has_every_way() -> None:
    path = newest(ROOT, "rivals")
    assert path is not None
    results = json.loads(path.read_text(encoding="utf-8"))
    counted = {row["name"]: row["bytes"] for row in results["bytes"]}
    assert counted.keys() == WAYS.keys() | TOLD.keys()
    assert all(round(counted[name], 2) == size for name, size in BYTES.items())
    assert [row["name"] for row in results["bytes"] if not row["counted"]] == list(TOLD)
    assert {len(row["losses"]) for row in results["rows"]} == {3}
    lengths = {row["name"]: row["length"] for row in results["steps"]}
    ours = lengths.pop("8-bit states")
    assert 0.9 < ours < 1.1 and all(length < 0.5 for length in lengths.values())


def test_losses_at_seven_bytes_are_within_the_seeds_of_float32_masters() -> None:
    path = newest(ROOT, "options")
    assert path is not None
    rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
    losses = {(row["network"], row["name"]): row["losses"] for row in rows if row["level"] == "O5"}
    assert {network for network, _ in losses} == set(TASKS)
    assert {name for network, name in losses if network == "bert"} == set(OPTIONS)
    for network in TASKS:
        wide, small = losses[network, "master float32"], losses[network, "master split24, 8-bit states"]
        spread = max(wide) - min(wide)
        assert statistics.fmean(small) <= max(wide)
        assert min(wide) - spread <= statistics.fmean(small), "better than chance is wrong, too"


def test_second_moments_that_freeze_shorten_steps() -> None:
    torch.manual_seed(0)
    short = frozen(FlashOptimsCodes, 500, 1500)
    assert short < 0.8 < frozen(partial(AdamW, states="8bit"), 500, 1500) < 1.2
