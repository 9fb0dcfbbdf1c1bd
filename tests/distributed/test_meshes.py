"""FSDP2 on four ranks, on meshes of two dimensions too: four ranks know, and do, what one process does."""

from __future__ import annotations

import math
from itertools import chain
from typing import Any

import pytest
import torch

from .meshes import CASES, KINDS, build

BOUNDS = {"O0": 1e-5, "O1": 5e-3, "O2": 5e-3, "O4": 3e-2, "O5": 3e-2}
"""How far the end may be from that of one process, over the way trained."""

ROUGH = {"AdamW in 8 bits": 3e-2, "Muon": 3e-2, "Lion": 3e-2}
"""What rounds by chances of each rank's own, in bfloat16, or to a sign."""

RANKS = 4
pytestmark = pytest.mark.slow  # several processes train for half a minute


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("level", "maker"), CASES)
def test_ranks_agree_and_step_as_one_process(told: list[dict[str, Any]], kind: str, level: str, maker: str) -> None:
    alone = told[0][f"alone {level} {maker}"]
    every = [rank[f"{kind} {level} {maker}"] for rank in told]
    sick = [each["norms"].pop(3) for each in every]
    assert all(each == every[0] for each in every)
    assert every[0]["skips"] == alone["skips"] == [False, False, False, True, False]
    assert every[0]["names"] == alone["names"]
    assert not math.isfinite(sick[-1])  # copies of a shard differ there, as only the last rank's was spoilt
    assert kind == "hybrid" or not any(map(math.isfinite, sick))
    wanted = [norm for index, norm in enumerate(alone["norms"]) if index != 3]
    bound = max(BOUNDS[level], ROUGH.get(maker, 0))
    assert every[0]["norms"] == pytest.approx(wanted, rel=bound)
    start = torch.cat([p.detach().flatten() for p in build().parameters()])
    mine, theirs = (torch.tensor([*chain(*each["weights"])]) for each in (every[0], alone))
    if maker == "Muon" and level != "O0":  # gradients of rank 4: of their rounding Muon makes directions like any other
        bound = 0.3
    assert float((mine - theirs).norm() / (theirs - start).norm()) <= bound
