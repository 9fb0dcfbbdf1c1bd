"""Questions that Apex asked of the releases of its day; each has one answer now."""

from __future__ import annotations

from collections.abc import Iterable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor


def variable_is_tensor() -> bool:
    """Whether Variable and Tensor are one."""
    return True


def tensor_is_variable() -> bool:
    """Whether Variable and Tensor are one."""
    return True


def tensor_is_float_tensor() -> bool:
    """Whether torch.Tensor means torch.FloatTensor only."""
    return False


def is_tensor_like(x: Any) -> bool:
    """Whether `x` is a tensor."""
    return isinstance(x, Tensor)


def is_floating_point(x: Tensor) -> bool:
    """Whether a tensor's dtype is a floating one."""
    return torch.is_floating_point(x)


def scalar_python_val(x: Any) -> Any:
    """A number out of a tensor of one element."""
    return x.item() if hasattr(x, "item") else x[0]


def filter_attrs(module: ModuleType | type, names: Iterable[str]) -> list[str]:
    """Those of `names` that `module` has."""
    return [name for name in names if hasattr(module, name)]
