"""Optimizer steps over many tensors at once: unscale, clip, step the float32 masters, publish, all under a device flag.

Every function here steps a list of parameters in place and means the same wherever it runs: torch's own operators
on any device (on the CPU bit for bit those behind `torch.optim.Adam(fused=True)` and its like), one Triton kernel
over all tensors on CUDA.
"""

from ._adam import adam_
from ._bits import join, split
from ._eight_bit import adam_8bit_
from ._eight_bit_codes import blocks_of, dequantize, quantize
from ._first_order import adagrad_, sgd_
from ._layerwise import lamb_, novograd_
from ._low_adam import adam_split_, adam_stochastic_

__all__ = [
    "adagrad_", "adam_", "adam_8bit_", "adam_split_", "adam_stochastic_", "blocks_of", "dequantize", "join", "lamb_",
    "novograd_", "quantize", "sgd_", "split",
]  # fmt: skip
