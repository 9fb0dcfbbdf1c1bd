"""Checkpoints: amp.state_dict, masters in the optimizer's, models loaded at any moment."""

from __future__ import annotations

import copy
import warnings
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from preamp.compat.apex import amp
from preamp.errors import PreampWarning

from .toys import mlp, through_a_file, train


class Wrapper:
    """An optimizer around another, with few of its methods and states in a layout of its own."""

    def __init__(self, params: Any) -> None:
        self.inner = torch.optim.SGD(params, 0.1, momentum=0.9)
        self.param_groups, self.state = self.inner.param_groups, self.inner.state
        self.step, self.zero_grad = self.inner.step, self.inner.zero_grad

    def state_dict(self) -> dict[str, Any]:
        return {"inner": self.inner.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.inner.load_state_dict(state["inner"])
        self.param_groups, self.state = self.inner.param_groups, self.inner.state


KINDS: dict[str, Callable[[Any], Any]] = {
    "SGD": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9),
    "AdamW": lambda p: torch.optim.AdamW(p, 1e-2, eps=1e-6),
    "AdamW fused": lambda p: torch.optim.AdamW(p, 1e-2, fused=True),
    "RMSprop": lambda p: torch.optim.RMSprop(p, 1e-3),
    "wrapper": Wrapper,
}


def made(level: str, kind: str, seed: int = 0, **options: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = mlp(seed)
    optimizer = KINDS[kind](model.parameters())
    amp.initialize(model, optimizer, opt_level=level, verbosity=0, **options)
    return model, optimizer


def all_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [p.detach().float().clone() for p in amp.master_params(optimizer)]


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3", "O4", "O5"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("order", ["model first", "optimizer first", "before initialize"])
def test_resume_is_bit_for_bit(level: str, kind: str, order: str) -> None:
    if level == "O3" and kind not in ("SGD", "wrapper"):
        pytest.skip("squared gradients and an eps of 1e-8 are nothing in float16: O3 diverges, whatever is loaded")
    if kind == "wrapper" and order == "before initialize" and level in ("O2", "O5"):
        pytest.skip("only groups of torch's layout carry masters to an initialize that is yet to come")
    model, optimizer = made(level, kind)
    train(model, optimizer, 5)
    saved = through_a_file({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "amp": amp.state_dict()})
    expected = train(model, optimizer, 5, start=5)
    weights = all_of(optimizer)
    amp.close()

    model = mlp(1)
    optimizer = KINDS[kind](model.parameters())
    parts = {"model": model, "optimizer": optimizer}
    if order != "before initialize":
        amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    for name in reversed(parts) if order == "optimizer first" else parts:
        parts[name].load_state_dict(saved[name])  # type: ignore[operator]
    if order == "before initialize":
        amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    amp.load_state_dict(saved["amp"])
    again = optimizer.state_dict()  # saved once more, before there are masters
    assert train(model, optimizer, 5, start=5) == expected
    assert all(torch.equal(a, b) for a, b in zip(weights, all_of(optimizer), strict=True))
    optimizer.load_state_dict(again)


def test_masters_of_other_weights_are_left_out_and_a_warning_says_so() -> None:
    model, optimizer = made("O2", "SGD")
    train(model, optimizer, 5)
    saved = through_a_file(optimizer.state_dict())
    amp.close()
    model = mlp(1)
    optimizer = KINDS["SGD"](model.parameters())
    optimizer.load_state_dict(saved)
    amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
    with pytest.warns(UserWarning, match="amp.initialize") as told:
        optimizer.zero_grad()
    assert [each.filename for each in told] == [__file__]
    for p, master in zip(model.parameters(), amp.master_params(optimizer), strict=True):
        assert torch.equal(p.float(), master)


def test_state_that_existed_before_initialize_stays_float32() -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    model(torch.randn(4, 6)).sum().mul(1e-6).backward()
    optimizer.step()
    before = [state["momentum_buffer"].clone() for state in optimizer.state.values()]
    amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
    optimizer.zero_grad()
    after = [optimizer.state[p]["momentum_buffer"] for p in amp.master_params(optimizer)]
    assert all(torch.equal(a, b) and b.dtype is torch.float32 for a, b in zip(before, after, strict=True))


def test_a_checkpoint_of_apex_itself_loads() -> None:
    """It has no masters: they are made from the model's weights, as they were there."""
    model, optimizer = made("O2", "SGD")
    train(model, optimizer, 3)
    saved = optimizer.state_dict()
    for group in saved["param_groups"]:
        del group["amp_master_params"]
    weights = model.state_dict()
    amp.close()
    model, optimizer = made("O2", "SGD", seed=1)
    model.load_state_dict(weights)
    optimizer.load_state_dict(saved)
    for p, master in zip(model.parameters(), amp.master_params(optimizer), strict=True):
        assert torch.equal(p.float(), master)
    train(model, optimizer, 2)


def test_a_checkpoint_with_masters_loads_without_amp() -> None:
    model, optimizer = made("O2", "SGD")
    train(model, optimizer, 3)
    saved = through_a_file(optimizer.state_dict())
    amp.close()
    plain = mlp()
    other = torch.optim.SGD(plain.parameters(), 0.1, momentum=0.9)
    other.load_state_dict(saved)
    assert all(state["momentum_buffer"].dtype is torch.float32 for state in other.state.values())


def test_masters_of_another_model_are_refused_and_change_nothing() -> None:
    model, optimizer = made("O2", "SGD")
    train(model, optimizer, 2)
    saved = optimizer.state_dict()
    before = all_of(optimizer)
    saved["param_groups"][0]["amp_master_params"][0] = torch.zeros(2, 2)
    with pytest.raises(ValueError, match=r"\[\(2, 2\), .*and those of the optimizer \[\(8, 6\), "):
        optimizer.load_state_dict(saved)
    assert all(torch.equal(a, b) for a, b in zip(before, all_of(optimizer), strict=True))


@pytest.mark.parametrize("whole", [True, False])
def test_weights_loaded_after_masters_exist_stay(whole: bool) -> None:
    """With Apex the masters overwrite them at the next step."""
    model, optimizer = made("O2", "SGD")
    train(model, optimizer, 2)
    given: Any = {k: torch.full_like(v, 1 / 3) if v.is_floating_point() else v for k, v in model.state_dict().items()}
    if whole:
        model.load_state_dict(given)
    else:
        model[0].load_state_dict({"weight": given["0.weight"], "bias": given["0.bias"]})  # type: ignore[index]
    masters = list(amp.master_params(optimizer))
    assert torch.equal(masters[0], given["0.weight"])  # to the last bit, more than the model can hold
    assert torch.equal(masters[-1], given["3.bias"]) == whole
    optimizer.zero_grad()
    optimizer.step()  # without gradients: masters are rounded into the model
    assert torch.equal(model[0].weight, given["0.weight"].half())  # type: ignore[index]


def test_the_format_of_amps_own_state() -> None:
    made("O2", "SGD", num_losses=2)
    state = amp.state_dict()
    assert type(state) is OrderedDict and state == {
        "loss_scaler0": {"loss_scale": 65536.0, "unskipped": 0},
        "loss_scaler1": {"loss_scale": 65536.0, "unskipped": 0},
    }
    destination: dict[str, Any] = {"epoch": 3}
    assert amp.state_dict(destination) is destination and set(destination) == {"epoch", "loss_scaler0", "loss_scaler1"}
    amp.load_state_dict({"loss_scaler0": {"loss_scale": 4.0, "unskipped": 7}, "loss_scaler1": state["loss_scaler1"]})
    assert amp.state_dict()["loss_scaler0"] == {"loss_scale": 4.0, "unskipped": 7}


def test_amp_state_that_does_not_fit(capsys: pytest.CaptureFixture[str]) -> None:
    made("O1", "SGD")
    one = {"loss_scale": 2.0, "unskipped": 1}
    amp.load_state_dict({"loss_scaler0": one, "loss_scaler1": one})
    assert capsys.readouterr().out.splitlines() == [
        "Warning: state_dict contains 2 entries, while 1 loss_scalers are used",
        "Skipping loss_scaler[1], since num_losses was set to 1",
    ]
    assert amp.state_dict() == {"loss_scaler0": one}
    with pytest.raises(RuntimeError, match=r"Error\(s\) in loading state_dict. Unexpected key\(s\).*\"epoch\""):
        amp.load_state_dict({"loss_scaler0": one, "epoch": 3})


def test_amps_state_is_never_dropped_in_silence() -> None:
    saved = {"loss_scaler0": {"loss_scale": 4.0, "unskipped": 7}}
    for attempt in (lambda: amp.load_state_dict(saved), amp.state_dict):
        with pytest.raises(AttributeError, match="loss_scalers"):
            attempt()
    amp.initialize(mlp(), enabled=False, verbosity=0)
    with pytest.raises(AttributeError, match="loss_scalers"):
        amp.load_state_dict(saved)
    made("O1", "SGD")
    amp.load_state_dict(saved)
    with pytest.warns(PreampWarning, match="after the last amp.initialize"):
        made("O2", "SGD")
    amp.load_state_dict(saved)
    amp.close()
    model, optimizer = made("O1", "SGD")
    amp.load_state_dict(saved)
    train(model, optimizer, 1)
    made("O1", "SGD")  # after it was used, as Apex allows


@pytest.mark.parametrize("update", ["mul_, add_", "copy_", "lerp_"])
@pytest.mark.parametrize("level", ["O2", "O3", "O5"])
def test_an_average_that_is_updated_through_state_dict_is_told(level: str, update: str) -> None:
    model, optimizer = made(level, "SGD")
    average, told = copy.deepcopy(model), []
    for _ in range(3):
        train(model, optimizer, 1)
        new = model.state_dict()
        with warnings.catch_warnings(record=True) as each, torch.no_grad():
            warnings.simplefilter("always")
            for name, value in average.state_dict().items():
                if not value.is_floating_point():
                    continue
                if update == "copy_":
                    value.copy_(value * 0.5 + new[name] * 0.5)
                elif update == "lerp_":
                    value.lerp_(new[name], 0.5)
                else:
                    value.mul_(0.5).add_(new[name], alpha=0.5)
        told.append(any("float32 copies" in str(warning.message) for warning in each))
    assert told == [False, True, True]
    with pytest.warns(PreampWarning, match="float32 copies") as warned:
        saved = average.state_dict()
    assert {each.filename for each in warned} == {__file__}
    saved["0.bias"].zero_()
    average.load_state_dict(saved)
    assert not average.state_dict()["0.bias"].any()  # and nothing is said
