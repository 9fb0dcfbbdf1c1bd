"""Launching Adam with moments in 8 bits. Imports Triton, so import it only where `triton_runs_on`."""

from __future__ import annotations

import torch
from torch import Tensor

from . import _eight_bit_kernels as _kernels
from ._options import AdamOptions, Lists, Lows
from ._triton import DECAYS, PLAIN, SPLIT, STOCHASTIC, launch, on, pieces, prepare, type_of, wrote

NEAREST = int(_kernels.NEAREST.value)
WARPS = 1
"""What finds the largest magnitude of a block by itself."""
REGISTERS = 56
"""Of a thread. Triton would take 64 to 80, and with more than 64 there is no room for 32 warps on a processor; with 56
nothing is spilled."""
LIMIT = {} if torch.version.hip else {"maxnreg": REGISTERS}
"""An option that Triton has for CUDA only."""


def adam(lists: Lists, lows: Lows, step: Tensor, o: AdamOptions, seed: int, by_chance: bool, *, split: bool) -> None:
    """Parameters, gradients, codes of moments 1 and 2, their scales, and lower halves if `split`."""
    param = lists[0][0]
    if split:
        kind = SPLIT
    elif param.dtype is torch.float32:
        kind = PLAIN
    else:
        kind = STOCHASTIC if by_chance else NEAREST
    numbers = (1 - o.beta1, o.beta2, 1 - o.beta2, o.eps, o.weight_decay)
    with on(param.device):
        scalars = prepare(
            param.device, o, step, betas=(o.beta1, o.beta2), folds=True, decay=o.weight_decay if o.decoupled else 0.0,
            seed=seed,
        )  # fmt: skip
        for bucket, part in pieces(lists, lows):
            low = param.dtype if kind == NEAREST else bucket.low
            launch(
                _kernels.adam_8bit, part, (scalars,), tuple(map(float, numbers)), warps=WARPS,
                GRAD=type_of(bucket.grad), LOW=type_of(low), KIND=kind,
                DECAY=DECAYS[o.decoupled if o.weight_decay else None], **LIMIT,
            )  # fmt: skip
    wrote(lists[0], lows)
