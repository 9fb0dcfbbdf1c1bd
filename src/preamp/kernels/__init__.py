"""Operations on lists of tensors: optimizer steps under a device flag, reading and editing gradients.

This room knows no parameters and no sessions. Each algorithm is a file with a reference in torch's own operators and
equivalent fast paths: torch's fused operators (on the CPU bit for bit those of `torch.optim.Adam(fused=True)` and so
on) and a Triton kernel on CUDA. Steps take a `Storage`, gradients and options.
"""

from .adam import adam
from .bits import chances_like, join, split
from .edit import (
    check_and_unscale_,
    clip_values_,
    dense_values,
    global_norm,
    grouped,
    multiply_,
    present_in,
    reciprocal,
)
from .eight_bit import BLOCK, adam_8bit, blocks_in_a_row, blocks_of, dequantize, quantize
from .first_order import adagrad, sgd
from .layerwise import lamb, novograd
from .lists import TensorList, batches, chained, count_writes, listed
from .momentum import lion, muon
from .norms import l2_norms
from .read import Reading, read
from .storage import (
    AdagradOptions,
    AdamOptions,
    LambOptions,
    LionOptions,
    MuonOptions,
    NovoGradOptions,
    Options,
    SGDOptions,
    ShardSum,
    Storage,
    Tensors,
)
from .triton import triton_runs_on

__all__ = [
    "BLOCK",
    "AdagradOptions",
    "AdamOptions",
    "LambOptions",
    "LionOptions",
    "MuonOptions",
    "NovoGradOptions",
    "Options",
    "Reading",
    "SGDOptions",
    "ShardSum",
    "Storage",
    "TensorList",
    "Tensors",
    "adagrad",
    "adam",
    "adam_8bit",
    "batches",
    "blocks_in_a_row",
    "blocks_of",
    "chained",
    "chances_like",
    "check_and_unscale_",
    "clip_values_",
    "count_writes",
    "dense_values",
    "dequantize",
    "global_norm",
    "grouped",
    "join",
    "l2_norms",
    "lamb",
    "lion",
    "listed",
    "multiply_",
    "muon",
    "novograd",
    "present_in",
    "quantize",
    "read",
    "reciprocal",
    "sgd",
    "split",
    "triton_runs_on",
]
