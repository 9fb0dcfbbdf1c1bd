"""Several processes against one on the joined batch, at every level: the same parameters after 50 steps, and skips.

Where the order of the arithmetic allows it they are the same bits: with the same batch on every rank the mean over
ranks is what each has. Else sums over rows are made in another order, in the dtype that the level computes in.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from .together import launch

pytestmark = pytest.mark.slow  # processes of their own; `test_parted` and `test_sharded` are always run

LEVELS = ("O0", "O1", "O2", "O4", "O5")
TOLERANCE = {"O0": 1e-5, "O1": 5e-3, "O2": 5e-3, "O4": 3e-2, "O5": 3e-2}
"""Distance of the ends, over the way from the start: a few units in the last place of float32, float16, bfloat16."""


def run(tmp_path: Path, ranks: int, wrapper: str, *levels: str) -> dict[str, dict[str, Any]]:
    out = tmp_path / "told.json"
    ran = launch("equal", ranks, wrapper, str(out), *levels)
    assert ran.returncode == 0, ran.stderr[-3000:]
    told: dict[str, dict[str, Any]] = json.loads(out.read_text())
    assert len(told) == 2 * len(levels)
    return told


def check(told: dict[str, dict[str, Any]], *, exact: bool = False) -> None:
    for what, facts in told.items():
        level = what.split()[0]
        assert facts["ranks alike"], what  # parameters, scales, norms: bit for bit
        assert facts["scales as alone"], what
        assert facts["skipped"] == facts["skipped alone"] == 3, what
        assert facts["apart"] <= (0.0 if exact else TOLERANCE[level]), (what, facts["apart"])


@pytest.mark.slow
def test_two_ranks_end_where_one_does(tmp_path: Path) -> None:
    check(run(tmp_path, 2, "ddp", *LEVELS))


@pytest.mark.slow
def test_four_ranks_end_where_one_does(tmp_path: Path) -> None:
    check(run(tmp_path, 4, "ddp", *LEVELS))


@pytest.mark.slow
def test_options_of_the_wrapper_change_nothing(tmp_path: Path) -> None:
    check(run(tmp_path, 2, "ddp,gradient_as_bucket_view,find_unused_parameters", "O2", "O5"))


@pytest.mark.slow
def test_gradients_in_16_bits_on_the_wire(tmp_path: Path) -> None:
    check(run(tmp_path, 2, "ddp,hook", "O1"))


def test_the_same_batch_on_all_ranks_gives_the_same_bits(tmp_path: Path) -> None:
    check(run(tmp_path, 2, "ddp,same,static_graph", "O0", "O2", "O5"), exact=True)  # all levels with four ranks


@pytest.mark.slow
def test_the_same_batch_on_four_ranks_gives_the_same_bits(tmp_path: Path) -> None:
    check(run(tmp_path, 4, "ddp,same", *LEVELS), exact=True)
