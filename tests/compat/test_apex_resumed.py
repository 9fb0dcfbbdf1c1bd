"""States of Apex's fused optimizers go on in preamp.optim: from its shim, and as Apex itself saves them."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import Parameter

import preamp
from preamp.compat.apex import amp
from preamp.compat.apex.optimizers import (
    FusedAdagrad,
    FusedAdam,
    FusedLAMB,
    FusedMixedPrecisionLamb,
    FusedNovoGrad,
    FusedSGD,
)
from preamp.errors import OptimizerError
from preamp.optim import LAMB, SGD, Adagrad, Adam, AdamW, NovoGrad

from .toys import scaled_backward, through_a_file

Make = Callable[[Any], Any]

PAIRS: dict[str, tuple[Make, Make]] = {
    "AdamW": (lambda p: FusedAdam(p, weight_decay=0.1), AdamW),
    "Adam": (lambda p: FusedAdam(p, adam_w_mode=False, weight_decay=0.1), Adam),
    "capturable Adam": (lambda p: FusedAdam(p, capturable=True), AdamW),
    "LAMB": (lambda p: FusedLAMB(p, weight_decay=0.1, grad_averaging=False, max_grad_norm=0.5), LAMB),
    "LAMB, L2": (
        lambda p: FusedLAMB(p, adam_w_mode=False, bias_correction=False),
        lambda p: LAMB(p, adam_w_mode=False),
    ),
    "LAMB, NVLAMB": (
        lambda p: FusedLAMB(p, use_nvlamb=True, weight_decay=0.0, max_grad_norm=0.0),
        lambda p: LAMB(p, use_nvlamb=True),
    ),
    "mixed LAMB": (lambda p: FusedMixedPrecisionLamb(p, step=7), LAMB),
    "NovoGrad": (lambda p: FusedNovoGrad(p, weight_decay=0.1, betas=(0.95, 0.98)), NovoGrad),
    "NovoGrad, largest": (
        lambda p: FusedNovoGrad(p, norm_type=0, init_zero=True, grad_averaging=False, bias_correction=False),
        NovoGrad,
    ),
    "NovoGrad, decay inside": (
        lambda p: FusedNovoGrad(p, reg_inside_moment=True, weight_decay=0.1),
        lambda p: NovoGrad(p, reg_inside_moment=True),
    ),
    "SGD": (lambda p: FusedSGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1), SGD),
    "Adagrad": (lambda p: FusedAdagrad(p, weight_decay=0.1), Adagrad),
}


def made(*dtypes: torch.dtype) -> list[Parameter]:
    torch.manual_seed(3)
    kinds = itertools.cycle(dtypes or (torch.float32,))
    return [Parameter(torch.randn(shape).to(next(kinds))) for shape in [(4, 3), (7,), (5000,), (2, 3, 2)]]


def run(optimizer: Any, params: list[Parameter], steps: range) -> None:
    for step in steps:
        torch.manual_seed(step)
        for param in params:
            param.grad = torch.randn(param.shape).to(param.dtype)
        optimizer.step()


def groups_of(params: list[Parameter]) -> list[dict[str, Any]]:
    return [{"params": params[:3]}, {"params": params[3:], "lr": 0.003}]


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize("dtypes", [(torch.float32,), (torch.float32, torch.bfloat16)], ids=["float32", "mixed"])
def test_a_run_goes_on(name: str, dtypes: tuple[torch.dtype, ...]) -> None:
    theirs, ours = PAIRS[name]
    params = made(*dtypes)
    before = theirs(groups_of(params))
    run(before, params, range(20))
    saved = through_a_file(before.state_dict())
    twins = [Parameter(p.detach().clone()) for p in params]
    optimizer = ours(groups_of(twins))
    kept = copy.deepcopy(saved)
    optimizer.load_state_dict(saved)
    assert repr(kept) == repr(saved), "what was given stays as it is"
    assert all("step" not in group for group in optimizer.param_groups)
    run(before, params, range(20, 25))
    run(optimizer, twins, range(20, 25))
    low = {torch.float32: {"rtol": 1e-5, "atol": 1e-6}, torch.bfloat16: {"rtol": 0.02, "atol": 0.02}}  # with masters
    for p, q in zip(params, twins, strict=True):
        torch.testing.assert_close(q, p, **low[p.dtype])
    steps = {float(row["step"]) for row in optimizer.state_dict()["state"].values() if "step" in row}
    assert steps == {"mixed LAMB": {32.0}, "SGD": set(), "Adagrad": {5.0}}.get(name, {25.0})


@pytest.mark.parametrize(
    "options",
    [{}, {"master": "split"}, {"master": None}, {"states": "8bit"}, {"states": "8bit", "master": "split"}],
    ids=str,
)
def test_other_masters_and_states_of_8_bits(options: dict[str, Any]) -> None:
    params = made(torch.bfloat16)
    before = FusedAdam(params, master_weights=True)
    run(before, params, range(20))
    saved, twins = before.state_dict(), [Parameter(p.detach().clone()) for p in params]
    optimizer = AdamW(twins, **options)
    optimizer.load_state_dict(copy.deepcopy(saved))
    run(before, params, range(20, 25))
    run(optimizer, twins, range(20, 25))
    for p, q in zip(params, twins, strict=True):
        torch.testing.assert_close(q, p, rtol=0.02, atol=0.02)
        row = optimizer.state[q]
        assert float(row["step"]) == 25
        assert ("exp_avg_scale" in row) == ("states" in options and q.numel() >= 4096)
        own = {"split": "master_bits", None: None}.get(options.get("master", "float32"), "master")
        assert {"master", "master_bits"} & row.keys() == ({own} if own else set()), "no master that no step follows"
        if not options:
            assert torch.equal(p, q)
            torch.testing.assert_close(row["master"], before.state[p]["master"])


def test_a_sessions_optimizer_keeps_no_master_of_a_checkpoint() -> None:
    """It would be saved, and written over newer weights when that is loaded."""
    params = made(torch.bfloat16)
    before = FusedAdam(params, master_weights=True)
    run(before, params, range(3))
    model = nn.ParameterList(made())
    optimizer = AdamW(model.parameters())
    session = preamp.prepare(model, optimizer, level="O5")
    optimizer.load_state_dict(before.state_dict())
    assert [set(row) for row in optimizer.state_dict()["state"].values()] == [{"exp_avg", "exp_avg_sq", "step"}] * 4
    session.close()


# -- as Apex itself saves them


def adam_of_apex(**options: Any) -> dict[str, Any]:
    """What FusedAdam saves for one parameter of three entries, all of whose gradients were 1, after 20 steps."""
    moments = {"exp_avg": torch.full((3,), 1 - 0.9**20), "exp_avg_sq": torch.full((3,), 1 - 0.999**20)}
    group = {
        "lr": 0.1, "bias_correction": True, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0, "step": 20,
        "params": [0], **options,
    }  # fmt: skip
    return {"state": {0: moments}, "param_groups": [group]}


def weight(size: int = 3, dtype: torch.dtype = torch.float32) -> Parameter:
    param = Parameter(torch.zeros(size, dtype=dtype))
    param.grad = torch.ones(size, dtype=dtype)
    return param


@pytest.mark.parametrize("step", [20, torch.tensor([20], dtype=torch.int32), torch.tensor(20.0)], ids=repr)
@pytest.mark.parametrize("kind", [Adam, AdamW])
def test_a_fused_adam_by_hand(kind: Any, step: Any) -> None:
    param = weight()
    optimizer = kind([param], weight_decay=0.5)
    optimizer.load_state_dict(adam_of_apex(step=step))
    optimizer.step()
    assert torch.allclose(param, torch.tensor(-0.1)), "the moments, corrected for 21 steps, are 1"
    assert float(optimizer.state[param]["step"]) == 21


def test_a_fused_novograd_by_hand() -> None:
    """Norms are those of the parameters that had gradients: of the 16-bit ones, then of the others."""
    params = [weight(), weight(4, torch.float16), weight(5), weight(6), weight(7, torch.float16)]
    params[2].grad = None
    norms = [torch.tensor([4.0, 7.0]), torch.tensor([3.0, 6.0])]
    state = {i: {"exp_avg": torch.zeros_like(params[i])} for i in (0, 1, 3, 4)}
    group = {
        "lr": 0.1, "bias_correction": True, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0,
        "grad_averaging": True, "norm_type": 2, "init_zero": False, "step": 20, "exp_avg_sq": norms,
        "params": [0, 1, 2, 3, 4],
    }  # fmt: skip
    optimizer = NovoGrad(params)
    optimizer.load_state_dict({"state": state, "param_groups": [group]})
    assert [float(optimizer.state[params[i]]["norm"]) for i in (0, 1, 3, 4)] == [3.0, 4.0, 6.0, 7.0]
    assert params[2] not in optimizer.state and "exp_avg_sq" not in optimizer.param_groups[0]
    optimizer.step()
    wide = [weight(p.numel()) for p in params]  # what O2 has saved, of masters, goes to 16-bit parameters as well
    group["exp_avg_sq"] = [torch.zeros(0), torch.tensor([3.0, 4.0, 6.0, 7.0])]
    state = {i: {"exp_avg": torch.zeros_like(wide[i])} for i in (0, 1, 3, 4)}
    for targets in (wide, [weight(p.numel(), torch.bfloat16) for p in params]):
        optimizer = NovoGrad(targets)
        optimizer.load_state_dict({"state": state, "param_groups": [group]})
        assert [float(optimizer.state[targets[i]]["norm"]) for i in (0, 1, 3, 4)] == [3.0, 4.0, 6.0, 7.0]
        optimizer.step()


def test_bias_correction_that_was_off_matters_until_it_is_1() -> None:
    optimizer = AdamW([weight()])
    with pytest.raises(OptimizerError, match=r"bias_correction=False.*FusedAdam|bias_correction=False.*compat.apex"):
        optimizer.load_state_dict(adam_of_apex(bias_correction=False))
    assert not optimizer.state and optimizer.param_groups[0]["lr"] == 1e-3, "nothing has changed"
    optimizer.load_state_dict(adam_of_apex(bias_correction=False, step=20_000))
    assert float(optimizer.state[optimizer.param_groups[0]["params"][0]]["step"]) == 20_000


NORMS = [torch.zeros(0), torch.ones(1)]
REFUSED: dict[str, tuple[Any, dict[str, Any]]] = {
    "max_grad_norm=1.0": (AdamW, {"max_grad_norm": 1.0}),
    "grad_averaging=False": (Adam, {"grad_averaging": False}),
    "step": (AdamW, {"step": torch.zeros(3)}),
    "steps of its parameters": (LAMB, {"step": "many"}),
    "running norms": (AdamW, {"exp_avg_sq": NORMS}),
    "which norm is whose": (NovoGrad, {"exp_avg_sq": [torch.ones(1), torch.ones(1)]}),
    "two tensors": (NovoGrad, {"exp_avg_sq": torch.ones(1)}),
    "another optimizer's": (NovoGrad, {}),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_what_cannot_go_on_is_refused_and_nothing_changes(reason: str) -> None:
    kind, options = REFUSED[reason]
    optimizer = kind([weight()])
    before = repr(optimizer.state_dict())
    with pytest.raises(OptimizerError, match=reason):
        optimizer.load_state_dict(adam_of_apex(**options))
    assert repr(optimizer.state_dict()) == before


@pytest.mark.parametrize("kind", [Adam, AdamW, LAMB, NovoGrad, SGD, Adagrad, preamp.optim.Lion, preamp.optim.Muon])
def test_options_that_a_saved_group_lacks_are_those_of_the_optimizer(kind: Any) -> None:
    param, twin = (Parameter(torch.ones(4, 4)) for _ in range(2))
    optimizer, other = kind([param], lr=0.25), kind([{"params": [twin], "weight_decay": 0.5}])
    run(optimizer, [param], range(3))
    saved = optimizer.state_dict()
    saved["param_groups"] = [{"params": [0], "lr": 0.25}]
    other.load_state_dict(saved)
    assert other.param_groups[0]["lr"] == 0.25 and other.param_groups[0]["weight_decay"] == 0.5
    run(other, [twin], range(3, 5))


def test_a_group_may_have_a_max_grad_norm_of_the_users() -> None:
    param = weight()
    optimizer = AdamW([param])
    optimizer.param_groups[0]["max_grad_norm"] = 1.0
    optimizer.step()
    twin = AdamW([weight()])
    twin.load_state_dict(optimizer.state_dict())
    assert twin.param_groups[0]["max_grad_norm"] == 1.0


# -- a migrated script


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))


X = torch.randn(64, 8, generator=torch.Generator().manual_seed(1))


def loss_of(model: nn.Module) -> Tensor:
    return (model(X).float() - X[:, :1]).square().mean()


def train(model: nn.Module, optimizer: Any, steps: int) -> list[float]:
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = loss_of(model)
        scaled_backward(loss, optimizer)
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("name", ["AdamW", "Adam", "LAMB", "NovoGrad", "SGD", "Adagrad"])
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_migrated_script_resumes(name: str, level: str) -> None:
    theirs, ours = PAIRS[name]

    def started() -> tuple[nn.Module, Any]:
        model = net()
        initialized: tuple[nn.Module, Any] = amp.initialize(
            model, theirs(model.parameters()), opt_level=level, verbosity=0
        )
        return initialized

    try:
        model, optimizer = started()
        train(model, optimizer, 20)
        saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "amp": amp.state_dict()}
        for group in saved["optimizer"]["param_groups"]:
            group.pop("amp_master_params", None)  # which Apex does not save
        saved = through_a_file(saved)
        model, optimizer = started()  # again, as Apex does it
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        amp.load_state_dict(saved["amp"])
        going_on = train(model, optimizer, 5)
    finally:
        amp.close()
    model = net()
    optimizer = ours(model.parameters())
    scale = preamp.DynamicScale(init_scale=saved["amp"]["loss_scaler0"]["loss_scale"])
    session = preamp.prepare(model, optimizer, level=level, scale=scale)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    resumed = []
    for _ in range(5):
        with session.autocast():
            loss = loss_of(model)
        session.backward(loss)
        session.step()
        session.zero_grad()
        resumed.append(loss.item())
    session.close()
    assert resumed == pytest.approx(going_on, rel=2e-5 if level == "O1" else 2e-4)
    steps = {float(row["step"]) for row in optimizer.state_dict()["state"].values() if "step" in row}
    assert steps == {"SGD": set(), "Adagrad": {5.0}}.get(name, {float(20 - _skipped(saved) + 5)})


def _skipped(saved: dict[str, Any]) -> int:
    """Steps that overflowed: 2**16 was halved at each of them."""
    scale: float = saved["amp"]["loss_scaler0"]["loss_scale"]
    return round(16 - torch.tensor(scale).log2().item())
