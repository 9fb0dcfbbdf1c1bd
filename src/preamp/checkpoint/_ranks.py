"""What several ranks do together to save and load: work of which none waits for one that failed, states by name.

States of models and optimizers have the names of parameters. torch makes the states of an optimizer that has none by a
step. Such a step counts: none must be made where a checkpoint is only written, or of what had no states when it was.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from ..errors import CheckpointError
from ..session import sessions_of
from ..sharding import ranks
from ._masters import in_float32

T = TypeVar("T")

_group: tuple[Any, Any] | None = None


def on_all_ranks(work: Callable[[], T], what: str, group: Any = None) -> list[T]:
    """Do `work` on each rank; its results by rank. An error on one is a `CheckpointError` on the others.

    `what`: how that begins, as in "the checkpoint was not written".
    """
    if ranks() == 1:
        return [work()]
    failed: Exception | None = None
    result: T | None = None
    try:
        result = work()
    except Exception as error:
        failed = error
    answers: list[Any] = [None] * dist.get_world_size(group)
    mine = None if failed is None else f"{type(failed).__name__}: {failed}".splitlines()[0][:300]
    dist.all_gather_object(answers, (result, mine), group)
    if failed is not None:
        raise failed
    for number, (_, theirs) in enumerate(answers):
        if theirs is not None:
            raise CheckpointError(f"{what}: rank {number} failed ({theirs})")
    return [result for result, _ in answers]


def own_group() -> Any:
    """A group of all ranks, over gloo, for threads beside training: asked for by all, made once a default group."""
    global _group
    if _group is None or _group[0] is not dist.group.WORLD:
        _group = (dist.group.WORLD, dist.new_group(backend="gloo"))
    return _group[1]


def named_states(model: nn.Module, optimizer: Optimizer) -> tuple[dict[str, Any], dict[str, Any]]:
    """The states of model and optimizer; of parameters that have not been stepped yet there are none."""
    from torch.distributed.checkpoint.state_dict import get_state_dict

    blank = not optimizer.state
    if blank:
        optimizer.state[optimizer.param_groups[0]["params"][0]] = {}  # so that torch assumes that there are states
    try:
        states, steps = get_state_dict(model, optimizer)
    finally:
        if blank:
            optimizer.state.clear()
    of_steps: Any = steps["state"]
    return states, {**steps, "state": {name: state for name, state in of_steps.items() if state}}


def names_in(optimizer: Optimizer, steps: Mapping[str, Any]) -> dict[nn.Parameter, str]:
    """The names under which the `named_states` of an optimizer have its parameters."""
    pairs = zip(steps["param_groups"], optimizer.param_groups, strict=True)
    return {p: name for own, group in pairs for name, p in zip(own["params"], group["params"], strict=True)}


@contextmanager
def states_for(model: nn.Module, optimizer: Optimizer, names: Collection[str]) -> Iterator[None]:
    """Inside, the optimizer has states for the parameters named, and no others, to be read into.

    They are made by a step with gradients of zero at a rate of zero, which moves no parameter. If something goes wrong,
    the optimizer has the states it had.
    """
    owners = names_in(optimizer, named_states(model, optimizer)[1])
    gradients = {param: param.grad for param in owners}
    states, unstarted = dict(optimizer.state), set(getattr(optimizer, "unstarted", ()))
    try:
        optimizer.state.clear()
        with in_float32(sessions_of(model)), _at_rate_zero(optimizer):
            for param, name in owners.items():
                param.grad = torch.zeros_like(param) if name in names else None
            optimizer.step()
        yield
    except BaseException:
        optimizer.state.clear()
        optimizer.state.update(states)
        if unstarted:
            optimizer.unstarted = unstarted  # type: ignore[attr-defined]
        raise
    finally:
        for param, gradient in gradients.items():
            param.grad = gradient


@contextmanager
def _at_rate_zero(optimizer: Optimizer) -> Iterator[None]:
    rates = [(group, group["lr"]) for group in optimizer.param_groups if "lr" in group]
    try:
        for group, rate in rates:
            group["lr"] = torch.zeros_like(rate) if isinstance(rate, Tensor) else 0.0
        yield
    finally:
        for group, rate in rates:
            group["lr"] = rate
