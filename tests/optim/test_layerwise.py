"""LAMB and NovoGrad against their formulas in float64, with low parameters, and with states saved to the bit."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from preamp.ledger import NoMasters
from preamp.optim import LAMB, NovoGrad

from ..kernels import plain
from ..rows import over
from .gradients import give

SHAPES = [(4, 3), (7,), (1,), (2, 3, 2)]


def made(dtype: torch.dtype = torch.float32) -> list[Parameter]:
    torch.manual_seed(3)
    return [Parameter(torch.randn(shape).to(dtype)) for shape in SHAPES]


CASES: dict[str, Callable[[list[Parameter]], torch.optim.Optimizer]] = {
    "LAMB": lambda p: LAMB(p, 1e-2),
    "LAMB without limit and decay": lambda p: LAMB(p, 1e-2, weight_decay=0.0, max_grad_norm=None),
    "LAMB in two groups": lambda p: LAMB([{"params": p[:2]}, {"params": p[2:]}], 1e-2),
    "NovoGrad": lambda p: NovoGrad(p, 1e-2),
    "NovoGrad with decay": lambda p: NovoGrad(p, 1e-2, weight_decay=0.1),
}


@pytest.mark.parametrize("name", CASES)
def test_by_the_formula(name: str) -> None:
    params = made()
    optimizer = CASES[name](params)
    formula = plain.Lamb if "LAMB" in name else plain.NovoGrad
    reference = formula(list(params), {"maximize": False, **optimizer.param_groups[0]})
    for step in range(25):
        reference.step(give(params, step))
        optimizer.step()
    for p, q in zip(params, reference.params, strict=True):
        assert torch.allclose(p.detach().double(), q, rtol=2e-5, atol=2e-6)


@over(name=CASES, dtype=[torch.float16, torch.bfloat16, torch.float64])
def test_states_without_masters_are_saved_to_the_bit(name: str, dtype: torch.dtype) -> None:
    """Moments have the dtype of the parameters then; NovoGrad's norms stay float32, also when they are loaded."""
    ours = CASES[name]

    def run(saves: bool) -> tuple[list[Tensor], list[dict[str, Tensor]]]:
        params = made(dtype)
        optimizer = ours(params)
        optimizer.lend(NoMasters())  # as a session at O3
        for step in range(6):
            give(params, step)
            optimizer.step()
            if saves and step == 3:
                state = copy.deepcopy(optimizer.state_dict())
                optimizer = ours(params)
                optimizer.lend(NoMasters())
                optimizer.load_state_dict(state)
        return [p.detach() for p in params], [optimizer.state[p] for p in params]

    (kept, before), (loaded, after) = run(False), run(True)
    assert all(map(torch.equal, kept, loaded))
    for one, other in zip(before, after, strict=True):
        assert {n: v.dtype for n, v in one.items()} == {n: v.dtype for n, v in other.items()}
        assert all(torch.equal(one[n], other[n]) for n in one)
