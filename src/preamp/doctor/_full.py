"""A script that asks for 16 bits, run in float32: every way of asking that we know is answered with float32.

For the comparison of a mixed-precision run with itself in full precision; only ever in a process of its own.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from .. import session
from ..formats import LOW_DTYPES
from ._patches import Patches

_ENABLED = {"autocast": 2, "scaler": 5}  # positions of `enabled` after self


def run_in_full(patches: Patches) -> None:
    """Have autocast, scalers, casts, preamp and Apex do nothing to the precision from here on."""
    patches.wrap(torch.autocast, "__init__", _without("autocast"))
    patches.wrap(torch.amp.grad_scaler.GradScaler, "__init__", _without("scaler"))
    for name in ("half", "bfloat16"):
        patches.wrap(nn.Module, name, lambda original, module: module)
        patches.wrap(Tensor, name, _cast_up)
    for kind in (nn.Module, Tensor):
        for name in ("to", "type"):
            patches.wrap(kind, name, _to_full)
    patches.wrap(torch, "set_default_dtype", _default)
    for owner in (session, sys.modules[session.__name__.rpartition(".")[0]]):
        patches.wrap(owner, "prepare", _prepare)
    after_import("preamp.compat.apex.amp.frontend", lambda module: patches.wrap(module, "initialize", _initialize))


def _without(kind: str) -> Callable[..., None]:
    """The constructor with `enabled=False`, however that was given."""
    position = _ENABLED[kind]

    def made(original: Any, made: Any, *args: Any, **kwargs: Any) -> None:
        if len(args) > position:
            args = (*args[:position], False, *args[position + 1 :])
        else:
            kwargs["enabled"] = False
        original(made, *args, **kwargs)

    return made


def _cast_up(original: Any, tensor: Tensor, **kwargs: Any) -> Tensor:
    return tensor.to(torch.float32, **kwargs)


def _to_full(original: Any, owner: Any, *args: Any, **kwargs: Any) -> Any:
    """`to` and `type`, with float32 for every 16-bit dtype among the arguments; of a tensor to be like, too."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor) and value.dtype in LOW_DTYPES:
            return original(owner, value.device, torch.float32)
    return original(owner, *map(_full, args), **{name: _full(value) for name, value in kwargs.items()})


def _full(value: Any) -> Any:
    if isinstance(value, str) and value.endswith(("HalfTensor", "BFloat16Tensor")):
        return value.replace("BFloat16", "Float").replace("Half", "Float")
    dtype = getattr(value, "dtype", None) if isinstance(value, type) else value  # torch.HalfTensor is a class
    return torch.float32 if isinstance(dtype, torch.dtype) and dtype in LOW_DTYPES else value


def _default(original: Any, dtype: Any) -> None:
    original(_full(dtype))


def _prepare(original: Any, model: Any, optimizer: Any, **kwargs: Any) -> Any:
    kept = {name: kwargs[name] for name in ("losses", "skip") if name in kwargs}
    return original(model, optimizer, level="O0", **kept)


def _initialize(original: Any, models: Any, optimizers: Any = None, *args: Any, **kwargs: Any) -> Any:
    enabled = kwargs.get("enabled", args[0] if args else True)
    kept = {name: kwargs[name] for name in ("num_losses", "verbosity") if name in kwargs}
    return original(models, optimizers, enabled=enabled, opt_level="O0", **kept)


def after_import(name: str, call: Callable[[Any], None]) -> None:
    """Call with a module as soon as it has been imported; at once if it has."""
    if name in sys.modules:
        call(sys.modules[name])
    else:
        sys.meta_path.insert(0, _Finder(name, call))


class _Finder(importlib.abc.MetaPathFinder):
    """Steps aside when its module is asked for, and wraps the loader that another finder gives."""

    def __init__(self, name: str, call: Callable[[Any], None]) -> None:
        self._name, self._call = name, call

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        if fullname != self._name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            run, call = spec.loader.exec_module, self._call

            def exec_module(module: Any) -> None:
                run(module)
                call(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
