"""Cross entropy with label smoothing, row by row."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ..._operator_function import operator_function

__all__ = ["SoftmaxCrossEntropyLoss"]


def _losses(
    logits: Tensor, labels: Tensor, smoothing: float = 0.0, padding_idx: int = 0, half_to_float: bool = False
) -> Tensor:
    """The cross entropy of each row, of shape (N,), for `logits` (N, C) of any floating dtype and `labels` (N,).

    Computed in float32 (float64 for float64); the result has the dtype of `logits`, or float32 with `half_to_float`.
    `smoothing`: the share of the target that is spread over all classes. Rows whose label is `padding_idx` lose 0:
    by default those of class 0, as in Apex; write a number that is no class where there is no padding.
    """
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    losses = F.cross_entropy(wide, labels.long(), reduction="none", ignore_index=padding_idx, label_smoothing=smoothing)
    return losses if half_to_float else losses.to(logits.dtype)


SoftmaxCrossEntropyLoss = operator_function("SoftmaxCrossEntropyLoss", _losses)
