"""Epsilons: which of them survive in the dtype they are added in, and what safe_eps writes instead."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn

import preamp
from preamp.eps import SAFE_FP16_EPS, safe_eps
from preamp.errors import PreampWarning

LOW_FP16 = preamp.policy("O3")
LOW_BF16 = preamp.policy("params=bf16,norms=bf16,masters=no")


def parameters(dtype: torch.dtype = torch.float16, count: int = 1) -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(3, dtype=dtype)) for _ in range(count)]


def adam(dtype: torch.dtype = torch.float16, **options: Any) -> torch.optim.Adam:
    return torch.optim.Adam(parameters(dtype), 1e-3, **options)


@pytest.mark.parametrize(
    ("eps", "verdict", "becomes", "suggested"),
    [
        (1e-8, "zero", 0.0, SAFE_FP16_EPS),
        (2.0**-25, "zero", 0.0, SAFE_FP16_EPS),
        (1e-7, "subnormal", 2 * 2.0**-24, SAFE_FP16_EPS),
        (1e-5, "subnormal", 168 * 2.0**-24, SAFE_FP16_EPS),
        (2.0**-14, "fine", 2.0**-14, 2.0**-14),
        (1e-4, "fine", 1e-4, 1e-4),
        (0.0, "fine", 0.0, 0.0),
    ],
)
def test_what_an_epsilon_becomes_in_float16(eps: float, verdict: str, becomes: float, suggested: float) -> None:
    (row,) = safe_eps(adam(eps=eps), LOW_FP16)
    assert (row.group, row.eps, row.dtype, row.verdict) == (0, eps, torch.float16, verdict)
    assert row.becomes == pytest.approx(becomes, rel=2**-11)
    assert row.suggested == suggested
    assert row.fine == (verdict == "fine")


def test_the_message_names_the_group_the_epsilon_and_the_dtype() -> None:
    (row,) = safe_eps(adam(), LOW_FP16)
    assert str(row) == "param_groups[0]: eps=1e-08 rounds to zero in fp16"
    (row,) = safe_eps(adam(eps=1e-7), LOW_FP16)
    assert str(row) == "param_groups[0]: eps=1e-07 becomes the subnormal 1.19e-07 in fp16"
    (row,) = safe_eps(adam(eps=1e-3), LOW_FP16)
    assert str(row) == "param_groups[0]: eps=0.001 is fine in fp16"


def test_the_verdict_is_what_adam_does() -> None:
    """A parameter without a gradient yet: 0 / (sqrt(0) + eps) is nan just when the epsilon is zero."""
    for eps in (1e-8, 1e-4):
        parameter = nn.Parameter(torch.ones(2, dtype=torch.float16))
        optimizer = torch.optim.Adam([parameter], 1e-3, eps=eps, foreach=False, fused=False)
        parameter.grad = torch.zeros(2, dtype=torch.float16)
        (row,) = safe_eps(optimizer, LOW_FP16)
        optimizer.step()
        assert bool(parameter.isnan().all()) == (row.verdict == "zero")


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O4", "O5"])
def test_levels_whose_state_is_float32_are_fine(level: str) -> None:
    (row,) = safe_eps(adam(preamp.policy(level).params), preamp.policy(level))
    assert row.fine and row.dtype is torch.float32 and row.becomes == pytest.approx(1e-8)


def test_bfloat16_has_the_range() -> None:
    (row,) = safe_eps(adam(torch.bfloat16), LOW_BF16)
    assert row.fine and row.dtype is torch.bfloat16
    assert row.becomes == pytest.approx(1e-8, rel=2**-8)
    (row,) = safe_eps(adam(torch.bfloat16, eps=1e-41), LOW_BF16)
    assert row.verdict == "zero" or row.verdict == "subnormal"


def test_the_coarsest_dtype_of_a_group_decides() -> None:
    mixed = [*parameters(torch.float32), *parameters(torch.float16)]
    (row,) = safe_eps(torch.optim.Adam(mixed), LOW_FP16)
    assert row.dtype is torch.float16 and row.verdict == "zero"


def test_several_groups_each_have_a_row() -> None:
    optimizer = torch.optim.AdamW([{"params": parameters(), "eps": eps} for eps in (1e-8, 1e-3, 1e-6)])
    rows = safe_eps(optimizer, LOW_FP16)
    assert [(row.group, row.verdict) for row in rows] == [(0, "zero"), (1, "fine"), (2, "subnormal")]
    assert [group["eps"] for group in optimizer.param_groups] == [1e-8, 1e-3, 1e-6]  # looking writes nothing


def test_apply_writes_what_it_suggests_and_leaves_what_is_fine() -> None:
    optimizer = torch.optim.AdamW(
        [{"params": parameters(), "eps": 1e-8}, {"params": parameters(), "eps": 1e-3}, {"params": parameters()}],
        eps=1e-6,
    )
    rows = safe_eps(optimizer, LOW_FP16, apply=True)
    assert all(row.fine for row in rows)
    assert [row.eps for row in rows] == [SAFE_FP16_EPS, 1e-3, SAFE_FP16_EPS]
    assert [group["eps"] for group in optimizer.param_groups] == [SAFE_FP16_EPS, 1e-3, SAFE_FP16_EPS]
    assert safe_eps(optimizer, LOW_FP16) == rows


def test_optimizers_without_an_epsilon_give_no_rows() -> None:
    assert safe_eps(torch.optim.SGD(parameters(), 0.1), LOW_FP16) == ()
    assert safe_eps(torch.optim.SGD(parameters(), 0.1), LOW_FP16, apply=True) == ()


def test_a_pair_of_epsilons_as_adafactor_has() -> None:
    optimizer = torch.optim.Adafactor(parameters(), 1e-2)  # its first epsilon is None: that of the dtype
    assert safe_eps(optimizer, LOW_FP16) == ()
    optimizer = torch.optim.Adafactor(parameters(), 1e-2, eps=(1e-30, 1e-3))
    (row,) = safe_eps(optimizer, LOW_FP16)
    assert (row.verdict, row.eps) == ("zero", 1e-30)
    (row,) = safe_eps(optimizer, LOW_FP16, apply=True)
    assert row.fine and optimizer.param_groups[0]["eps"] == (SAFE_FP16_EPS, 1e-3)
    optimizer.param_groups[0]["params"][0].grad = torch.ones(3, dtype=torch.float16)
    optimizer.step()


# -- what prepare() says of it


def _prepare(level: str, **options: Any) -> list[str]:
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 2))
    first, last = list(model[0].parameters()), list(model[2].parameters())
    groups = [{"params": first}, {"params": [*model[1].parameters(), *last]}]
    optimizer = torch.optim.Adam(groups, 1e-3, **options)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with preamp.prepare(model, optimizer, level=level):
            pass
    assert all(issubclass(w.category, PreampWarning) for w in caught)
    assert all(w.filename == __file__ for w in caught)  # points at the caller, not into preamp
    return [str(w.message) for w in caught]


def test_prepare_warns_once_of_vanishing_epsilons() -> None:
    (message,) = _prepare("O3")
    assert "Adam" in message and "eps=1e-08 rounds to zero in fp16" in message and "eps=0.0001" in message
    assert "param_groups[0]" in message and "param_groups[1]" in message


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O4", "O5"])
def test_prepare_is_silent_where_the_state_is_float32(level: str) -> None:
    assert _prepare(level) == []


def test_prepare_is_silent_when_the_epsilon_survives() -> None:
    assert _prepare("O3", eps=1e-4) == []
    assert len(_prepare("O3", fused=True)) == 1


def test_muons_epsilon_is_in_bfloat16() -> None:
    (row,) = safe_eps(preamp.optim.Muon([nn.Parameter(torch.ones(3, 3, dtype=torch.float16))]), LOW_FP16)
    assert row.dtype is torch.bfloat16 and row.fine
