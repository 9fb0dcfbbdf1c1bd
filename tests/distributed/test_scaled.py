"""`preamp.GradScaler` where ranks hold parts: an infinity on one of them skips the step on all, and all scales fall."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from .parted import Words
from .scaled import CASES


@pytest.mark.parametrize("case", CASES, ids=str)
def test_ranks_agree_and_step_as_one_process(told: list[dict[str, Any]], case: tuple[Any, ...]) -> None:
    first, second = (each[str(case)] for each in told)
    alone = told[0][str((None, *case[1:]))]
    assert first == second
    assert first["skips"] == alone["skips"] == [False, False, True, False, False]
    assert first["scales"] == alone["scales"]
    torch.manual_seed(0)
    start = torch.cat([p.detach().flatten() for p in Words().parameters()])
    mine, theirs = torch.tensor(first["weights"]), torch.tensor(alone["weights"])
    assert float((mine - theirs).norm() / (theirs - start).norm()) <= 3e-2
