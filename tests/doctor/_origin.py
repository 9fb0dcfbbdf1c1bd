"""Where the first non-finite value of a step comes from, without the doctor around it: trails alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from preamp.doctor.findings.pa201 import Origin
from preamp.doctor.hooks import Clock
from preamp.doctor.names import Names
from preamp.doctor.operators import Stream
from preamp.doctor.places import Places
from preamp.doctor.replay.origin import Trails
from preamp.doctor.replay.restore import eager, put_back_leaves, untouched
from preamp.tree import tensors

Models = nn.Module | Mapping[str, nn.Module]


def names_of(models: Models) -> Names:
    """The names of the parts of these models, and of no others."""
    names = Names({"": models} if isinstance(models, nn.Module) else models)
    names.search(())
    return names


def find_origin(
    run: Callable[[], Any],
    *,
    models: nn.Module | Mapping[str, nn.Module],
    backward: Callable[[Tensor], None] | None = None,
) -> Origin | None:
    """The origin in `run`, which returns a loss, or losses, or has gone back by itself; None for a healthy step."""
    names = names_of(models)
    places = Places(names.known, names.owners, find_origin.__code__)
    modules, trails = dict(names.items()), Trails(names.items())
    stream = Stream(lambda: places, Clock())
    with ExitStack() as stack:
        stack.enter_context(untouched(list(modules.values())))
        stack.callback(put_back_leaves, trails.leaves)
        stack.enter_context(torch.autograd.set_multithreading_enabled(False))  # the mode lives on this thread
        stack.enter_context(eager())
        with stream.shown_to(trails):
            losses = list(tensors(run()))
            with stream.paused():
                found = trails.origin_of(losses)
            if found is None:
                _go_back([loss for loss in losses if loss.requires_grad], backward)
        parameters = (p for module in modules.values() for p in module._parameters.values())
        return found or trails.origin_of(p.grad for p in parameters if p is not None and p.grad is not None)


def _go_back(losses: list[Tensor], backward: Callable[[Tensor], None] | None) -> None:
    """Backward from all losses together, or by the caller's own function from each."""
    if backward is not None:
        for loss in losses:
            backward(loss)
    elif losses:
        torch.autograd.backward(losses)
