"""What may happen in a training run: steps of all kinds, and events after which it must go on as if they had not been.

A test puts the second kind anywhere between (and, where that is allowed, between the micro-batches of) the first, and
compares every bit at the end.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

import preamp
from preamp import lr_finder
from preamp.doctor import examine

from .training import Training


class Stop(Exception):
    """Raised by hooks, in the middle of a pass."""


def _stop(*_: Any) -> None:
    raise Stop


Event = Callable[["Training"], Any]
STEPS: dict[str, Callable[[Training], Iterator[None]]] = {}
"""Steps of the run; they yield where micro-batches meet."""
NEUTRAL: dict[str, Event] = {}
BETWEEN: dict[str, Event] = {}
"""Those of `NEUTRAL` that may also happen between two micro-batches."""


Program = list[tuple[str, list[str], list[str]]]
"""Steps, each with the events before it, and those between its micro-batches."""


def play(run: Training, program: Program, events: Mapping[str, Event] | None) -> dict[str, Any]:
    """All that is left of a run; with no `events`, those that the program names do not happen."""
    for step, before, between in program:
        for name in before if events else ():
            events[name](run)  # type: ignore[index]
        for _ in STEPS[step](run):
            for name in between if events else ():
                events[name](run)  # type: ignore[index]
    return run.end()


def _step(function: Callable[[Training], Iterator[None]]) -> Callable[[Training], Iterator[None]]:
    STEPS[function.__name__] = function
    return function


def _neutral(function: Event) -> Event:
    NEUTRAL[function.__name__] = function
    return function


def _between(function: Event) -> Event:
    BETWEEN[function.__name__] = function
    return _neutral(function)


def _generator() -> Any:
    """What has the random numbers of tensors that are made where tensors are made."""
    return torch.cuda if torch.get_default_device().type == "cuda" else torch


def random_state() -> torch.Tensor:
    """`torch.get_rng_state` of the default device."""
    return _generator().get_rng_state()


def set_random_state(state: torch.Tensor) -> None:
    """Go on where `random_state` was asked."""
    _generator().set_rng_state(state)


def _without_trace(function: Event) -> Event:
    """Batches, random numbers and what batch norm has seen are given back, as a script does that evaluates."""

    @functools.wraps(function)
    def event(run: Training) -> None:
        seen = {name: value.clone() for name, value in run.model.named_buffers()}
        random, drawn = random_state(), run.drawn
        try:
            function(run)
        finally:
            set_random_state(random)
            run.drawn = drawn
            run.model.train()
            with torch.no_grad():
                for name, buffer in run.model.named_buffers():
                    if not torch.equal(buffer, seen[name]):
                        buffer.copy_(seen[name])

    return event


@_step
def plain(run: Training) -> Iterator[None]:
    run.backward()
    run.finish()
    yield from ()


@_step
def clipped(run: Training) -> Iterator[None]:
    run.backward()
    run.told.append(float(run.session.clip_grad_norm_(0.1)))
    run.finish()
    yield from ()


@_step
def accumulated(run: Training) -> Iterator[None]:
    run.backward()
    yield
    run.backward()
    run.finish()


@_step
def accumulated_and_told(run: Training) -> Iterator[None]:
    run.backward(sync=False)
    yield
    run.backward()
    run.session.clip_grad_value_(0.05)
    run.finish()


@_step
def infinite(run: Training) -> Iterator[None]:
    x = run.batch()
    x[1, 3] = torch.inf
    run.backward(x)
    run.finish()
    yield from ()


@_step
def edited(run: Training) -> Iterator[None]:
    run.backward()
    run.session.unscale_()
    for p in run.model.parameters():
        if p.grad is not None:
            p.grad.mul_(0.5)
    run.finish()
    yield from ()


@_between
@_without_trace
def evaluation(run: Training) -> None:
    run.model.eval()
    with torch.no_grad():
        run.loss(run.batch())


@_between
@_without_trace
def inference(run: Training) -> None:
    run.model.eval()
    with torch.inference_mode():
        run.loss(run.batch())


@_between
@_without_trace
def validation_in_float32(run: Training) -> None:
    run.model.eval()
    with run.session.full_precision():
        torch.autograd.grad(run.model(run.batch()), [run.model.last.weight])


@_between
def values_read(run: Training) -> None:
    with run.session.full_precision(values_only=True):
        copy.deepcopy(run.model.state_dict())


@_between
def states_read(run: Training) -> None:
    run.saved()
    copy.deepcopy(run.optimizer)


@_between
def report_read(run: Training) -> None:
    report = run.session.last_step
    if report is not None:
        assert report.index >= 0 and report.scale > 0 and (report.skipped or not report.nonfinite)
    assert repr(run.session) and run.session.loss_scale() > 0 and run.session.skipped <= run.session.steps


@_between
@_without_trace
def copy_of_the_model(run: Training) -> None:
    twin = copy.deepcopy(run.model).eval()
    with torch.no_grad(), run.session.autocast():
        twin(run.batch())


@_between
@_without_trace
def functional_call(run: Training) -> None:
    run.model.eval()
    others = {name: value.detach().clone() for name, value in run.model.named_parameters()}
    with torch.no_grad(), run.session.autocast():
        torch.func.functional_call(run.model, others, (run.batch(),))


@_between
def written_elsewhere(run: Training) -> None:
    with tempfile.TemporaryDirectory() as folder:
        preamp.checkpoint.save(Path(folder) / "alone.pt", model=run.model)


@_between
def frozen_and_not(run: Training) -> None:
    trained = [p for p in run.model.parameters() if p.requires_grad]
    for requires in (False, True):
        for p in trained:
            p.requires_grad_(requires)


@_between
def nothing_moved(run: Training) -> None:
    run.model.to(next(run.model.parameters()).device)
    gc.collect()


@_between
@_without_trace
def another_session(run: Training) -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with preamp.prepare(model, optimizer, level="O4") as other:
        with other.autocast():
            loss = model(torch.randn(2, 4)).float().sum()
        other.backward(loss)
        other.step()


@_between
def plain_region(run: Training) -> None:
    with torch.autocast(torch.get_default_device().type, torch.bfloat16):
        assert (torch.ones(3, 3) @ torch.ones(3, 3)).dtype is torch.bfloat16


@_between
@_without_trace
def examined(run: Training) -> None:
    examine(run.model, run.optimizer, run.session.policy)


@_neutral
def loaded_again(run: Training) -> None:
    run.load(run.saved())


@_neutral
def built_again(run: Training) -> None:
    states, random = run.saved(), random_state()
    run.session.close()
    run.build()
    run.load(states)
    set_random_state(random)


@_neutral
def read_from_a_file(run: Training) -> None:
    random = random_state()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "run.pt"
        preamp.checkpoint.save(
            file, model=run.model, optimizer=run.optimizer, session=run.session, schedule=run.schedule
        )
        run.session.close()
        run.build()
        content = preamp.checkpoint.load(file, model=run.model, optimizer=run.optimizer, session=run.session)
        run.schedule.load_state_dict(content["schedule"])
    set_random_state(random)


@_neutral
def prepared_again(run: Training) -> None:
    """Where there is no scale to lose, and no rounding of the weights."""
    level, maker, *_ = run.how
    if level in ("O0", "O4", "O5") and maker != "AdamW, by chance":
        run.session.close()
        run.prepare()


@_neutral
@_without_trace
def thrown_away(run: Training) -> None:
    run.session.backward(run.loss(run.batch()))
    run.session.clip_grad_norm_(1.0)
    run.session.zero_grad()


@_neutral
@_without_trace
def unscaled_and_thrown_away(run: Training) -> None:
    run.session.backward(run.loss(run.batch()))
    run.session.unscale_()
    run.session.zero_grad(set_to_none=False)
    run.session.zero_grad()


@_neutral
@_without_trace
def error_in_forward(run: Training) -> None:
    handle = run.model.last.register_forward_hook(_stop)
    with handle, contextlib.suppress(Stop):
        run.session.backward(run.loss(run.batch()))
    run.session.zero_grad()


@_neutral
@_without_trace
def error_in_backward(run: Training) -> None:
    handle = run.model.first.weight.register_hook(_stop)
    with handle, contextlib.suppress(Stop):
        run.session.backward(run.loss(run.batch()))
    run.session.zero_grad()


@_neutral
@_without_trace
def error_in_step(run: Training) -> None:
    """The session's counters go on, as the step was attempted: they are put back."""
    counted = copy.deepcopy(run.session.state_dict())
    handle = run.optimizer.register_step_pre_hook(_stop)
    run.session.backward(run.loss(run.batch()))
    with handle, contextlib.suppress(Stop):
        run.session.step()
    run.session.zero_grad()
    run.session.load_state_dict(counted)


@_neutral
@_without_trace
def range_test(run: Training) -> None:
    batches = [run.batch() for _ in range(3)]
    with contextlib.suppress(preamp.PreampError):  # where all steps are skipped
        lr_finder.sweep(run.session, batches, run.forward, start_lr=1e-6, end_lr=1e-2, steps=5)
