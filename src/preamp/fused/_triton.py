"""Launching the elementwise kernels. Imports Triton, so import it only where `triton_runs_on`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import numpy as np
import torch
import triton.language as tl
from torch import Tensor

from ..multi_tensor import Part, TensorList, count_writes, listed, parts_of
from . import _kernels
from ._options import AdagradOptions, AdamOptions, Lists, Lows, Options, SGDOptions

PLAIN, SPLIT, STOCHASTIC = (int(kind.value) for kind in (_kernels.PLAIN, _kernels.SPLIT, _kernels.STOCHASTIC))

CHUNK = 1024
"""Elements of one program."""
WARPS = 8
"""Four elements a thread: float32 numbers are then 16-byte accesses side by side, and 16-bit ones need no exchange
between threads, which eight elements a thread would take through shared memory."""

_TYPES = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}
DECAYS = {None: 0, False: 1, True: 2}


@dataclass(frozen=True, slots=True)
class Bucket:
    """Tensors of one call whose gradients share a dtype, and so do their low twins."""

    places: list[int] | None
    """Positions in the caller's lists; None for all of them."""
    grad: torch.dtype
    low: torch.dtype | None

    def of(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        """Those of `tensors` in the bucket."""
        return tensors if self.places is None else [tensors[i] for i in self.places]


def buckets(grads: Sequence[Tensor], lows: Lows) -> list[Bucket]:
    """Sort tensors by the dtypes of gradient and twin."""
    if not lows or isinstance(lows, TensorList):
        kinds, beside = listed(grads).dtypes, lows.dtypes if isinstance(lows, TensorList) else {None: None}
        if len(kinds) == len(beside) == 1:
            return [Bucket(None, *kinds, *beside)]
    twins = [None if low is None else low.dtype for low in lows] if lows else [None] * len(grads)
    pairs = list(zip([grad.dtype for grad in grads], twins, strict=True))
    if len(set(pairs)) == 1:
        return [Bucket(None, *pairs[0])]
    found: dict[tuple[torch.dtype, torch.dtype | None], list[int]] = {}
    for i, pair in enumerate(pairs):
        found.setdefault(pair, []).append(i)
    return [Bucket(places, *pair) for pair, places in found.items()]


def on(device: torch.device) -> AbstractContextManager[object]:
    """Make `device` the one that kernels start on."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def pair(number: float) -> tuple[float, float]:
    """A number as the sum of two float32 numbers, exact to 48 bits."""
    high = float(np.float32(number))
    return high, float(np.float32(number - high)) if np.isfinite(high) else 0.0


def prepare(
    device: torch.device, o: Options, step: Tensor | None = None, *, betas: tuple[float, float] | None = None,
    folds: bool = False, slowing: float = 0.0, decay: float = 0.0, norm: Tensor | None = None, most: float = 1.0,
    seed: int | None = None,
) -> Tensor:  # fmt: skip
    """Launch `prepare`; returns the (8,) float32 numbers that the kernels of a step read.

    `betas`: None for no bias correction. `folds`: divide the learning rate by 1 - beta1^t. `decay`: of the decoupled
    kind. `norm`: 0-d float32, the global L2 norm of the true gradients if they are to be clipped to `most`.
    `seed`: what a step that rounds by chance makes its chances from; 62 bits of it count.
    """
    out = torch.empty(_kernels.SCALARS, dtype=torch.float32, device=device)
    found = None if o.found is None else o.found.to(device)
    factor = None if o.factor is None else o.factor.to(device)
    rate = o.lr if isinstance(o.lr, Tensor) and o.lr.device == device and device.type != "cpu" else None
    high, low = (0.0, 0.0) if rate is not None else pair(float(o.lr))
    beta1, beta2 = betas or (0.0, 0.0)
    _kernels.prepare[(1,)](
        out, out if step is None else step, out if found is None else found, out if factor is None else factor,
        out if rate is None else rate, out if norm is None else norm, high, low, float(slowing), float(decay),
        float(most), *pair(beta1), *pair(beta2), (seed or 0) >> 31 & 0x7FFFFFFF, (seed or 0) & 0x7FFFFFFF,
        DRAWS=seed is not None, COUNTS=step is not None, HAS_FOUND=found is not None, HAS_FACTOR=factor is not None,
        HAS_RATE=rate is not None, CLIPS=norm is not None, UPHILL=o.maximize, CORRECTS=betas is not None,
        FOLDS=folds, num_warps=1, enable_fp_fusion=False,
    )  # fmt: skip
    return out


def pieces(lists: Lists, lows: Lows) -> Iterator[tuple[Bucket, Part]]:
    """The launches that a step over parameters, gradients and states takes; empty lists and missing twins left out."""
    for bucket in buckets(lists[1], lows):
        rows = [bucket.of(tensors) for tensors in lists if tensors]
        if bucket.low is not None:
            assert lows is not None
            rows.append(bucket.of(lows))  # type: ignore[arg-type]
        for part in parts_of(rows, CHUNK, bucket.places):
            yield bucket, part


def launch(kernel: Callable[..., object], part: Part, before: Sequence[object], after: Sequence[object], *,
           warps: int = WARPS, **constants: object) -> None:  # fmt: skip
    """One program for each chunk of a part."""
    plan = part.plan
    kernel[(plan.chunks,)](  # type: ignore[index]
        *before, plan.tensor_of, plan.block_of, plan.sizes, part.table, plan.tensors, *after,
        ALIGNED=part.aligned, CHUNK=plan.chunk, num_warps=warps, enable_fp_fusion=False, **constants,
    )  # fmt: skip


def wrote(params: Sequence[Tensor], lows: Lows) -> None:
    """Tell autograd, and whoever watches `_version`, that parameters and twins were changed in place."""
    count_writes(params)
    if lows:
        count_writes(lows if isinstance(lows, TensorList) else [low for low in lows if low is not None])


def type_of(dtype: torch.dtype | None) -> object:
    """Triton's name of a dtype."""
    return None if dtype is None else _TYPES[dtype]


def adam(lists: Lists, lows: Lows, step: Tensor, o: AdamOptions) -> None:
    """Adam on float32 parameters."""
    _adam(PLAIN, lists, lows, step, o)


def adam_split(lists: Lists, step: Tensor, o: AdamOptions) -> None:
    """Adam on float32 parameters in two halves, of which the lower is the last list."""
    _adam(SPLIT, lists, None, step, o)


def adam_stochastic(lists: Lists, step: Tensor, o: AdamOptions, seed: int) -> None:
    """Adam on bfloat16 parameters, rounded by chance."""
    _adam(STOCHASTIC, lists, None, step, o, seed)


def _adam(kind: int, lists: Lists, lows: Lows, step: Tensor, o: AdamOptions, seed: int | None = None) -> None:
    device = lists[0][0].device
    numbers = (1 - o.beta1, o.beta2, 1 - o.beta2, o.eps, o.weight_decay)
    with on(device):
        scalars = prepare(
            device, o, step, betas=(o.beta1, o.beta2), folds=True, decay=o.weight_decay if o.decoupled else 0.0,
            seed=seed,
        )  # fmt: skip
        for bucket, part in pieces(lists, lows):
            launch(
                _kernels.adam, part, (scalars,), tuple(map(float, numbers)), GRAD=type_of(bucket.grad),
                LOW=type_of(bucket.low), KIND=kind, DECAY=DECAYS[o.decoupled if o.weight_decay else None],
                AMSGRAD=o.amsgrad,
            )  # fmt: skip
    wrote(lists[0], lows)


def sgd(lists: Lists, lows: Lows, step: None, o: SGDOptions) -> None:
    """Gradient descent with momentum."""
    rule = 0 if not o.momentum else 1 if o.first else 2
    _simple(rule, lists, lows, None, o, (o.weight_decay, o.momentum, 1 - o.dampening, 0.0), nesterov=o.nesterov)


def adagrad(lists: Lists, lows: Lows, step: Tensor, o: AdagradOptions) -> None:
    """Adagrad."""
    _simple(3, lists, lows, step, o, (o.weight_decay, 0.0, 0.0, o.eps), slowing=o.lr_decay)


def _simple(
    rule: int, lists: Lists, lows: Lows, step: Tensor | None, o: Options, numbers: tuple[float, ...], *,
    nesterov: bool = False, slowing: float = 0.0,
) -> None:  # fmt: skip
    device = lists[0][0].device
    with on(device):
        scalars = prepare(device, o, step, slowing=slowing)
        for bucket, part in pieces(lists, lows):
            launch(
                _kernels.simple, part, (scalars,), tuple(map(float, numbers)), GRAD=type_of(bucket.grad),
                LOW=type_of(bucket.low), RULE=rule, NESTEROV=nesterov,
            )  # fmt: skip
    wrote(lists[0], lows)
