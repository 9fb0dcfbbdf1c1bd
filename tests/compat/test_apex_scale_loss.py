"""amp.scale_loss, in its forms of 2019 and of 2018, and the steps after it: accumulation, overflow, several losses."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from preamp.compat.apex import amp
from preamp.compat.apex._scaler import LossScaler
from preamp.compat.apex.amp import _amp_state
from preamp.compat.apex.amp import amp as amp_module
from preamp.compat.apex.amp.handle import OptimWrapper

from .toys import LEVELS, Weights, batch, mlp, scaled_backward

HALF, FLOAT = torch.float16, torch.float32
ONES = torch.ones(3)
INF = torch.tensor([1.0, math.inf, 1.0])


def prepared(level: str, **options: Any) -> tuple[Weights, torch.optim.SGD]:
    model = Weights()
    optimizer = torch.optim.SGD(model.parameters(), 0.125)
    options.setdefault("loss_scale", 64.0 if level in ("O1", "O2", "O3") else None)
    amp.initialize(model, optimizer, opt_level=level, verbosity=0, **options)
    return model, optimizer


def backward(model: nn.Module, optimizer: Any, given: Tensor, **options: Any) -> None:
    scaled_backward(model(given), optimizer, **options)


def test_before_initialize() -> None:
    with pytest.raises(RuntimeError, match="internal Amp state has not"), amp.scale_loss(torch.zeros(()), None):
        pass


@pytest.mark.parametrize("level", LEVELS)
def test_what_is_yielded(level: str) -> None:
    model, optimizer = prepared(level)
    loss = model(ONES).to(HALF)
    with amp.scale_loss(loss, optimizer) as scaled:
        assert scaled.dtype is FLOAT
        assert float(scaled.detach()) == float(loss.detach()) * (64.0 if level in ("O1", "O2", "O3") else 1.0)
    vector = torch.ones(2, requires_grad=True)
    with amp.scale_loss(vector, optimizer) as scaled:
        assert scaled.shape == (2,)
    with pytest.raises(IndexError), amp.scale_loss(loss, optimizer, loss_id=1):
        pass


@pytest.mark.parametrize("level", LEVELS)
def test_gradients_are_true_and_add_up(level: str) -> None:
    model, optimizer = prepared(level)
    for i in range(1, 4):
        backward(model, optimizer, ONES * i)
        grads = [p.grad for p in amp.master_params(optimizer)]
        assert torch.equal(grads[0].float(), ONES * sum(range(1, i + 1)))
    optimizer.step()
    assert torch.equal(model.weight.float(), torch.full((3,), 1.0 - 6 * 0.125))
    optimizer.zero_grad()
    assert all(p.grad is None or not p.grad.any() for p in model.parameters())


def test_masters() -> None:
    model, optimizer = prepared("O2")
    low = model.weight
    assert next(amp.master_params(optimizer)) is low  # made when first needed
    backward(model, optimizer, ONES)
    master = next(amp.master_params(optimizer))
    assert master is not low and master.dtype is FLOAT and low.dtype is HALF
    assert torch.equal(low.grad.float(), ONES * 64) and torch.equal(master.grad, ONES)  # type: ignore[union-attr]
    backward(model, optimizer, ONES * 2)
    assert torch.equal(low.grad.float(), ONES * 128) and torch.equal(master.grad, ONES * 3)  # type: ignore[union-attr]
    optimizer.step()
    assert master.grad is None and torch.equal(low, master.half())
    assert low.grad is not None
    optimizer.zero_grad()
    assert low.grad is not None and not low.grad.any()
    optimizer.zero_grad(set_to_none=True)
    assert low.grad is None
    with pytest.raises(RuntimeError, match="closure"):
        optimizer.step(lambda: torch.zeros(()))
    stash = optimizer._amp_stash  # type: ignore[attr-defined]
    assert len(stash.all_fp16_params) == 1 and stash.all_fp16_params[0] is low
    assert stash.all_fp32_from_fp16_params[0] is master and stash.fp32_from_fp16_groups[0][0] is master


def test_delayed_overflow_check_lets_infinity_through() -> None:
    model, optimizer = prepared("O1", loss_scale="dynamic")
    backward(model, optimizer, INF, delay_overflow_check=True)
    assert amp.state_dict()["loss_scaler0"] == {"loss_scale": 65536.0, "unskipped": 0}
    optimizer.step()
    assert not model.weight.isfinite().all()


@pytest.mark.parametrize("optimizers", [list, tuple, lambda x: x[0]])
def test_one_a_list_or_a_tuple(optimizers: Any) -> None:
    model, optimizer = prepared("O1")
    backward(model, optimizer, ONES)
    backward(model, optimizers([optimizer]), ONES)
    assert torch.equal(model.weight.grad, ONES * 2)  # type: ignore[arg-type]


@pytest.mark.parametrize("level", ["O1", "O2", "O3", "O5"])
def test_an_exception_loses_nothing(level: str) -> None:
    model, optimizer = prepared(level, loss_scale="dynamic", max_loss_scale=2.0**15)
    backward(model, optimizer, ONES)
    before = [p.grad.clone() for p in amp.master_params(optimizer)]  # type: ignore[union-attr]
    state = amp.state_dict()
    with pytest.raises(KeyError), amp.scale_loss(model(INF), optimizer) as scaled:
        scaled.backward()
        raise KeyError
    assert all(torch.equal(p.grad, g) for p, g in zip(amp.master_params(optimizer), before, strict=True))
    assert amp.state_dict() == state
    backward(model, optimizer, ONES)
    assert torch.equal(next(amp.master_params(optimizer)).grad.float(), ONES * 2)  # type: ignore[union-attr]
    optimizer.step()
    assert model.weight.isfinite().all()


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_overflow_skips_one_step_and_says_so(level: str, capsys: pytest.CaptureFixture[str]) -> None:
    model = Weights()
    optimizer = torch.optim.SGD(model.parameters(), 1.0, momentum=0.9)
    amp.initialize(model, optimizer, opt_level=level, loss_scale="dynamic", max_loss_scale=2.0**15)
    backward(model, optimizer, ONES * 1e-2)
    optimizer.step()
    weight = model.weight.clone()
    momentum = {k: v.clone() for k, v in next(iter(optimizer.state.values())).items()}
    capsys.readouterr()
    backward(model, optimizer, INF)
    assert amp.state_dict()["loss_scaler0"]["loss_scale"] == 16384.0  # at the end of scale_loss, before the step
    assert capsys.readouterr().out == ""
    assert optimizer.step() is None
    assert capsys.readouterr().out == (
        "Gradient overflow.  Skipping step, loss scaler 0 reducing loss scale to 16384.0\n"
    )
    assert torch.equal(model.weight, weight)
    assert all(torch.equal(v, momentum[k]) for k, v in next(iter(optimizer.state.values())).items())
    if level == "O2":
        assert all(p.grad is None for p in amp.master_params(optimizer))
    optimizer.zero_grad()
    backward(model, optimizer, ONES * 1e-2)
    optimizer.step()
    assert not torch.equal(model.weight, weight) and capsys.readouterr().out == ""


def test_verbosity_0_is_silent_and_a_closure_at_a_skip_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    model, optimizer = prepared("O1", loss_scale="dynamic")
    backward(model, optimizer, INF)
    optimizer.step()
    backward(model, optimizer, INF)
    with pytest.raises(RuntimeError, match="Currently, Amp does not support closure use with optimizers"):
        optimizer.step(lambda: torch.zeros(()))
    assert capsys.readouterr().out == ""
    assert optimizer.step(lambda: torch.ones(())) == 1.0  # at O1, closures pass when nothing is skipped


def test_static_scales_check_nothing() -> None:
    model, optimizer = prepared("O2", loss_scale=128.0)
    backward(model, optimizer, INF)
    optimizer.step()
    assert not model.weight.isfinite().all()
    assert amp.state_dict()["loss_scaler0"] == {"loss_scale": 128.0, "unskipped": 1}


@pytest.mark.parametrize("when", ["before initialize", "after initialize", "after overflow"])
@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
def test_schedulers_live_with_it(level: str, when: str) -> None:
    """Built at any moment, no warning of an overridden or missing step (warnings are errors here)."""
    model = Weights()
    optimizer = torch.optim.SGD(model.parameters(), 0.5)

    def build() -> Any:
        return torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)

    schedule = build() if when == "before initialize" else None
    amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    if when == "after initialize":
        schedule = build()
    for i in range(3):
        backward(model, optimizer, INF if i == 0 and level != "O0" else ONES * 0.05)
        if when == "after overflow" and schedule is None:
            schedule = build()
        before = model.weight.clone()
        optimizer.step()
        assert torch.equal(before, model.weight) == (i == 0 and level != "O0")
        schedule.step()
        optimizer.zero_grad()
    assert optimizer.param_groups[0]["lr"] == 0.0625


@pytest.mark.parametrize("level", ["O1", "O2", "O3", "O5"])
def test_sparse_gradients(level: str) -> None:
    model: Any = nn.Embedding(4, 2, sparse=True)
    optimizer = torch.optim.SGD(model.parameters(), 1.0)
    amp.initialize(model, optimizer, opt_level=level, verbosity=0, loss_scale=8.0)
    start = model.weight.detach().float().clone()
    for _ in range(2):
        scaled_backward(model(torch.tensor([1, 1, 2])).float().sum(), optimizer)
    optimizer.step()
    moved = start - model.weight.detach().float()
    torch.testing.assert_close(moved, torch.tensor([[0.0] * 2, [4.0] * 2, [2.0] * 2, [0.0] * 2]), atol=0.02, rtol=0)


@pytest.mark.parametrize("level", LEVELS)
def test_parameters_without_gradients_and_frozen_ones(level: str) -> None:
    model: Any = nn.ModuleDict({"used": Weights(), "unused": Weights(), "frozen": Weights()})
    model["frozen"].requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), 0.125)
    amp.initialize(model, optimizer, opt_level=level, verbosity=0, loss_scale=16.0)
    for _ in range(2):
        scaled_backward(model["used"](ONES), optimizer)
    grads = [p.grad for p in amp.master_params(optimizer)]
    assert grads[0] is not None and grads[1] is None and grads[2] is None
    optimizer.step()
    assert float(model["used"].weight.detach()[0]) == 0.75 and float(model["unused"].weight.detach()[0]) == 1.0


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3", "O5"])
@pytest.mark.parametrize("started", [False, True])
def test_add_param_group(level: str, started: bool) -> None:
    first, second = Weights(), Weights()
    optimizer = torch.optim.SGD(first.parameters(), 0.125, momentum=0.5)
    amp.initialize([first, second], optimizer, opt_level=level, verbosity=0, loss_scale=16.0)

    def both() -> None:
        scaled_backward(first(ONES) + second(ONES), optimizer)
        optimizer.step()
        optimizer.zero_grad()
        second.zero_grad()

    if started:
        both()
    optimizer.add_param_group({"params": second.weight, "lr": 0.25})
    if level in ("O2", "O5"):
        assert all(p.dtype is FLOAT for p in amp.master_params(optimizer))
        with pytest.raises(TypeError, match="order"):
            optimizer.add_param_group({"params": {nn.Parameter(ONES)}})
    both()
    both()
    reference = [nn.Parameter(ONES.clone()), nn.Parameter(ONES.clone())]
    plain = torch.optim.SGD(reference[:1], 0.125, momentum=0.5)
    for i in range(3 if started else 2):
        if i == (1 if started else 0):
            plain.add_param_group({"params": reference[1:], "lr": 0.25})
        for p in reference:
            p.grad = ONES.clone()
        plain.step()
    assert torch.equal(first.weight.float(), reference[0]) and torch.equal(second.weight.float(), reference[1])


# -- two models, one or two optimizers, two losses, infinities everywhere


def many(level: str, number: int, wrong: tuple[int, int, int] | None, losses: int) -> tuple[list[Tensor], list[float]]:
    """Four iterations of two losses over three models, the middle one shared; `wrong`: (iteration, loss, model)."""
    models = [Weights(float(i + 1)) for i in range(3)]
    groups = [[0, 1, 2]] if number == 1 else [[0, 1], [2]]
    optimizers = [
        torch.optim.SGD([{"params": models[i].parameters(), "lr": 0.25 / (i + 1)} for i in own], 0.1, momentum=0.125)
        for own in groups
    ]
    options: Any = {"loss_scale": "dynamic", "max_loss_scale": 2.0**14}  # the gradient of a 16-bit sum has to hold it
    amp.initialize(models, optimizers, opt_level=level, verbosity=0, num_losses=losses, **options)
    for iteration in range(4):
        for optimizer in optimizers:
            optimizer.zero_grad()
        for which in (0, 1):
            total: Any = 0.0
            for m in ((0, 1), (1, 2))[which]:
                given = ONES * (1 + iteration + which) * 2.0**-8
                if wrong == (iteration, which, m):
                    given = INF
                total = total + models[m](given)
            concerned = optimizers if number == 1 else (optimizers[:1], optimizers)[which]
            scaled_backward(total, concerned, loss_id=which if losses == 2 else 0)
        for optimizer in optimizers:
            optimizer.step()
    scales = [value["loss_scale"] for value in amp.state_dict().values()]
    result = [p.detach().float().clone() for group in optimizers for p in amp.master_params(group)]
    amp.close()
    return result, scales


def reference(number: int, wrong: tuple[int, int, int] | None) -> list[Tensor]:
    weights = [nn.Parameter(torch.full((3,), float(i + 1))) for i in range(3)]
    groups = [[0, 1, 2]] if number == 1 else [[0, 1], [2]]
    optimizers = [
        torch.optim.SGD([{"params": [weights[i]], "lr": 0.25 / (i + 1)} for i in own], 0.1, momentum=0.125)
        for own in groups
    ]
    for iteration in range(4):
        for weight in weights:
            weight.grad = torch.zeros(3)
        for which in (0, 1):
            for m in ((0, 1), (1, 2))[which]:
                weights[m].grad += ONES * (1 + iteration + which) * 2.0**-8  # type: ignore[operator]
        for k, optimizer in enumerate(optimizers):
            overflowed = wrong is not None and wrong[0] == iteration and (number == 1 or k == 0 or wrong[1] == 1)
            if not overflowed:
                optimizer.step()
    return [w.detach() for w in weights]


PLACES = [None, *[(i, w, m) for i in (0, 2) for w in (0, 1) for m in ((0, 1), (1, 2))[w]]]


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
@pytest.mark.parametrize("number", [1, 2])
@pytest.mark.parametrize("losses", [1, 2])
@pytest.mark.parametrize("wrong", PLACES)
def test_many_models_optimizers_and_losses(
    level: str, number: int, losses: int, wrong: tuple[int, int, int] | None
) -> None:
    """Steps are skipped by exactly the optimizers whose losses overflowed, and scales fall by loss."""
    expected = reference(number, wrong)
    result, scales = many(level, number, wrong, losses)
    tolerance = 0.0 if level != "O3" else 2e-2
    for one, other in zip(result, expected, strict=True):
        torch.testing.assert_close(one, other, atol=tolerance, rtol=tolerance)
    start = 2.0**14
    fallen = [start / 2 if wrong is not None and (losses == 1 or i == wrong[1]) else start for i in range(losses)]
    assert scales == fallen


# -- the scaler


def test_dynamic_scaler_by_the_numbers() -> None:
    scaler = LossScaler("dynamic", scale_window=3, max_loss_scale=2.0**17, min_loss_scale=2.0**15)
    seen = []
    for good in [1, 1, 1, 1, 1, 1, 0, 1, 1, 0, 0, 0]:
        scaler.clear_overflow_state()
        gradient = torch.ones(2) if good else torch.tensor([1.0, math.nan])
        scaler.unscale([gradient], [gradient.clone()])
        skip = scaler.update_scale()
        assert skip == (not good)
        seen.append((int(math.log2(scaler.loss_scale())), scaler._unskipped))
    assert seen == [
        (16, 1), (16, 2), (17, 0), (17, 1), (17, 2), (17, 0), (16, 0), (16, 1), (16, 2), (15, 0), (15, 0), (15, 0),
    ]  # fmt: skip


def test_scaler_starts_no_higher_than_its_maximum_and_falls_without_a_floor() -> None:
    assert LossScaler("dynamic", max_loss_scale=128.0).loss_scale() == 128.0
    scaler = LossScaler("dynamic", init_scale=2.0**-20, scale_factor=8.0)
    scaler._has_overflow = True
    scaler.update_scale()
    assert scaler.loss_scale() == 2.0**-21


@pytest.mark.parametrize("dtypes", list(itertools.product([HALF, FLOAT, torch.bfloat16], [FLOAT, HALF])))
def test_unscaling_by_hand(dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    scaler = LossScaler(8.0)
    model = [torch.full((2, 3), 16.0, dtype=dtypes[0]), torch.empty(0, dtype=dtypes[0])]
    master = [torch.empty(2, 3, dtype=dtypes[1]), torch.empty(0, dtype=dtypes[1])]
    scaler.unscale(model, master)
    assert torch.equal(master[0], torch.full((2, 3), 2.0, dtype=dtypes[1])) and float(model[0][0, 0]) == 16.0
    scaler.unscale(model, master, scale_override=2.0)
    assert float(master[0][0, 0]) == 8.0


@pytest.mark.parametrize(("scales", "expected"), [(None, 6.0), ((8.0, 2.0, 4.0), 16.0)])
def test_unscaling_with_gradients_from_before(scales: Any, expected: float) -> None:
    """As loops that unscale by themselves call it; what was kept before is not judged again."""
    scaler = LossScaler("dynamic", init_scale=8.0)
    master, kept = [torch.empty(2)], [torch.full((2,), 4.0)]
    scaler.unscale_with_stashed([torch.full((2,), 16.0, dtype=HALF)], kept, master, scale_override=scales)
    assert torch.equal(master[0], torch.full((2,), expected)) and torch.equal(kept[0], torch.full((2,), 4.0))
    scaler.unscale_with_stashed([torch.ones(2, dtype=HALF)], [torch.full((2,), math.inf)], kept)
    assert scaler.has_fused_kernel and not scaler._overflow_buf.item() and not scaler.update_scale()
    scaler.unscale_with_stashed([torch.full((2,), math.inf, dtype=HALF)], master, master)
    assert scaler._overflow_buf.item() and scaler.update_scale()


def test_float64_and_bfloat16_parameters_are_carried_along() -> None:
    for dtype in (torch.float64, torch.bfloat16):
        model = Weights().to(dtype)
        optimizer = torch.optim.SGD(model.parameters(), 0.125)
        amp.initialize(model, optimizer, opt_level="O1", verbosity=0, loss_scale=8.0)
        backward(model, optimizer, ONES.to(dtype))
        optimizer.step()
        assert model.weight.dtype is dtype and float(model.weight[0].detach()) == 0.875
        assert _amp_state.loss_scalers[0]._unskipped == 1
        amp.close()


# -- the API of 2018: amp.init, handle.scale_loss, wrapped optimizers, which Apex's last releases refused


def test_handles() -> None:
    off: Any = amp.init(enabled=False)
    assert not off.is_active() and amp_module._DECORATOR_HANDLE is off and not hasattr(amp._amp_state, "handle")
    loss = torch.zeros(())
    with off.scale_loss(loss, None) as same:
        assert same is loss
    with off._disable_casts():
        pass
    assert not off.has_cache and not off.verbose
    off._clear_cache()
    off._deactivate()
    on: Any = amp.init(enable_caching=False, verbose=True)
    assert on.is_active() and amp_module._DECORATOR_HANDLE is on and amp._amp_state.handle is on
    assert not on.has_cache and on.verbose and on.cache == {}
    with on._disable_casts():
        assert not on.is_active()
    assert on.is_active()


def test_handle_scale_loss_trains_and_skips(capsys: pytest.CaptureFixture[str]) -> None:
    handle: Any = amp.init(enabled=True)
    model = mlp()
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    losses = []
    for i in range(12):
        x, y = batch(0)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        if i == 5:
            loss = loss * math.inf
        with handle.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        before = [p.clone() for p in model.parameters()]
        optimizer.step()
        assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True)) == (i == 5)
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0]
    assert "Gradient overflow.  Skipping step, loss scaler 0 reducing loss scale to 32768.0" in capsys.readouterr().out
    amp.close()
    assert not {"_amp_stash", "_prepare_amp_backward"} & vars(optimizer).keys()
    amp.initialize(model, optimizer, opt_level="O2", verbosity=0)  # lets it be used by the other generation of amp


def test_wrapped_optimizer(capsys: pytest.CaptureFixture[str]) -> None:
    handle: Any = amp.init()
    model = Weights()
    optimizer: Any = handle.wrap_optimizer(torch.optim.SGD(model.parameters(), 0.25, momentum=0.5), num_loss=2)
    assert isinstance(optimizer, OptimWrapper)
    assert optimizer.param_groups[0]["lr"] == 0.25  # everything else is the optimizer's
    for given in (ONES, ONES * 2):
        with optimizer.scale_loss(model(given)) as scaled:
            scaled.backward()
    assert model.weight.grad is not None and torch.equal(model.weight.grad, ONES * 3)
    optimizer.step()
    assert torch.equal(model.weight, ONES * 0.25)
    optimizer.zero_grad()
    for given in (ONES, INF):
        with optimizer.scale_loss(model(given)) as scaled:
            scaled.backward()
    optimizer.step()
    assert torch.equal(model.weight, ONES * 0.25)
    assert "loss scaler 1 reducing loss scale to 32768.0" in capsys.readouterr().out
    assert [s.loss_scale() for s in optimizer._loss_scaler] == [65536.0, 32768.0]
    for _ in range(2):
        with optimizer.scale_loss(model(ONES)) as scaled:
            scaled.backward()
    with pytest.raises(IndexError), optimizer.scale_loss(model(ONES)):
        pass
