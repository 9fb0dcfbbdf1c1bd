"""The first operator that makes a non-finite value: found, named with its place, and without a trace."""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from preamp.doctor.findings.pa201 import Origin

from ._origin import find_origin


class Act(nn.Module):
    """A function as a module."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def line_of(function: Any, text: str) -> int:
    """The line of this file on which `function` says `text`."""
    lines, start = inspect.getsourcelines(function)
    return next(start + offset for offset, line in enumerate(lines) if text in line)


def origin_of(function: Callable[[Tensor], Tensor], x: Tensor) -> Origin | None:
    """The origin in a model of one module, "act", with a loss outside."""
    model = nn.Sequential()
    model.add_module("act", Act(function))
    x = x.clone().requires_grad_()
    return find_origin(lambda: model(x).float().sum(), models=model)


def check(found: Origin | None, op: str, kind: str, direction: str = "forward", module: str | None = "act") -> Origin:
    assert found is not None
    assert (found.op.removeprefix("aten.").partition(".")[0], found.kind) == (op, kind)
    assert (found.direction, found.module) == (direction, module)
    assert found.file == __file__
    finding = found.finding(7)
    assert finding.code == ("PA207" if found.from_data else "PA201")
    assert finding.severity == "error" and finding.step == 7
    assert finding.to_text() and finding.to_dict()
    return found


def test_exp_overflows_in_fp16() -> None:
    def act(x: Tensor) -> Tensor:
        y = x + 1
        return y.exp() * 2

    found = check(origin_of(act, torch.tensor([1.0, 11.0], dtype=torch.float16)), "exp", "inf")
    assert found.line == line_of(act, "exp()")
    (read,) = found.inputs
    assert (read.dtype, read.shape, read.min, read.max) == ("fp16", (2,), 2.0, 12.0)
    assert (found.output.inf, found.output.nan) == (1, 0)
    assert found.carriers[0] == ("act", "aten.mul.Tensor", "forward")


def test_matmul_overflows_in_fp16() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1)).half()
    nn.init.constant_(model[2].weight, 300.0)
    x = torch.ones(2, 4, dtype=torch.float16)
    nn.init.constant_(model[0].weight, 30.0)

    def run() -> Tensor:
        return model(x).sum()

    found = check(find_origin(run, models=model), "addmm", "inf", module="2")
    assert found.line == line_of(run, "model(x)")


def test_a_cast_overflows() -> None:
    check(origin_of(lambda x: x.half(), torch.tensor([1e5, 1.0])), "_to_copy", "inf")


def test_log_of_zero_is_the_origin_of_a_later_nan() -> None:
    def act(x: Tensor) -> Tensor:
        y = x.log()
        return y * x

    found = check(origin_of(act, torch.tensor([0.0, 1.0])), "log", "inf")
    assert found.line == line_of(act, "x.log()")


@pytest.mark.parametrize("x", [torch.zeros(3), torch.tensor([0.0, 4.0, 9.0])])
def test_sqrt_at_zero_backward(x: Tensor) -> None:
    def act(x: Tensor) -> Tensor:
        y = x * 2
        y = y.sqrt()
        return y + 1

    found = check(origin_of(act, x), "div", "inf", "backward")
    assert found.line == line_of(act, "y.sqrt()")


def test_zero_over_zero() -> None:
    check(origin_of(lambda x: x / x, torch.tensor([0.0, 1.0])), "div", "nan")


def test_norm_at_zero_backward() -> None:
    def act(x: Tensor) -> Tensor:
        squares = x.pow(2).sum()
        return squares.sqrt()

    found = check(origin_of(act, torch.zeros(3)), "div", "inf", "backward")
    assert found.line == line_of(act, "sqrt()")
    assert ("act", "aten.mul.Tensor", "backward") in found.carriers
    assert origin_of(lambda x: x.norm(), torch.zeros(3)) is None  # torch's own subgradient there is 0


MASK = torch.tensor([[False, True], [True, True]])


@pytest.mark.parametrize(
    "mask",
    [
        lambda x: x.masked_fill(MASK, float("-inf")),
        lambda x: x + torch.full((2, 2), float("-inf")).masked_fill(~MASK, 0.0),
        lambda x: torch.where(MASK, torch.tensor(float("-inf")), x),
        lambda x: torch.where(MASK, float("-inf"), x),
        lambda x: x + torch.zeros(2, 2).masked_fill_(MASK, float("-inf")),
    ],
)
def test_a_deliberate_mask(mask: Callable[[Tensor], Tensor]) -> None:
    with_one_row_full = origin_of(lambda x: mask(x).softmax(-1), torch.randn(2, 2))
    check(with_one_row_full, "_softmax", "nan")
    assert origin_of(lambda x: mask(x)[:1].softmax(-1), torch.randn(2, 2)) is None


def test_a_constant_beyond_the_range() -> None:
    check(
        origin_of(lambda x: (x + MASK.half() * -1e9).softmax(-1), torch.zeros(2, 2, dtype=torch.float16)), "mul", "inf"
    )


def test_an_infinity_that_is_removed_harms_nobody() -> None:
    assert origin_of(lambda x: 1 / (1 + x.detach().exp()) + x * 0.5, torch.tensor([100.0, 1.0])) is None
    trap = origin_of(lambda x: torch.where(x > 0, x.log(), x), torch.tensor([0.0, 1.0]))
    assert trap is not None and trap.op.startswith("aten.div") and trap.direction == "backward"


def test_nan_in_the_data() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    x = torch.tensor([[float("nan"), 1.0]])
    found = check(find_origin(lambda: model(x.view(1, 2)).sum(), models=model), "addmm", "nan", module="0")
    assert found.from_data and found.source is None


def test_nan_in_a_weight() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    with torch.no_grad():
        model[1].weight[0, 0] = float("inf")
    found = check(find_origin(lambda: model(torch.ones(1, 2)).sum(), models=model), "addmm", "inf", module="1")
    assert found.from_data and found.source == "1.weight"
    assert "1.weight" in found.finding().message


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.5))
        self.head = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))


def states(model: nn.Module) -> Iterator[bytes]:
    for tensor in [*model.state_dict().values(), torch.get_rng_state()]:
        yield tensor.numpy().tobytes()
    yield repr((random.getstate(), np.random.get_state(), [m.training for m in model.modules()])).encode()


@pytest.mark.parametrize("bad", [False, True])
def test_nothing_is_left_behind(bad: bool) -> None:
    model = Net()
    model(torch.randn(8, 4)).sum().backward()
    grads = {name: p.grad for name, p in model.named_parameters()}
    copies = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    leaf = torch.randn(8, 4, requires_grad=True)
    leaf.grad = leaf_grad = torch.ones(8, 4)
    pending = model(leaf).sum()  # a graph that saved the running statistics
    before = list(states(model))

    def run() -> Tensor:
        model.body.eval().train()
        random.random(), np.random.rand()
        return (model(leaf * 1e30 * 1e10 if bad else leaf)).pow(2).sum()

    found = find_origin(run, models=model)
    assert (found is not None) == bad
    assert list(states(model)) == before
    for name, parameter in model.named_parameters():
        assert parameter.grad is grads[name] and torch.equal(parameter.grad, copies[name])
    assert leaf.grad is leaf_grad and torch.equal(leaf_grad, torch.ones(8, 4))
    pending.backward()
    assert not nn.modules.module._global_forward_hooks and not nn.modules.module._global_forward_pre_hooks


@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float16])
def test_the_loss_is_the_same(dtype: torch.dtype | None) -> None:
    model = Net()
    x, losses = torch.randn(8, 4), []

    def run() -> Tensor:
        with torch.autocast("cpu", dtype=dtype, enabled=dtype is not None):
            loss = model(x).pow(2).mean()
        losses.append(loss.detach().clone())
        return loss

    assert find_origin(run, models=model) is None
    run()
    assert torch.equal(*losses)


def test_an_error_puts_everything_back() -> None:
    model = Net()
    before = list(states(model))

    def run() -> Tensor:
        model(torch.randn(8, 4))
        raise KeyError("the user's")

    with pytest.raises(KeyError, match="the user's"):
        find_origin(run, models=model)
    assert list(states(model)) == before
    assert not nn.modules.module._global_forward_hooks


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed(reentrant: bool) -> None:
    def act(x: Tensor) -> Tensor:
        y = x * 1
        return y.sqrt()

    def run() -> Tensor:
        return checkpoint(model, x, use_reentrant=reentrant).sum()

    model = nn.Sequential(Act(act))
    x = torch.zeros(2, requires_grad=True)
    found = check(find_origin(run, models=model), "div", "inf", "backward", module="0")
    assert found.line == line_of(act, "y.sqrt()")


def test_two_models_and_two_losses() -> None:
    models = {"good": nn.Linear(2, 2), "bad": nn.Sequential(Act(torch.log))}
    x = torch.zeros(1, 2, requires_grad=True)
    found = find_origin(lambda: [models["good"](x).sum(), models["bad"](x).sum()], models=models)
    check(found, "log", "inf", module="bad:0")


def test_a_scaled_backward_overflows() -> None:
    model = nn.Linear(2, 1, bias=False).half()
    x = torch.full((4, 2), 100.0, dtype=torch.float16)

    def run() -> Tensor:
        return model(x).float().mean()

    assert find_origin(run, models=model) is None
    found = find_origin(run, models=model, backward=lambda loss: (loss * 65536).backward())
    assert found is not None and found.direction == "backward" and found.module == ""
    assert found.line == line_of(run, "model(x)")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_autocast(dtype: torch.dtype) -> None:
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 1, bias=False))
    nn.init.constant_(model[0].weight, 200.0)
    nn.init.constant_(model[1].weight, 200.0)

    def run() -> Tensor:
        with torch.autocast("cpu", dtype=dtype):
            return model(torch.ones(1, 4)).float().sum()

    found = find_origin(run, models=model)
    if dtype is torch.bfloat16:
        assert found is None
    else:
        assert check(found, "mm", "inf", module="1").output.dtype == "fp16"


class Inverse(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grad / x


class Decorated(Inverse):
    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu")
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * 2


class WithSetup(Inverse):
    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return _doubled(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)


def _doubled(x: Tensor) -> Tensor:
    return x * 2


@pytest.mark.parametrize("function", [Inverse, Decorated, WithSetup])
def test_a_function_with_a_backward_of_its_own_is_found_where_it_is_applied(function: Any) -> None:
    def act(x: Tensor) -> Tensor:
        return function.apply(x)  # type: ignore[no-any-return]

    found = check(origin_of(act, torch.zeros(2)), "div", "inf", "backward")
    assert (found.file, found.line) == (__file__, line_of(act, "function.apply"))


def test_a_backward_in_python_adds_its_line() -> None:
    found = check(origin_of(Inverse.apply, torch.zeros(2)), "div", "inf", "backward")
    assert found.own == (__file__, line_of(Inverse.backward, "grad / x"))
    assert "backward written at" in found.finding().to_text()


def test_no_parameters_and_a_backward_of_its_own() -> None:
    x = torch.zeros(2, requires_grad=True)
    assert find_origin(lambda: (x.sqrt().sum() * 1.0).backward(), models=nn.ReLU()) is not None
    assert x.grad is None
    assert find_origin(lambda: (x.exp().sum() * 1.0).backward(), models=nn.ReLU()) is None


def test_in_place_on_a_view_does_not_shift_lines() -> None:
    def act(x: Tensor) -> Tensor:
        y = x * 1
        y[0] = y[1] * 2
        z = y.sqrt()
        return z + 1

    found = check(origin_of(act, torch.zeros(3)), "div", "inf", "backward")
    assert found.line == line_of(act, "y.sqrt()")


def test_a_finite_part_of_a_sick_tensor_does_not_hide_its_origin() -> None:
    def act(x: Tensor) -> Tensor:
        y = x.exp()
        part = y[1:] + 1
        return y * 2 + part.sum()

    found = check(origin_of(act, torch.tensor([100.0, 1.0])), "exp", "inf")
    assert not found.from_data


def test_a_compiled_model_runs_as_written() -> None:
    model = nn.Sequential(nn.Linear(2, 2), Act(torch.log))
    nn.init.zeros_(model[0].weight)
    nn.init.zeros_(model[0].bias)
    compiled = torch.compile(model, backend="eager")
    check(find_origin(lambda: compiled(torch.ones(1, 2)).sum(), models=compiled), "log", "inf", module="1")
