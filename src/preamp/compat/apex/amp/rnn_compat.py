"""Recurrent layers and cells in 16 bits: their functions lie where torch's modules look for them, in `_VF`."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import rnn as _rnn

from ._casts import Casts
from .utils import mapped

RNN_NAMES = ["rnn_relu", "rnn_tanh", "gru", "lstm"]
CELL_NAMES = [name + "_cell" for name in ("rnn_relu", "rnn_tanh", "gru", "lstm")]


def has_old_rnns() -> bool:
    """Whether torch still has the recurrent backends of its first releases."""
    return False


def whitelist_rnn_cells(handle: Casts) -> None:
    """Have all recurrent layers and cells compute in 16 bits, until `handle._deactivate()`."""
    handle._save_func(_rnn, "_VF")
    setattr(_rnn, "_VF", _Functions(handle))  # noqa: B010  (torch's annotations call it a module)
    handle._save_func(nn.RNNBase, "check_input")
    nn.RNNBase.check_input = _without_dtype(nn.RNNBase.check_input, handle)  # type: ignore[method-assign]


class _Functions:
    """torch._VF, with the functions of recurrent layers replaced by ones that cast."""

    def __init__(self, handle: Casts) -> None:
        for name in (*RNN_NAMES, *CELL_NAMES):
            setattr(self, name, _in_low(getattr(torch._VF, name), handle))

    def __getattr__(self, name: str) -> Any:
        return getattr(torch._VF, name)


def _in_low(function: Any, handle: Casts) -> Any:
    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if not handle._is_active or not handle.takes(args[0]):
            return function(*args, **kwargs)
        cast = handle.caster(handle.half_type, function.__name__)
        if args[0].is_cuda and function.__name__ in RNN_NAMES:
            # cuDNN wants the weights of a layer in one piece of memory. torch's own autocast lays out such a piece in
            # 16 bits, differentiably; the rest is cast here so that the result is in 16 bits for sure.
            inputs = [mapped(cast, x) if not _is_weights(x) else x for x in args]
            with torch.autocast("cuda", dtype=handle.half_type):
                return function(*inputs, **kwargs)
        return function(*[mapped(cast, x) for x in args], **kwargs)

    return wrapper


def _is_weights(x: Any) -> bool:
    return isinstance(x, (list, tuple)) and len(x) > 0 and isinstance(x[0], nn.Parameter)


def _without_dtype(check: Any, handle: Casts) -> Any:
    """Torch refuses inputs of another dtype than the weights', which the functions above bring together."""

    @functools.wraps(check)
    def wrapper(self: Any, input: Tensor, batch_sizes: Tensor | None) -> None:
        if handle._is_active and input.is_floating_point():
            input = torch.empty(input.shape, dtype=self._flat_weights[0].dtype, device="meta")
        check(self, input, batch_sizes)

    return wrapper
