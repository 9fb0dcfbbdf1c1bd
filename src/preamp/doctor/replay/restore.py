"""A replay that leaves no trace: random state, gradients, buffers, attributes of modules, output, autocast's caches."""

from __future__ import annotations

import copy
import logging
import os
import sys
import warnings
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from ...machine import random_kept


@contextmanager
def untouched(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Gradients, buffers, training flags and random states on leaving as they were on entering; autocast caches empty.

    Inside, the parameters have no gradients, so that those found afterwards are the replay's own. What modules keep
    as plain attributes, and parameters that hooks of the user's step, are not put back.
    """
    parameters = {id(p): p for module in modules for p in module._parameters.values() if p is not None}
    grads = [(p, p.grad) for p in parameters.values()]
    tables = [(module, dict(module._buffers.items()), module.training) for module in modules]
    distinct = {id(b): b for _, buffers, _ in tables for b in buffers.values() if b is not None}
    copies = [(b, b.detach().clone()) for b in distinct.values()]
    torch.clear_autocast_cache()  # a cached cast would hide that it overflows
    with ExitStack() as stack:
        stack.enter_context(random_kept())
        # A graph of the caller's that saved a buffer still finds the version it saved.
        for buffer in distinct.values():  # one by one: torch 2.6 takes no more
            stack.enter_context(_unsafe_preserve_version_counter(buffer))
        try:
            for parameter, _ in grads:
                parameter.grad = None
            yield
        finally:
            for parameter, grad in grads:
                parameter.grad = grad
            for module, buffers, training in tables:
                for name in module._buffers.keys() - buffers.keys():
                    del module._buffers[name]
                for name, found in buffers.items():  # one by one: a scripted module's table takes no other
                    module._buffers[name] = found
                module.training = training
            with torch.no_grad():
                for buffer, copy in copies:
                    buffer.copy_(copy)
            torch.clear_autocast_cache()


def put_back_leaves(leaves: dict[int, tuple[Tensor, Tensor | None, Tensor | None]]) -> None:
    """Give each (leaf, gradient, copy of its values) the gradient it had."""
    with torch.no_grad():
        for leaf, grad, copy in leaves.values():
            if grad is not None and copy is not None:
                grad.copy_(copy)
            leaf.grad = grad


@contextmanager
def eager() -> Iterator[None]:
    """Compiled functions run as written: operators inside a compiled kernel cannot be seen."""
    if "torch._dynamo" not in sys.modules:
        yield
        return
    with torch.compiler.set_stance("force_eager"), warnings.catch_warnings():
        # The hooks also fire for the compiler's wrapper; it has the path of what it wraps, so nothing is off.
        warnings.filterwarnings("ignore", message="Using `torch.compile", category=UserWarning)
        yield


@contextmanager
def unheard() -> Iterator[None]:
    """What a model prints, logs or warns of it has said when it ran for the script."""
    silenced = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with (
            open(os.devnull, "w", encoding="utf-8") as nowhere,
            redirect_stdout(nowhere),
            redirect_stderr(nowhere),
            warnings.catch_warnings(),
        ):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(silenced)


_CHANGEABLE: frozenset[type] = frozenset({list, dict, set, deque, OrderedDict, defaultdict, Counter})


def attributes_of(module: nn.Module) -> dict[str, Any]:
    """All its attributes, with lists, dicts and sets copied; asked in every step, sorted out by `put_back`."""
    kept = module.__dict__.copy()
    if module.__class__.__module__.startswith("torch.nn.modules."):
        return kept  # most are of torch's own, which change none of theirs
    for name, value in module.__dict__.items():
        if value.__class__ in _CHANGEABLE and not name.startswith("_"):
            kept[name] = copy.copy(value)
    return kept


def put_back(kept: Mapping[nn.Module, dict[str, Any]]) -> None:
    """Give modules the attributes again that `attributes_of` found, but for torch's own: a counter, `training`."""
    for module, attributes in kept.items():
        for name, value in attributes.items():
            if not name.startswith("_"):  # a copy again: the next replay is to find what this one found
                vars(module)[name] = copy.copy(value) if value.__class__ in _CHANGEABLE else value
