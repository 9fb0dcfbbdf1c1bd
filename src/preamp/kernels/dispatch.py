"""Chooses how a step runs: by a Triton kernel, by torch's fused operator, or by the reference."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from operator import attrgetter
from typing import Any

import torch

from ..errors import OptimizerError
from ..formats import LOW_DTYPES
from .lists import TensorList, count_writes, laid_out_like, split_by_walk
from .storage import Storage, Tensors
from .triton import triton_runs_on

Backend = Callable[[Storage, Tensors, Any], None]
"""A function that steps a storage by gradients and options."""

_GRADS = {torch.float16, torch.bfloat16, torch.float32}
_STATES = {torch.float32, torch.int8, torch.uint8}
_FUSED_DTYPES = {torch.float16, torch.bfloat16, torch.float32, torch.float64}

_SIZES, _WALKS = attrgetter("sizes"), attrgetter("walks")


@dataclass(frozen=True, slots=True)
class Backends:
    """The implementations of one algorithm's step. All of them mean the same."""

    reference: Backend
    """Plain operations, for tensors that neither a kernel nor a fused operator takes."""
    triton: Callable[[], Backend] | None = None
    """Imports the kernel, if there is one; it must not be called unless Triton runs."""
    torch_fused: tuple[str, Backend] | None = None
    """The name of torch's operator, and the step that calls it. It walks tensors in memory order, whatever their
    strides, and takes one dtype of everything but gradients, which can be cast."""
    elementwise: bool = True
    """Whether tensors may be stepped separately. If not, one tensor that a kernel cannot walk sends all of them to the
    reference."""
    low: bool = False
    """Whether the kernel takes 16-bit parameters."""
    shaped: int | None = None
    """How many of the lists of states have the parameters' shapes; None: all."""


def dispatch(storage: Storage, gradients: Tensors, o: Any, backends: Backends) -> None:
    """Step by the fastest implementation that takes these tensors.

    `OptimizerError` if sizes differ: a kernel would not notice that.
    """
    dtype = gradients[0].dtype
    if storage.chosen is None or storage.chosen[:2] != (backends, dtype):
        storage.chosen = backends, dtype, _choose(storage, dtype, backends)
    step = storage.chosen[2]
    if step is backends.reference:
        step(storage, gradients, o)
        return
    lists = gradients, storage.params, *storage.states[: backends.shaped], storage.bits, storage.copies
    every = [each if isinstance(each, TensorList) else TensorList(each) for each in lists if each]
    sizes, walks = list(map(_SIZES, every)), list(map(_WALKS, every))
    if sizes.count(sizes[0]) < len(sizes):
        raise OptimizerError(
            "gradients, states or 16-bit copies have other numbers of elements than their parameters: each list holds "
            "one tensor for each parameter, of its shape"
        )
    if walks.count(walks[0]) < len(walks) or None in walks[0]:
        fit, rest = split_by_walk(walks[1:])  # gradients may differ: they are copied
        if rest:
            if not (fit and backends.elementwise):
                backends.reference(storage, gradients, o)
                return
            others = storage.at(rest)
            if storage.step is not None:
                others.step = storage.step.clone()  # each of the two calls counts the step
            backends.reference(others, [gradients[i] for i in rest], o)
            storage, gradients = storage.at(fit), [gradients[i] for i in fit]
        gradients = laid_out_like(storage.params, gradients)
    step(storage, gradients, o)
    if backends.torch_fused is not None and step is backends.torch_fused[1]:  # which counts no writes
        count_writes(storage.params)


def _choose(storage: Storage, gradients: torch.dtype, backends: Backends) -> Backend:
    """The fastest implementation that takes these devices and dtypes, of which the first tensor of a list speaks."""
    param, states = storage.params[0], [state[0].dtype for state in storage.states if state]
    dtypes = gradients in _GRADS and _STATES.issuperset(states) and (backends.low or param.dtype is torch.float32)
    if backends.triton is not None and dtypes and triton_runs_on(param.device):
        return backends.triton()
    fused = backends.torch_fused
    if fused is not None and param.dtype in _FUSED_DTYPES and {param.dtype}.issuperset(states):
        # torch's fused SGD on a CPU (2.13) changes only the last few elements of a 16-bit tensor
        broken = fused[0] == "_fused_sgd_" and param.dtype in LOW_DTYPES and param.device.type == "cpu"
        if not broken and _has_kernel(fused[0], param.device.type):
            return fused[1]
    return backends.reference


@cache
def _has_kernel(name: str, device_type: str) -> bool:
    if device_type not in ("cpu", "cuda"):  # elsewhere the meaning of a skipped step has not been checked
        return False
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", device_type.upper()))
