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

    def check_avail(self) -> None:
        """RuntimeError if somebody has set `available` to False."""
        if not self.available:
            raise RuntimeError(
                "MultiTensorApply.available was set to False, so its operators are not to be called: set it to True, "
                f"or call torch._foreach operators instead (import error: {self.import_err!r})"
            )

    def __call__(
        self,
        op: Callable[..., Any],
        noop_flag_buffer: Tensor,
        tensor_lists: list[list[Tensor]],
        *args: Any,
    ) -> Any:
        """What `op(chunk_size, noop_flag_buffer, tensor_lists, *args)` returns."""
        self.check_avail()
        return op(self.chunk_size, noop_flag_buffer, tensor_lists, *args)


multi_tensor_applier = MultiTensorApply(2048 * 32)
