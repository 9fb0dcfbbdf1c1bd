"""What kernels over many tensors share: how they find their tensor, the numbers of a step, launching.

A program finds its tensor and its position in it by `Chunks`, and the addresses in the table (`tables`). Full chunks
need no masks and, with aligned addresses, use vector loads. For that the compiler needs to see a start that is a
multiple of the chunk's length and an address marked as aligned.

Before a step `prepare_numbers` runs as one program: it counts the step and turns hyper-parameters, loss scale and flag
into a few numbers, so that all programs of the second launch see the same ones. float64 numbers are passed as pairs of
float32, since Triton turns Python's floats into float32. Fused multiply-add is off at the launch, so that every device,
and the interpreter, rounds alike.

This module imports Triton: import it only if `triton_runs_on`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from ..lists import count_writes, listed
from ..storage import Options, Storage, Tensors
from .tables import Part, parts_of

GO = tl.constexpr(0)  # 1 if the step may write, else 0
FACTOR = tl.constexpr(1)  # what gradients are multiplied by; negative to maximize
RATE = tl.constexpr(2)  # what updates are multiplied by: the learning rate / (1 - beta1^t)
ROOT = tl.constexpr(3)  # 1 / sqrt(1 - beta2^t)
KEEP = tl.constexpr(4)  # 1 - lr * weight decay
KEY = tl.constexpr(5)  # the key of this step's random numbers
SCALARS = 8

CHUNK = 1024
"""Elements of one program."""
WARPS = 8
"""Four elements a thread: float32 numbers are then adjacent 16-byte accesses, and 16-bit ones need no exchange between
threads, which with eight elements a thread would go through shared memory."""

_TYPES = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}


@triton.jit
def chunk_of(tensor_of, block_of, sizes, CHUNK: tl.constexpr):
    """A program's tensor, the first element of its chunk (int64), and how many elements the tensor has."""
    program = tl.program_id(0)
    tensor = tl.load(tensor_of + program)
    return tensor, tl.load(block_of + program).to(tl.int64) * CHUNK, tl.load(sizes + tensor)


@triton.jit
def address(table, row, tensors, tensor, TYPE: tl.constexpr, ALIGNED: tl.constexpr):
    """A pointer to elements of `TYPE` from a row of the table."""
    pointer = tl.load(table + row * tensors + tensor).to(tl.pointer_type(TYPE))
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@triton.jit
def take(pointer, places, size, FULL: tl.constexpr):
    """Load elements; beyond the end of the tensor there are zeros."""
    if FULL:
        return tl.load(pointer + places)
    return tl.load(pointer + places, mask=places < size, other=0)


@triton.jit
def put(pointer, places, values, size, FULL: tl.constexpr):
    """Store elements, none beyond the end of the tensor."""
    if FULL:
        tl.store(pointer + places, values)
    else:
        tl.store(pointer + places, values, mask=places < size)


@triton.jit
def mix(value):
    """Hash 32 bits so that each depends on all of them (the finalizer of MurmurHash3)."""
    value = value ^ (value >> 16)
    value = value * 0x85EBCA6B
    value = value ^ (value >> 13)
    value = value * 0xC2B2AE35
    return value ^ (value >> 16)


@triton.jit(do_not_specialize=["seed_high", "seed_low"])
def prepare_numbers(
    out, step, found, factor, rate, rate_high, rate_low, slowing, decay,
    beta1_high, beta1_low, beta2_high, beta2_low, seed_high, seed_low,
    DRAWS: tl.constexpr, COUNTS: tl.constexpr, HAS_FOUND: tl.constexpr, HAS_FACTOR: tl.constexpr,
    HAS_RATE: tl.constexpr, UPHILL: tl.constexpr, CORRECTS: tl.constexpr,
):  # fmt: skip
    """Write the numbers a step needs to `out`, and count the step if it is taken."""
    go = tl.full((), 1.0, tl.float32)
    if HAS_FOUND:
        go = tl.where(tl.load(found).to(tl.float32) > 0, 0.0, go)
    tl.store(out + GO, go)
    times = tl.full((), 1.0, tl.float32)
    if HAS_FACTOR:
        times = tl.load(factor).to(tl.float32)
    if UPHILL:
        times = -times
    tl.store(out + FACTOR, times)
    lr = tl.full((), rate_high, tl.float64) + tl.full((), rate_low, tl.float64)
    if HAS_RATE:
        lr = tl.load(rate).to(tl.float64)
    tl.store(out + KEEP, (1.0 - lr * decay).to(tl.float32))
    first = tl.full((), 1.0, tl.float64)
    second = tl.full((), 1.0, tl.float64)
    if COUNTS:
        before = tl.load(step)
        if go > 0:
            tl.store(step, before + 1.0)
        if DRAWS:
            seed = mix(tl.full((), seed_low, tl.uint32) ^ mix(tl.full((), seed_high, tl.uint32)))
            key = mix(seed + (before + 1.0).to(tl.int32).to(tl.uint32))
            tl.store(out + KEY, key.to(tl.float32, bitcast=True))
        lr = lr / (1.0 + before.to(tl.float64) * slowing)
        if CORRECTS:
            left = before.to(tl.int64) + 1
            power1 = tl.full((), beta1_high, tl.float64) + tl.full((), beta1_low, tl.float64)
            power2 = tl.full((), beta2_high, tl.float64) + tl.full((), beta2_low, tl.float64)
            for _ in range(32):  # beta^t by squaring: exact to a few units of float64, on every device
                first = tl.where(left & 1 == 1, first * power1, first)
                second = tl.where(left & 1 == 1, second * power2, second)
                power1 = power1 * power1
                power2 = power2 * power2
                left = left >> 1
            first = 1.0 / (1.0 - first)
            second = 1.0 / tl.sqrt(1.0 - second)
    tl.store(out + RATE, (lr * first).to(tl.float32))
    tl.store(out + ROOT, second.to(tl.float32))


def on(device: torch.device) -> AbstractContextManager[object]:
    """Launch kernels on `device`."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def _pair(number: float) -> tuple[float, float]:
    """A number as the sum of two float32 numbers, exact to 48 bits."""
    high = float(np.float32(number))
    return high, float(np.float32(number - high)) if np.isfinite(high) else 0.0


def prepare(
    device: torch.device, o: Options, step: Tensor | None = None, *, betas: tuple[float, float] | None = None,
    slowing: float = 0.0, decay: float = 0.0, seed: int | None = None,
) -> Tensor:  # fmt: skip
    """Launch `prepare_numbers`; returns the (8,) float32 numbers that the kernels of a step read.

    `betas`: None for no bias correction. `decay`: decoupled weight decay. `seed`: of stochastic rounding; 62 bits of it
    are used.
    """
    out = torch.empty(SCALARS, dtype=torch.float32, device=device)
    found = None if o.found is None else o.found.to(device)
    factor = None if o.factor is None else o.factor.to(device)
    rate = o.lr if isinstance(o.lr, Tensor) and o.lr.device == device and device.type != "cpu" else None
    high, low = (0.0, 0.0) if rate is not None else _pair(float(o.lr))
    beta1, beta2 = betas or (0.0, 0.0)
    prepare_numbers[(1,)](
        out, out if step is None else step, out if found is None else found, out if factor is None else factor,
        out if rate is None else rate, high, low, float(slowing), float(decay), *_pair(beta1), *_pair(beta2),
        (seed or 0) >> 31 & 0x7FFFFFFF, (seed or 0) & 0x7FFFFFFF, DRAWS=seed is not None, COUNTS=step is not None,
        HAS_FOUND=found is not None, HAS_FACTOR=factor is not None, HAS_RATE=rate is not None, UPHILL=o.maximize,
        CORRECTS=betas is not None, num_warps=1, enable_fp_fusion=False,
    )  # fmt: skip
    return out


def parts(storage: Storage, gradients: Tensors, shaped: int | None = None) -> Iterator[tuple[object, Part]]:
    """The launches of a step: one for each dtype of gradients, with Triton's name of it, and of tensors aligned or not.

    Rows of the tables: parameters, gradients, states, the lower halves of masters, copies; empty lists are left out.
    `shaped`: how many lists of states the kernel gets.
    """
    every = [storage.params, gradients, *storage.states[:shaped], storage.bits, storage.copies]
    lists, dtypes = [tensors for tensors in every if tensors], listed(gradients).dtypes
    for dtype in dtypes:
        places = None if len(dtypes) == 1 else [i for i, each in enumerate(gradients) if each.dtype is dtype]
        rows = lists if places is None else [[tensors[i] for i in places] for tensors in lists]
        for part in parts_of(rows, CHUNK, places):
            yield type_of(dtype), part


def launch(kernel: Callable[..., object], part: Part, before: Sequence[object], after: Sequence[object], *,
           warps: int = WARPS, **constants: object) -> None:  # fmt: skip
    """One program for each chunk of a part."""
    chunks = part.chunks
    kernel[(chunks.count,)](  # type: ignore[index]
        *before, chunks.tensor_of, chunks.block_of, chunks.sizes, part.table, chunks.tensors, *after,
        ALIGNED=part.aligned, CHUNK=chunks.chunk, num_warps=warps, enable_fp_fusion=False, **constants,
    )  # fmt: skip


def wrote(storage: Storage) -> None:
    """Count a write to parameters and copies in `_version`, for autograd and others."""
    count_writes(storage.params)
    if storage.copies:
        count_writes(storage.copies)


def type_of(dtype: torch.dtype) -> object:
    """Triton's name of a dtype."""
    return _TYPES[dtype]


def type_of_copies(storage: Storage) -> object:
    """Triton's name of the dtype of 16-bit copies; None without any."""
    return type_of(storage.copies[0].dtype) if storage.copies else None
