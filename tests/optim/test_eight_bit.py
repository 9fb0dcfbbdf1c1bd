"""Adam and AdamW with `states="8bit"`: memory, quality, saving and loading."""

from __future__ import annotations

import copy
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import Parameter

from preamp.errors import OptimizerError
from preamp.optim import SGD, Adam, AdamW, Lion, Muon
from preamp.optim._eight_bit import NAMES

from .gradients import give, run

PAGE = Path(__file__).resolve().parents[2] / "docs" / "optimizers.md"
BF16 = torch.bfloat16


def made(dtype: torch.dtype = BF16) -> list[Parameter]:
    torch.manual_seed(5)
    image = torch.randn(16, 12, 5, 5).to(memory_format=torch.channels_last)
    shapes = (torch.randn(70, 90), torch.randn(7), image, torch.randn(4095), torch.randn(4096), torch.randn(0, 2))
    return [Parameter(values.to(dtype)) for values in shapes]


def test_names_and_dtypes() -> None:
    for dtype in (BF16, torch.float32):
        params = made(dtype)
        optimizer = AdamW(params, states="8bit")
        run(optimizer, params, range(2))
        for p in params:
            state = {name: t for name, t in optimizer.state[p].items() if name not in ("step", "master")}
            dtypes = {name: t.dtype for name, t in state.items()}
            if p.numel() < 4096:
                assert dtypes == {"exp_avg": torch.float32, "exp_avg_sq": torch.float32}
                continue
            assert dtypes == {
                "exp_avg_8bit": torch.int8, "exp_avg_scale": torch.float32,
                "exp_avg_sq_8bit": torch.uint8, "exp_avg_sq_scale": torch.float32,
            }  # fmt: skip
            assert state["exp_avg_8bit"].stride() == p.stride()
            assert state["exp_avg_scale"].shape == (-(-p.numel() // 256),)


def test_small_parameters_are_stepped_as_without() -> None:
    ours, theirs = made(), made()
    run(Adam(ours, 1e-2, states="8bit"), ours, range(5))
    run(Adam(theirs, 1e-2), theirs, range(5))
    for a, b in zip(ours, theirs, strict=True):
        assert torch.equal(a, b) == (a.numel() < 4096)


def bytes_a_parameter(dtype: torch.dtype, kind: Any = AdamW, **arguments: Any) -> float:
    """Weight, gradient and states of a large parameter, counted."""
    param = Parameter(torch.randn(1024, 256).to(dtype))
    optimizer = kind([param], **arguments)
    param.grad = torch.randn_like(param)
    optimizer.step()
    held = [param, param.grad, *(t for name, t in optimizer.state[param].items() if name != "step")]
    return sum(t.numel() * t.element_size() for t in held) / param.numel()


@pytest.mark.parametrize(("kind", "moments"), [(Lion, 4), (Muon, 4), (partial(SGD, momentum=0.9), 4)])
@pytest.mark.parametrize(("master", "size"), [("float32", 4), ("split", 2), ("split24", 1), (None, 0)])
def test_bytes_a_parameter_of_the_other_optimizers(kind: Any, moments: int, master: str | None, size: int) -> None:
    rounding = "nearest" if master else "stochastic"
    assert bytes_a_parameter(BF16, kind, master=master, rounding=rounding) == 2 + 2 + moments + size


def test_the_table_of_the_page_is_counted() -> None:
    rows = re.findall(r"^\| (\w+) \| `(.+?)` \| ([\d.]+) \| ([\d.]+) \|$", PAGE.read_text(encoding="utf-8"), re.M)
    assert len(rows) == 6
    for name, arguments, wide, coded in rows:
        values = eval(f"dict({arguments})")
        dtype = {"float32": torch.float32, "bfloat16": BF16, "float16": torch.float16}[name]
        assert f"{bytes_a_parameter(dtype, **values):.2f}" == wide
        assert f"{bytes_a_parameter(dtype, **values, states='8bit'):.2f}" == coded


def test_misuse() -> None:
    with pytest.raises(OptimizerError, match="states='4bit'"):
        Adam(made(), states="4bit")
    with pytest.raises(OptimizerError, match="amsgrad"):
        AdamW(made(), states="8bit", amsgrad=True)
    params = made()
    optimizer = Adam(params, states="8bit")
    optimizer.param_groups[0]["amsgrad"] = True
    give(params, 0)
    with pytest.raises(OptimizerError, match="amsgrad"):
        optimizer.step()


def test_float64_keeps_its_own_states() -> None:
    (param,) = [Parameter(torch.randn(5000, dtype=torch.float64))]
    optimizer = Adam([param], states="8bit")
    run(optimizer, [param], range(1))
    assert optimizer.state[param]["exp_avg"].dtype is torch.float64


@pytest.mark.parametrize("kind", ["8bit", "float32"])
@pytest.mark.parametrize("lost", NAMES)
def test_saved_states_that_lack_one_are_refused_whole(lost: str, kind: str) -> None:
    """A moment that is not there would begin anew from zeros, beside one that goes on."""
    param = Parameter(torch.ones(5000))
    optimizer = AdamW([param], states="8bit")
    param.grad = torch.ones(5000)
    optimizer.step()
    saved = copy.deepcopy(optimizer.state_dict())
    other = AdamW([param], states=kind)
    other.step()
    before = copy.deepcopy(other.state_dict())
    for missing in (lambda states: states.pop(lost), lambda states: states.update({lost: None})):
        broken = copy.deepcopy(saved)
        missing(broken["state"][0])
        with pytest.raises(OptimizerError, match=f"'{lost}'"):
            other.load_state_dict(broken)
        assert str(other.state_dict()) == str(before)
    other.load_state_dict(saved)
