"""Gradients that a loop throws away, leaves scaled or makes by itself: as in float32, or one clear error."""

from __future__ import annotations

import copy
import itertools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from preamp.compat.apex import amp
from preamp.compat.apex.fp16_utils import FP16_Optimizer
from preamp.errors import PreampWarning

from .toys import Weights, scaled_backward

OUTLIER, BATCH, OTHER = torch.tensor([100.0, 0, 0]), torch.tensor([0, 1.0, 0]), torch.tensor([0, 0, 1.0])
EXPECTED = torch.tensor([1.0, 0.0, 1.0])


def by_hand(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.grad = None


CLEARS: dict[str, Callable[..., Any]] = {
    "optimizer": lambda model, optimizer: optimizer.zero_grad(),
    "optimizer, to None": lambda model, optimizer: optimizer.zero_grad(set_to_none=True),
    "optimizer, to zero": lambda model, optimizer: optimizer.zero_grad(set_to_none=False),
    "model": lambda model, optimizer: model.zero_grad(),
    "model, to zero": lambda model, optimizer: model.zero_grad(set_to_none=False),
    "by hand": lambda model, optimizer: by_hand(model),
}


def made(level: str, **options: Any) -> tuple[nn.Module, Any]:
    model = Weights()
    if level in ("O1", "O2"):
        options.setdefault("loss_scale", 8.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    return amp.initialize(model, optimizer, opt_level=level, verbosity=0, **options)  # type: ignore[no-any-return]


def backward(model: nn.Module, optimizer: Any, given: torch.Tensor, **how: Any) -> None:
    scaled_backward(model(given), optimizer, **how)


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3", "O4", "O5"])
@pytest.mark.parametrize("clear", CLEARS)
@pytest.mark.parametrize("passes", [(False,), (True,), (False, False), (True, True), (True, False)])
def test_a_step_that_is_given_up(level: str, clear: str, passes: tuple[bool, ...]) -> None:
    """`clear; continue` after one or several backward passes, `delay_unscale` or not; then a step that counts."""
    model, optimizer = made(level)
    for delay in passes:
        backward(model, optimizer, OUTLIER, delay_unscale=delay)
    CLEARS[clear](model, optimizer)
    backward(model, optimizer, BATCH)
    optimizer.step()
    assert torch.equal(model.weight.float(), EXPECTED)


@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
@pytest.mark.parametrize("passes", list(itertools.product([True, False], repeat=2)))
def test_gradients_add_up_in_any_order_of_delays(level: str, passes: tuple[bool, ...]) -> None:
    model, optimizer = made(level)
    for delay, given in zip((*passes, False), (BATCH, OTHER, BATCH), strict=True):
        backward(model, optimizer, given, delay_unscale=delay)
    optimizer.step()
    assert torch.equal(model.weight.float(), torch.tensor([1.0, -1.0, 0.0]))


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_scale_that_moves_while_gradients_rest_scaled(level: str) -> None:
    model, optimizer = made(level, num_losses=2)
    amp._amp_state.loss_scalers[1]._loss_scale = 64.0
    backward(model, optimizer, BATCH, delay_unscale=True)
    amp._amp_state.loss_scalers[0]._loss_scale = 4.0
    backward(model, optimizer, OTHER, delay_unscale=True)
    backward(model, optimizer, BATCH, loss_id=1)
    optimizer.step()
    assert torch.equal(model.weight.float(), torch.tensor([1.0, -1.0, 0.0]))


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_failed_pass_that_was_to_rest_scaled(level: str) -> None:
    model, optimizer = made(level)
    backward(model, optimizer, BATCH)
    with pytest.raises(KeyError), amp.scale_loss(model(OTHER), optimizer, delay_unscale=True):
        raise KeyError
    backward(model, optimizer, OTHER)
    optimizer.step()
    assert torch.equal(model.weight.float(), torch.tensor([1.0, 0.0, 0.0]))


@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
def test_a_step_with_scaled_gradients_is_refused(level: str) -> None:
    model, optimizer = made(level)
    backward(model, optimizer, BATCH, delay_unscale=True)
    with pytest.raises(RuntimeError, match="delay_unscale=False"):
        optimizer.step()
    assert torch.equal(model.weight.float(), torch.ones(3))
    backward(model, optimizer, OTHER)
    optimizer.step()
    assert torch.equal(model.weight.float(), torch.tensor([1.0, 0.0, 0.0]))


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3", "O4", "O5"])
@pytest.mark.parametrize("before", ["nothing", "a step", "a step, zeroed", "a step, cleared"])
def test_a_backward_pass_outside_of_scale_loss(level: str, before: str) -> None:
    """Without masters its gradients are true ones; with them, no master would learn of them."""
    model, optimizer = made(level)
    if before != "nothing":
        backward(model, optimizer, OTHER)
        optimizer.step()
        model.zero_grad(set_to_none="cleared" in before) if "," in before else optimizer.zero_grad()
    model(BATCH).backward()
    if level in ("O2", "O5"):
        for attempt in (optimizer.step, lambda: backward(model, optimizer, OTHER)):
            with pytest.raises(RuntimeError, match=r"outside of amp\.scale_loss"):
                attempt()
        optimizer.zero_grad()
        backward(model, optimizer, BATCH)
    optimizer.step()
    assert torch.equal(model.weight.float(), torch.tensor([1.0, 0.0, 1.0 if before == "nothing" else 0.0]))


def two(level: str) -> tuple[nn.Module, Any]:
    model = nn.ModuleDict({"head": Weights(), "prototypes": Weights()})
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scale = 8.0 if level in ("O1", "O2") else None
    return amp.initialize(model, optimizer, opt_level=level, verbosity=0, loss_scale=scale)  # type: ignore[no-any-return]


@pytest.mark.parametrize("level", ["O1", "O2", "O4", "O5"])
def test_one_parameters_gradient_is_cancelled_before_the_step(level: str) -> None:
    """As self-supervised trainings freeze their prototypes for the first epochs."""
    model, optimizer = two(level)
    for i in range(3):
        scaled_backward(model["head"](BATCH) + model["prototypes"](BATCH), optimizer)
        if i < 2:
            by_hand(model["prototypes"])
        optimizer.step()
        optimizer.zero_grad()
    assert torch.equal(model["head"].weight.float(), torch.tensor([1.0, -2.0, 1.0]))
    assert torch.equal(model["prototypes"].weight.float(), EXPECTED)


@pytest.mark.parametrize("level", ["O2", "O5"])
def test_memory_of_the_models_gradients_may_be_freed_before_the_step(level: str) -> None:
    """Apex steps masters, so scripts that know it let the 16-bit gradients go."""
    model, optimizer = made(level)
    backward(model, optimizer, BATCH)
    by_hand(model)
    optimizer.step()
    assert torch.equal(model.weight.float(), EXPECTED)


def nothing(_: nn.Module) -> None:
    """What the others must equal."""


def in_a_loop(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.grad.mul_(0)  # type: ignore[union-attr]


def replaced(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)


WRITES: dict[str, Callable[[nn.Module], Any]] = {
    "clip_grad_norm_": lambda model: nn.utils.clip_grad_norm_(model.parameters(), 1e-4),
    "clip_grad_norm_, foreach": lambda model: nn.utils.clip_grad_norm_(model.parameters(), 1e-4, foreach=True),
    "each by itself": lambda model: [nn.utils.clip_grad_norm_(p, 1e-4) for p in model.parameters()],
    "clip_grad_value_": lambda model: nn.utils.clip_grad_value_(model.parameters(), 1e-8),
    "mul_": in_a_loop,
    "nan_to_num_": lambda model: [torch.nan_to_num_(p.grad, posinf=0, neginf=0) for p in model.parameters()],  # type: ignore[arg-type]
    "zero_grad": lambda model: model.zero_grad(set_to_none=False),
    "zeros_like": replaced,
}
"""What programs do to model.parameters() before the step, which NVIDIA's Apex does not read there."""


PASSES = ("cleared before every pass", "never cleared", "two passes a step")


@pytest.mark.parametrize(
    ("write", "passes"), [(w, p) for w in WRITES for p in PASSES if (w, p) != ("zero_grad", PASSES[2])]
)
@pytest.mark.parametrize("level", ["O2", "O5"])
def test_the_step_takes_the_masters_gradients_whatever_the_models_are(level: str, write: str, passes: str) -> None:
    """Gradients of one sign too, whose zeros tell nothing of how they came about; and one warning says so."""

    def trained(change: Callable[[nn.Module], Any]) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Linear(8, 4)
        optimizer = torch.optim.SGD(model.parameters(), 1e-3)
        scale = 2.0**14 if level == "O2" else None  # the norm of the scaled gradients is beyond float16
        amp.initialize(model, optimizer, opt_level=level, verbosity=0, loss_scale=scale)
        for i in range(4):
            if passes == PASSES[0]:
                optimizer.zero_grad()
            with amp.scale_loss(model(torch.rand(32, 8)).sum(1).mean(), optimizer) as scaled:  # told of this line
                scaled.backward()
            assert all(bool((p.grad > 0).all()) for p in model.parameters())  # type: ignore[operator]
            change(model)
            if i % 2 or passes != PASSES[2]:
                optimizer.step()
            if i % 2 and passes == PASSES[2]:
                optimizer.zero_grad()
        amp.close()
        return [p.detach().clone() for p in amp.master_params(optimizer)]

    wanted = trained(nothing)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always", PreampWarning)
        found = trained(WRITES[write])
    own = [each for each in told if each.category is PreampWarning]
    assert [("without effect" in str(each.message), each.filename) for each in own] == [(True, __file__)]
    assert all(map(torch.equal, found, wanted))


@pytest.mark.parametrize("how", [{}, {"loss_id": 1}])
def test_gradients_that_add_up_survive_a_clip_between_passes(how: dict[str, Any]) -> None:
    """Its zeros give nothing up, whatever signs they have."""
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), 1.0)
    amp.initialize(model, optimizer, opt_level="O2", verbosity=0, loss_scale=1024.0, num_losses=2)
    x = torch.randn(32, 4)
    scaled_backward((model(x) - 3).pow(2).mean(), optimizer)
    before = [p.grad.clone() for p in amp.master_params(optimizer)]  # type: ignore[union-attr]
    nn.utils.clip_grad_norm_(model.parameters(), 1e-9)
    assert not any(p.grad.any() for p in model.parameters())  # type: ignore[union-attr]
    with (
        pytest.warns(PreampWarning, match="without effect"),
        amp.scale_loss(model(x).sum() * 0, optimizer, **how) as scaled,
    ):
        scaled.backward()
    assert all(torch.equal(p.grad, b) for p, b in zip(amp.master_params(optimizer), before, strict=True))  # type: ignore[arg-type]


@pytest.mark.parametrize("level", ["O2", "O5"])
def test_zeros_written_by_hand_after_every_step(level: str) -> None:
    """There nothing is left to clear, and nothing is said."""
    model, optimizer = made(level)
    with warnings.catch_warnings():
        warnings.simplefilter("error", PreampWarning)
        for _ in range(3):
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter.grad.detach_().zero_()
            backward(model, optimizer, BATCH)
            optimizer.step()
    assert torch.equal(model.weight.float(), torch.tensor([1.0, -2.0, 1.0]))


def test_a_clip_before_a_step_that_is_skipped() -> None:
    model, optimizer = made("O2", loss_scale="dynamic")
    backward(model, optimizer, OUTLIER * 1e3)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()  # skipped
    assert torch.equal(model.weight.float(), torch.ones(3))
    amp._amp_state.loss_scalers[0]._loss_scale = 8.0
    backward(model, optimizer, BATCH)
    optimizer.step()
    assert torch.equal(model.weight.float(), EXPECTED)


@pytest.mark.parametrize("level", ["O2", "O5"])
def test_a_loss_of_another_optimizer_leaves_gradients(level: str) -> None:
    """Two networks against each other: the second's loss goes through the first, which is cleared before its own."""
    first, second = Weights(), Weights()
    optimizers = [torch.optim.SGD(m.parameters(), lr=1.0) for m in (first, second)]
    scale = 8.0 if level == "O2" else None
    amp.initialize([first, second], optimizers, opt_level=level, verbosity=0, loss_scale=scale)
    for _ in range(2):
        first.zero_grad()
        backward(first, optimizers[0], BATCH)
        optimizers[0].step()
        second.zero_grad()
        scaled_backward(second(BATCH) + first(OUTLIER), optimizers[1])
        optimizers[1].step()
    for model in (first, second):
        assert torch.equal(model.weight.float(), torch.tensor([1.0, -1.0, 1.0]))


@pytest.mark.parametrize("level", ["O2", "O5"])
def test_an_optimizer_that_was_not_handed_over_is_told_at_its_step(level: str) -> None:
    first, second = Weights(), Weights()
    optimizers = [torch.optim.SGD(m.parameters(), lr=1.0) for m in (first, second)]
    amp.initialize([first, second], optimizers, opt_level=level, verbosity=0)
    scaled_backward((first(BATCH) + second(BATCH)) * 1e-3, optimizers[0])
    optimizers[0].step()
    with pytest.raises(RuntimeError, match="all optimizers"):
        optimizers[1].step()


@pytest.mark.parametrize("level", ["O1", "O2", "O4", "O5"])
def test_copies_belong_to_no_amp(level: str) -> None:
    """A copied model computes as the first; a copied optimizer says that amp has not seen it."""
    model, optimizer = made(level)
    backward(model, optimizer, OTHER)
    twin, copied = copy.deepcopy((model, optimizer))
    optimizer.step()
    assert torch.equal(twin(BATCH), model(BATCH)) and torch.equal(twin.weight.float(), torch.ones(3))
    if level != "O4":
        with pytest.raises(RuntimeError, match="has not seen"):
            backward(twin, copied, BATCH)
    average = copy.deepcopy(model)
    backward(model, optimizer, BATCH)
    optimizer.step()
    assert not torch.equal(average.weight, model.weight)


@pytest.mark.parametrize("clear", CLEARS)
def test_an_fp16_optimizer_whose_step_is_given_up(clear: str) -> None:
    model = Weights().half()
    optimizer = FP16_Optimizer(torch.optim.SGD(model.parameters(), lr=1.0), static_loss_scale=8.0, verbose=False)
    optimizer.backward(model(OUTLIER.half()))
    if clear.startswith("optimizer,"):
        optimizer.zero_grad(set_grads_to_None=clear.endswith("None"))
    else:
        CLEARS[clear](model, optimizer)
    optimizer.backward(model(BATCH.half()))
    optimizer.step()
    assert torch.equal(model.weight.float(), EXPECTED)


def test_an_fp16_optimizer_that_has_not_seen_the_backward_pass() -> None:
    model = Weights().half()
    optimizer = FP16_Optimizer(torch.optim.SGD(model.parameters(), lr=1.0), static_loss_scale=8.0, verbose=False)
    for _ in range(2):
        model(BATCH.half()).backward()
        with pytest.raises(RuntimeError, match=r"optimizer\.backward\(loss\)"):
            optimizer.step()
        optimizer.zero_grad()
        optimizer.step()  # of nothing
    (model(BATCH.half()) * optimizer.loss_scale).backward()
    optimizer.update_master_grads()
    optimizer.step()
    assert torch.equal(model.weight.float(), EXPECTED)


@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
@pytest.mark.parametrize("delays", list(itertools.product([False, True], repeat=2)))
def test_a_block_inside_a_block_is_refused(level: str, delays: tuple[bool, bool]) -> None:
    """The inner one would unscale what the outer one unscales again. Gradients from before are there afterwards."""
    model, optimizer = made(level, num_losses=2)
    backward(model, optimizer, BATCH)
    outer, inner = delays
    with pytest.raises(RuntimeError, match="two blocks, one after the other"):  # noqa: SIM117
        with amp.scale_loss(model(OUTLIER), optimizer, delay_unscale=outer):
            with amp.scale_loss(model(OUTLIER), optimizer, loss_id=1, delay_unscale=inner):
                pass
    backward(model, optimizer, OTHER)
    optimizer.step()
    assert torch.equal(model.weight.float(), torch.tensor([1.0, 0.0, 0.0]))


@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
@pytest.mark.parametrize("order", ["clear, backward, step", "clear, backward", "backward, step"])
def test_a_loop_that_clears_or_steps_inside_the_block(level: str, order: str) -> None:
    model, optimizer = made(level)
    for given in (BATCH, OTHER):
        with amp.scale_loss(model(given), optimizer) as scaled:
            if "clear" in order:
                optimizer.zero_grad()
            scaled.backward()
            if "step" in order:
                optimizer.step()
        if "step" not in order:
            optimizer.step()
        if "clear" not in order:
            optimizer.zero_grad()
    assert torch.equal(model.weight.float(), torch.tensor([1.0, 0.0, 0.0]))
    with pytest.raises(ValueError, match="after the step"), amp.scale_loss(model(BATCH), optimizer) as scaled:
        optimizer.zero_grad()
        scaled.backward()
        optimizer.step()
        raise ValueError("after the step")
    assert torch.equal(model.weight.float(), torch.tensor([1.0, -1.0, 0.0]))


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_an_overflow_is_seen_by_a_step_inside_the_block(level: str) -> None:
    model, optimizer = made(level, loss_scale="dynamic")
    with amp.scale_loss(model(BATCH * float("inf")), optimizer) as scaled:
        scaled.backward()
        optimizer.step()
    assert torch.equal(model.weight.float(), torch.ones(3))


@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
def test_a_step_inside_a_block_that_delays_is_refused(level: str) -> None:
    model, optimizer = made(level)
    with pytest.raises(RuntimeError, match="gradients carry the loss scale"):  # noqa: SIM117
        with amp.scale_loss(model(OUTLIER), optimizer, delay_unscale=True) as scaled:
            scaled.backward()
            optimizer.step()
    assert torch.equal(model.weight.float(), torch.ones(3))
    optimizer.zero_grad()
    backward(model, optimizer, BATCH)
    optimizer.step()
    assert torch.equal(model.weight.float(), EXPECTED)


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_an_optimizer_that_is_named_twice_counts_once(level: str) -> None:
    model, optimizer = made(level)
    backward(model, [optimizer, optimizer], BATCH)
    optimizer.step()
    assert torch.equal(model.weight.float(), EXPECTED)


@pytest.mark.parametrize("delays", [(False, False), (True, False), (True, True, False)])
def test_a_parameter_of_two_optimizers_is_unscaled_once(delays: tuple[bool, ...]) -> None:
    """Those of an architecture search, say, which are among the model's, too."""
    model = Weights()
    optimizers: Any = [torch.optim.SGD(model.parameters(), lr=1.0) for _ in range(2)]
    amp.initialize(model, optimizers, opt_level="O1", verbosity=0, loss_scale=8.0)
    for delay in delays:
        backward(model, optimizers, BATCH, delay_unscale=delay)
    assert torch.equal(model.weight.grad, BATCH * len(delays))  # type: ignore[arg-type]
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
    assert float(model.weight[1].detach()) == 1.0 - len(delays)
    backward(model, optimizers[1], OTHER)  # a loss of one of them
    optimizers[1].step()
    assert float(model.weight[2].detach()) == 0.0


@pytest.mark.parametrize("scaled", ["16 bits", "float32"])
def test_an_fp16_optimizer_whose_backward_pass_fails_after_the_scale_moved(scaled: str) -> None:
    """Gradients that add up have the scale that they were brought to, whether the pass comes to its end or not."""
    model = Weights().half() if scaled == "16 bits" else Weights()
    optimizer: Any = FP16_Optimizer(torch.optim.SGD(model.parameters(), lr=1.0), 8.0, verbose=False)
    optimizer.backward(model(BATCH.to(model.weight.dtype)))
    optimizer.loss_scale = 2.0
    with pytest.raises(ValueError, match="fails"):
        optimizer.backward(Fails.apply(model(BATCH.to(model.weight.dtype))))
    optimizer.backward(model(BATCH.to(model.weight.dtype)))
    optimizer.step()
    assert torch.equal(model.weight.float(), torch.tensor([1.0, -1.0, 1.0]))


class Fails(torch.autograd.Function):
    """What runs out of memory in its backward pass."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> Any:
        raise ValueError("this pass fails")
