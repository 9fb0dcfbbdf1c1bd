"""What several ranks do together to save and load: work of which none waits for one that failed, states by name.

States of models and optimizers have the names of parameters, as `torch.distributed.checkpoint` has them. torch makes
the states of an optimizer that has none by a step with gradients of zero. Such a step counts, so that bias corrections
and first steps change: it must not happen where a checkpoint is only written, and not to parameters that had no states
when it was.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from ..errors import CheckpointError
from ..sharding import flat_group, ranks

T = TypeVar("T")

_group: tuple[Any, Any] | None = None


def on_all_ranks(work: Callable[[], T], what: str, group: Any = None) -> list[T]:
    """Do `work` on each rank; its results by rank, when all have done it.

    An error on one rank is an error on all of them: its own there, and a `CheckpointError` that names it elsewhere.
    `what`: the sentence's beginning, as in "the checkpoint was not written".
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
    """A group of all ranks, over gloo, for threads whose exchanges must not mix with those of training.

    All ranks ask for it together; made once for each default group.
    """
    global _group
    if _group is None or _group[0] is not dist.group.WORLD:
        _group = (dist.group.WORLD, dist.new_group(backend="gloo"))
    return _group[1]


def named_states(model: nn.Module, optimizer: Optimizer) -> tuple[dict[str, Any], dict[str, Any]]:
    """The states of model and optimizer; of parameters that have not been stepped yet there are none."""
    from torch.distributed.checkpoint.state_dict import get_state_dict

    blank = not optimizer.state and flat_group([model]) is None
    if blank:
        optimizer.state[optimizer.param_groups[0]["params"][0]] = {}  # so that torch assumes that there are states
    try:
        states, steps = get_state_dict(model, optimizer)
    finally:
        if blank:
            optimizer.state.clear()
    of_steps: Any = steps["state"]
    return states, {**steps, "state": {name: state for name, state in of_steps.items() if state}}


@contextmanager
def states_for(model: nn.Module, optimizer: Optimizer, names: Collection[str]) -> Iterator[None]:
    """Inside, torch makes and sets an optimizer's states for the parameters named, and no others.

    It does so for parameters that require gradients. If something goes wrong, the optimizer has the states it had.
    """
    owners = _owners(model, optimizer)
    params = [param for group in optimizer.param_groups for param in group["params"]]
    before = [(param, param.grad, param.requires_grad) for param in params]
    states, unstarted = dict(optimizer.state), set(getattr(optimizer, "unstarted", ()))
    wanted = {param for name, param in owners.items() if name in names}
    try:
        for param in params:
            param.grad = None
            if owners and (param.is_floating_point() or param.is_complex()):
                param.requires_grad_(param in wanted)
        if any(not optimizer.state.get(param) for param in wanted):
            optimizer.state.clear()  # torch makes all of them, or none
        yield
    except BaseException:
        optimizer.state.clear()
        optimizer.state.update(states)
        if unstarted:
            optimizer.unstarted = unstarted  # type: ignore[attr-defined]
        raise
    finally:
        for param, gradient, requires in before:
            if owners and (param.is_floating_point() or param.is_complex()):
                param.requires_grad_(requires)
            param.grad = gradient


def _owners(model: nn.Module, optimizer: Optimizer) -> dict[str, nn.Parameter]:
    """The optimizer's parameters by torch's names; none for FSDP1, whose parameters have several."""
    if flat_group([model]) is not None:
        return {}
    groups: Any = named_states(model, optimizer)[1]["param_groups"]
    return {
        name: param
        for named, group in zip(groups, optimizer.param_groups, strict=True)
        for name, param in zip(named["params"], group["params"], strict=True)
    }
