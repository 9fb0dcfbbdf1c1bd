"""`multi_tensor_applier`, by which Apex's optimizers and their users call operators over lists of tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

__all__ = ["MultiTensorApply", "multi_tensor_applier"]


class MultiTensorApply:
    """Calls an operator of `amp_C` over lists of tensors: `applier(op, noop_flag_buffer, tensor_lists, *args)`.

    `chunk_size`: handed to the operator, as Apex's kernels cut tensors by it; preamp's own choose for themselves.
    `available` is always True, there being nothing to compile; `warned` and `import_err` are kept for those who look.
    """

    available = True
    warned = False
    import_err: ImportError | None = None

    def __init__(self, chunk_size: int) -> None:
        self.chunk_size = chunk_size

    def __call__(
        self, op: Callable[..., Any], noop_flag_buffer: Tensor, tensor_lists: list[list[Tensor]], *args: Any
    ) -> Any:
        """What `op(chunk_size, noop_flag_buffer, tensor_lists, *args)` returns."""
        return op(self.chunk_size, noop_flag_buffer, tensor_lists, *args)


multi_tensor_applier = MultiTensorApply(2048 * 32)
