"""Chooses how a step runs: by a Triton kernel, by torch's fused operator, or by the reference."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from importlib import import_module
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from ..errors import OptimizerError
from ..formats import LOW_DTYPES
from .bits import chances_like, join, round_stochastically, split
from .foreach import gate_of
from .lists import TensorList, count_writes, laid_out_like, split_by_walk
from .storage import RoundedOptions, Storage, Tensors
from .triton import triton_runs_on

Backend = Callable[[Storage, Tensors, Any], None]
"""A function that steps a storage by gradients and options."""

_GRADS = {torch.float16, torch.bfloat16, torch.float32}
_STATES = {torch.float32, torch.int8, torch.uint8}
_FUSED_DTYPES = {torch.float16, torch.bfloat16, torch.float32, torch.float64}

_SIZES, _WALKS = attrgetter("sizes"), attrgetter("walks")


@dataclass(frozen=True, slots=True)
class Algorithm:
    """The implementations of one algorithm's step. All of them mean the same."""

    reference: Backend
    """Plain operations, for tensors that neither a kernel nor a fused operator takes."""
    kernel: str = ""
    """The module below `triton` and the function that launches the kernel, if there is one."""
    torch_fused: tuple[str, Backend] | None = None
    """The name of torch's operator, and the step that calls it. It walks tensors in memory order, whatever their
    strides, and takes one dtype of everything but gradients, which can be cast."""
    elementwise: bool = True
    """Whether tensors may be stepped separately. If not, one tensor that a kernel cannot walk sends all of them to the
    reference."""
    low: bool = False
    """Whether the reference, too, takes 16-bit parameters with bits or stochastic rounding; else `_in_float32` is put
    around it, and the kernel takes no others."""
    shaped: int | None = None
    """How many of the lists of states have the parameters' shapes; None: all."""


def dispatch(algorithm: Algorithm, storage: Storage, gradients: Tensors, o: Any) -> None:
    """Step by the fastest implementation that takes these tensors.

    `OptimizerError` if sizes differ: a kernel would not notice that.
    """
    if not storage.params:
        return
    dtype = gradients[0].dtype
    if storage.chosen is None or storage.chosen[:2] != (algorithm, dtype):
        storage.chosen = algorithm, dtype, _choose(algorithm, storage, dtype, o)
    step, reference, elementwise = storage.chosen[2]
    if step is reference:
        step(storage, gradients, o)
        return
    lists = gradients, storage.params, *storage.states[: algorithm.shaped], storage.bits, storage.copies
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
            if not (fit and elementwise):
                reference(storage, gradients, o)
                return
            others = storage.at(rest)
            if storage.step is not None:
                others.step = storage.step.clone()  # each of the two calls counts the step
            reference(others, [gradients[i] for i in rest], o)
            storage, gradients = storage.at(fit), [gradients[i] for i in fit]
        gradients = laid_out_like(storage.params, gradients)
    step(storage, gradients, o)
    if algorithm.torch_fused is not None and step is algorithm.torch_fused[1]:  # which counts no writes
        count_writes(storage.params)


def _choose(algorithm: Algorithm, storage: Storage, gradients: torch.dtype, o: Any) -> tuple[Backend, Backend, bool]:
    """The fastest implementation that takes these devices and dtypes, of which the first tensor of a list speaks; the
    reference; and whether tensors may be stepped separately.
    """
    param, states = storage.params[0], [state[0].dtype for state in storage.states if state]
    stochastic = param.dtype is torch.bfloat16 and isinstance(o, RoundedOptions) and o.stochastic_rounding
    around = not algorithm.low and bool(storage.bits or stochastic)
    reference = partial(_in_float32, algorithm) if around else algorithm.reference
    elementwise = algorithm.elementwise and not around
    dtypes = gradients in _GRADS and _STATES.issuperset(states)
    takes_param = algorithm.low or around or param.dtype is torch.float32
    if algorithm.kernel and dtypes and takes_param and triton_runs_on(param.device):
        module, name = algorithm.kernel.split(".")
        return getattr(import_module(f".triton.{module}", __package__), name), reference, elementwise
    fused = algorithm.torch_fused
    if fused is not None and not around and param.dtype in _FUSED_DTYPES and {param.dtype}.issuperset(states):
        # torch's fused SGD on a CPU (2.13) changes only the last few elements of a 16-bit tensor
        broken = fused[0] == "_fused_sgd_" and param.dtype in LOW_DTYPES and param.device.type == "cpu"
        if not broken and _has_kernel(fused[0], param.device.type):
            return fused[1], reference, elementwise
    return reference, reference, elementwise


@cache
def _has_kernel(name: str, device_type: str) -> bool:
    if device_type not in ("cpu", "cuda"):  # elsewhere the meaning of a skipped step has not been checked
        return False
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", device_type.upper()))


def _in_float32(algorithm: Algorithm, storage: Storage, gradients: Tensors, o: RoundedOptions) -> None:
    """Step bfloat16 weights that lose no updates: join or widen them, step in float32, split or round the result."""
    gate = gate_of(storage.params[0].device, o.found)
    if gate is None:
        return
    params, bits, step = storage.params, storage.bits, storage.step
    taken = None if step is None else step + 1
    wide = list(map(join, params, bits)) if bits else [param.to(torch.float32) for param in params]
    dispatch(algorithm, Storage(wide, storage.states, step), gradients, o)

    def chances(position: int) -> Tensor:
        assert taken is not None
        return chances_like(wide[position], o.seed, taken, position)

    if bits:
        draws = bits[0].dtype is torch.int8
        halves = [split(each, bits[0].dtype, chances(i) if draws else None) for i, each in enumerate(wide)]
        gate.write(params, [weight for weight, _ in halves])
        gate.write(bits, [low for _, low in halves])
    else:
        gate.write(params, [round_stochastically(each, chances(i)) for i, each in enumerate(wide)])
