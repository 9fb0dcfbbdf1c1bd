"""What a script makes before its models run belongs to the step: batches that were cast, times, masks, weights."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import preamp
from preamp.report import Finding

HALF, BF16 = torch.float16, torch.bfloat16


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(9000, 8), nn.Linear(8, 1)
        self.register_buffer("low", torch.tensor(-1e9))
        self.register_buffer("decay", torch.full((4,), 1 - 2.0**-9))

    def forward(self, ids: Tensor) -> Tensor:
        return torch.as_tensor(self.head(self.embed(ids.long())))


def found(
    step: Callable[[nn.Module, int], Tensor],
    steps: int = 3,
    dtype: torch.dtype | None = None,
    codes: tuple[str, ...] = ("PA114", "PA201", "PA207"),
) -> list[Finding]:
    """What is found in a few steps of this loss, errors first."""
    torch.manual_seed(0)
    model = Tagger()
    with preamp.doctor.watch(model) as seen:
        model = model if dtype is None else model.to(dtype)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        for number in range(steps):
            loss = step(model, number)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return [one for one in seen.findings if one.code in codes]


def line_of(function: Any, text: str) -> int:
    lines, start = inspect.getsourcelines(function)
    return next(start + offset for offset, line in enumerate(lines) if text in line)


def test_ids_that_were_cast_with_the_batch() -> None:
    def step(model: nn.Module, number: int) -> Tensor:
        batch = {"ids": torch.randint(0, 8900, (64,)).to(BF16 if is_cast else torch.long)}
        return torch.as_tensor(model(batch["ids"])).square().mean()

    is_cast = True
    (finding,) = found(step)
    assert (finding.code, finding.severity) == ("PA114", "error")
    assert finding.line == line_of(Tagger.forward, "ids.long()")
    is_cast = False
    assert found(step) == []


@pytest.mark.parametrize("first", [0, 2])
def test_a_batch_that_float16_does_not_hold_is_no_bad_data(first: int) -> None:
    def step(model: nn.Module, number: int) -> Tensor:
        price = torch.full((4, 1), 9e4 if number >= first else 1.0).half()  # here
        return F.huber_loss(torch.as_tensor(model(torch.arange(4))), price.float())

    (finding,) = found(step)
    assert (finding.code, finding.line) == ("PA201", line_of(step, "# here"))
    assert "90000" in finding.message and "65504" in finding.message


def test_a_buffer_that_a_cast_of_its_module_made_infinite() -> None:
    def step(model: nn.Module, number: int) -> Tensor:
        return torch.as_tensor(model(torch.arange(4)) + 0 * model.low).sum()  # here

    (finding,) = found(step, dtype=HALF)
    assert (finding.code, finding.line) == ("PA201", line_of(step, "# here"))
    assert "'low'" in finding.message and f"line {line_of(found, 'model.to(dtype)')}" in finding.message


@pytest.mark.parametrize("shows", [True, False])
def test_what_was_computed_before(shows: bool) -> None:
    """Infinities that reach the loss, in every step, and those of which a division makes zeros, in a look."""

    def step(model: nn.Module, number: int) -> Tensor:
        sigma = torch.tensor([[1.0], [10.0], [300.0], [700.0]], dtype=HALF)
        square = sigma**2  # here
        weight = (square + 1) / square if shows else sigma / (square + 1).sqrt()
        return torch.as_tensor(weight.float() * model(torch.arange(4))).sum()

    (finding,) = found(step)
    assert (finding.code, finding.line) == ("PA201", line_of(step, "# here"))
    assert "sigma.float()**2" in str(finding.fix) and "# tried: " in str(finding.fix)


@pytest.mark.parametrize("dtype", [BF16, None])
def test_a_view_of_a_table_that_was_cast(dtype: torch.dtype | None) -> None:
    """It has the shadow of the table, and a replay leaves it that."""

    def step(model: nn.Module, number: int) -> Tensor:
        out = torch.as_tensor(model(torch.arange(4)))
        kept = torch.as_tensor(model.decay)[:, None] ** torch.arange(1000)  # here
        return (out * kept).float().mean()

    for one in (seen := found(step, dtype=dtype, codes=("PA104",))):
        assert one.line == line_of(step, "# here")
        assert isinstance(one.evidence, dict) and "none helps" in str(one.evidence["tried"])
    assert bool(seen) == (dtype is BF16)


@pytest.mark.parametrize("dtype", [BF16, None])
def test_times_of_a_factory(dtype: torch.dtype | None) -> None:
    """The numbers of `linspace` and `arange` are known, also where 16 bits are only the default."""

    def step(model: nn.Module, number: int) -> Tensor:
        times = torch.linspace(0, 999, 100, dtype=dtype)
        return torch.as_tensor(model(times.round().long())).float().mean()  # here

    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(before if dtype else BF16)
        (finding,) = found(step)
    finally:
        torch.set_default_dtype(before)
    assert (finding.code, finding.line) == ("PA114", line_of(step, "# here"))


@pytest.mark.parametrize("epsilon", [1e-8, 1e-3])
@pytest.mark.parametrize("make", ["tensor", "as_tensor", "new_tensor"])
def test_numbers_that_a_tensor_was_made_of(make: str, epsilon: float) -> None:
    """What `torch.tensor` rounds was a number of Python's: the line that made it is part of the fix."""

    def step(model: nn.Module, number: int) -> Tensor:
        x = torch.as_tensor(model(torch.arange(4))) * torch.tensor([[0.0], [1.0], [1.0], [1.0]])
        eps = MAKERS[make](x, epsilon)
        return (x.half() / (x.half().abs() + eps)).float().mean()  # here

    seen = found(step)
    assert [(one.code, one.line) for one in seen] == ([("PA201", line_of(step, "# here"))] if epsilon < 1e-7 else [])


MAKERS: dict[str, Any] = {
    "tensor": lambda x, epsilon: torch.tensor(epsilon, dtype=HALF, device=x.device),
    "as_tensor": lambda x, epsilon: torch.as_tensor([0.0 + epsilon], dtype=HALF),
    "new_tensor": lambda x, epsilon: x.new_tensor(epsilon, dtype=HALF),
}


def test_a_table_that_was_made_before_the_optimizer() -> None:
    """Watched from the first line on: here a cast makes a number infinite, and a division a zero of it."""
    counts = torch.tensor([2e5, 9e4, 3e4, 5e3])
    model = nn.Linear(2, 4)
    with preamp.doctor.watch(model) as seen:
        table = counts.half()  # here
        weight = (1000 / table).float()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        F.cross_entropy(model(torch.ones(8, 2)), torch.arange(8) % 4, weight).backward()
        optimizer.step()
    (finding,) = [one for one in seen.findings if one.severity == "error"]
    assert (finding.code, finding.line) == ("PA201", line_of(test_a_table_that_was_made_before_the_optimizer, "# here"))
    assert "# tried: " in str(finding.fix)


class Adam(torch.optim.Optimizer):
    """One that somebody wrote, whose moments have the dtype of the weights."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 1e-3})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            m, v = 0.1 * p.grad, 0.001 * p.grad * p.grad
            p -= 1e-3 * m / (v.sqrt() + 1e-8)  # here


class AdamOfTensors(Adam):
    """Its rate of decay has the dtype of the weights: in bfloat16 it is 1."""

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            b = torch.tensor(0.999, dtype=p.dtype)
            s = self.state[p]
            s["v"] = (1 - b) * p.grad**2  # here
            p -= 1e-3 * p.grad / (s["v"].sqrt() + 1e-4)


def test_a_fix_that_was_not_tried_begins_where_numbers_were_rounded() -> None:
    torch.manual_seed(0)
    model = nn.Linear(16, 4).to(BF16)
    with preamp.doctor.watch(model) as seen:
        optimizer = AdamOfTensors(model.parameters())
        for _ in range(2):
            model(torch.randn(32, 16, dtype=BF16)).float().square().mean().backward()
            optimizer.step()
    (finding, *_) = [one for one in seen.findings if one.line == line_of(AdamOfTensors, "# here")]
    fix = str(finding.fix)
    assert "b = torch.tensor(0.999, dtype=torch.float32)" in fix and "# not tried: " in fix
    assert 's["v"] = (1 - b.float()) * p.grad.float()**2' in fix


@pytest.mark.parametrize("dtype", [HALF, torch.float32])
def test_the_step_of_an_optimizer_that_somebody_wrote(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = nn.Linear(16, 4).to(dtype)
    with preamp.doctor.watch(model) as seen:
        optimizer = Adam(model.parameters())
        for _ in range(3):
            (model(torch.randn(32, 16, dtype=dtype)).float().square().mean() / 100).backward()
            optimizer.step()
            optimizer.zero_grad()
    lines = [one.line for one in seen.findings if one.code == "PA101" and one.severity == "error"]
    assert lines == ([line_of(Adam, "# here")] if dtype is HALF else [])


def test_what_is_compiled_after_the_optimizer_was_made_stays_compiled() -> None:
    """A dispatch mode that is on where compiled code is called makes it run as written."""
    ran: list[int] = []

    def backend(graph: Any, _: Any) -> Any:
        def run(*given: Any) -> Any:
            ran.append(1)
            return graph(*given)

        return run

    torch.compiler.reset()
    model = nn.Linear(4, 1)
    with preamp.doctor.watch(model):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        prepare: Any = torch.compile(lambda x: (x + 1).half(), backend=backend)
        for _ in range(3):
            model(prepare(torch.ones(2, 4)).float()).sum().backward()
            optimizer.step()
    assert len(ran) == 3


def test_a_script_that_keeps_all_that_it_casts_is_not_kept_a_second_time() -> None:
    """A replay buffer of small float16 tensors."""
    from preamp.doctor.follow import precision
    from preamp.doctor.follow.watch import Watch

    kept, model = [], nn.Linear(2, 1)
    with preamp.doctor.watch(model):
        kept += [torch.ones(2).half() for _ in range(precision.TABLES + 9)]
        watch = Watch.of_this_process()
        assert watch is not None and len(watch.run.tape.readings.casts) == precision.TABLES < len(kept)
