"""Checks that preamp's rules are the same on CUDA and the CPU, by every operator that torch has samples of.

Prints a line for each operator whose result, or a part of it, has different dtypes on the two devices.
"""

from __future__ import annotations

import warnings
from collections import Counter
from typing import Any

import torch
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

import preamp

from .device import pretend

COPIES = frozenset({
    "_to_copy", "detach", "alias", "clone", "view", "_unsafe_view", "t", "transpose", "permute", "unsqueeze", "squeeze",
    "expand", "select", "slice", "empty_like", "empty", "contiguous", "_reshape_alias", "as_strided", "lift_fresh",
    "new_empty", "zeros_like", "ones_like", "copy_",
})  # fmt: skip
SAMPLES = 4


class Parts(TorchDispatchMode):
    """Records the kernels of a call with the dtypes they compute in: those they read, or write if that is wider."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[tuple[Any, ...]] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func._schema.name.split("::")[1]
        read = [t.dtype for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor) and t.is_floating_point()]
        wrote = {t.dtype for t in tree_leaves(out) if isinstance(t, torch.Tensor)}
        if name not in COPIES:
            self.seen[(name, *(["float32"] if torch.float32 in wrote else map(str, read)))] += 1
        return out


def observed(op: Any, sample: Any, device: str) -> tuple[Any, ...]:
    def there(value: Any) -> Any:
        return value.detach().to(device) if isinstance(value, torch.Tensor) else value

    args, kwargs = tree_map(there, (sample.input, *sample.args)), tree_map(there, sample.kwargs)
    torch.manual_seed(0)
    parts = Parts()
    try:
        with preamp.autocast(device, dtype=torch.float16), parts, torch.no_grad():
            out = op(*args, **kwargs)
    except Exception as error:
        return (type(error).__name__,)
    return parts.seen, [t.dtype for t in tree_leaves(out) if isinstance(t, torch.Tensor)]


def main() -> None:
    """Compare all operators."""
    warnings.simplefilter("ignore")
    pretend()
    compared = 0
    for op in op_db:
        differ = False
        for dtype in (torch.float16, torch.float32):
            if dtype not in op.supported_dtypes("cpu"):
                continue
            for sample, _ in zip(op.sample_inputs("cpu", dtype), range(SAMPLES), strict=False):
                here, there = (observed(op, sample, device) for device in ("cpu", "cuda"))
                differ |= here != there
                compared += len(here) == len(there) == 2
        if differ:
            print(op.name, flush=True)
    print(compared, "compared")


if __name__ == "__main__":
    main()
