"""A model whose forward casts what it gets and what it returns, and whose state_dict is float32.

The model gets a subclass of its class: `deepcopy`, `torch.save` of the whole model, DataParallel's replicas and EMA
copies then run their own forward, which a function put on the instance would not.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, MutableMapping
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from ....autocast import PRODUCTS, widened
from ....formats import LOW_DTYPES
from ....modules import Subclasses
from ....tree import map_tensors
from .._masters import update_master
from .._notice import warn


class CastedModel(nn.Module):
    """The mixin that a casting model's class gets."""

    _amp_casts: tuple[torch.dtype | None, torch.dtype | None, nn.Parameter | None]
    """Dtypes of inputs and outputs, and a parameter whose dtype inputs follow: some call model.float() to validate."""
    _amp_original: type[nn.Module]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As torch's; zeros are marked, so that the masters learn of them."""
        super().zero_grad(set_to_none)
        for gradient in (parameter.grad for parameter in self.parameters() if parameter.grad is not None):
            gradient._amp_zeroed_version = gradient._version  # type: ignore[attr-defined]


def _forward(self: Any, *args: Any, **kwargs: Any) -> Any:
    """The model's forward between the casts of positional and keyword arguments, and of outputs."""
    inner = self.__dict__.get("_amp_forward")
    if not isinstance(self, CastedModel):  # amp is closed, and somebody has kept this method
        return type(self).forward(self, *args, **kwargs) if inner is None else inner(*args, **kwargs)
    inputs, outputs, followed = self._amp_casts
    inputs = inputs if followed is None else followed.dtype
    if inputs is not None:
        args = tuple(cast_nested(value, inputs) for value in args)
        kwargs = {key: cast_nested(value, inputs) for key, value in kwargs.items()}
    with widened() if inputs in LOW_DTYPES else nullcontext():
        result = self._amp_original.forward(self, *args, **kwargs) if inner is None else inner(*args, **kwargs)
    return result if outputs is None else cast_nested(result, outputs)


def _reduce_ex(self: Any, protocol: Any) -> Any:
    return _rebuild, (self._amp_original,), getattr(self, "__getstate__", lambda: self.__dict__)()


def _rebuild(original: type[nn.Module]) -> nn.Module:
    made = object.__new__(_SUBCLASSES.of(original))
    PRODUCTS.hold_while(made)
    return made


_SUBCLASSES = Subclasses(CastedModel, "_amp_original", forward=_forward, __reduce_ex__=_reduce_ex)


_PRODUCTS: MutableMapping[nn.Module, weakref.finalize[..., Any]] = WeakIdKeyDictionary()
"""What ends the hold that a 16-bit model has on the products of the CPU."""


def patch_forward(model: nn.Module, inputs: torch.dtype | None, outputs: torch.dtype | None) -> None:
    """Have a model cast floating inputs to `inputs` and outputs to `outputs`; None leaves them alone."""
    followed = next((p for p in model.parameters() if p.dtype is inputs), None)
    model.__dict__["_amp_casts"] = (inputs, outputs, followed)
    if inputs in LOW_DTYPES and followed is not None and followed.device.type == "cpu" and model not in _PRODUCTS:
        _PRODUCTS[model] = PRODUCTS.hold_while(model)
    if isinstance(model, CastedModel):
        return
    if "forward" in model.__dict__ and "_amp_forward" not in model.__dict__:
        # somebody replaced it on the instance; his is what runs
        model.__dict__["_amp_forward"] = model.__dict__.pop("forward")
    model.__class__ = _SUBCLASSES.of(type(model))


def unpatch_forward(model: nn.Module) -> None:
    """Undo `patch_forward`; a forward that somebody has put on the model since stays, and may call the one he found."""
    if model in _PRODUCTS:
        _PRODUCTS.pop(model)()
    if isinstance(model, CastedModel):
        _SUBCLASSES.leave(model)
        model.__dict__.pop("_amp_casts")
        if "forward" in model.__dict__:
            model.__dict__.setdefault("_amp_forward", None)  # so that amp, begun again, lets it stand outside
        elif "_amp_forward" in model.__dict__:
            model.__dict__["forward"] = model.__dict__.pop("_amp_forward")


def cast_nested(value: Any, dtype: torch.dtype) -> Any:
    """`value` with its floating tensors in `dtype`; containers keep their type, other objects get `.to(dtype)`."""
    plain = isinstance(value, (Tensor, str, np.ndarray, np.generic, nn.Module, Mapping, list, tuple, type))
    if not plain and callable(getattr(value, "to", None)):
        return value.to(dtype)
    return map_tensors(lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor, value)


def keep_state_dict_full(model: nn.Module) -> None:
    """Have state_dicts of the model and its parts hold float32 where those hold 16 bits; masters follow loads."""
    for module in model.modules():
        if _full_entries not in module._state_dict_hooks.values():
            module._register_state_dict_hook(_full_entries)
            module._register_load_state_dict_pre_hook(_tell_masters, with_module=True)


def _full_entries(module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: Any) -> None:
    last, version = _SHOWN.pop(module, (None, 0))
    if last is not None and last._version != version:
        warn(
            "an entry of an earlier state_dict() was changed in place, by an average of weights, say. That does not "
            "reach the model, as with NVIDIA's Apex: at O2 and O3 these are float32 copies of its 16-bit weights. "
            "Write into model.parameters() and model.buffers()"
        )
    for own in (module._parameters, module._buffers):
        for name in own:
            value = state_dict.get(prefix + name)
            if isinstance(value, Tensor) and value.dtype in LOW_DTYPES:
                state_dict[prefix + name] = full = value.float()
                if full.numel() <= _SMALL and not full.is_inference():
                    _SHOWN[module] = full, full._version


_SMALL = 4096
"""Entries of so many elements at most are kept in `_SHOWN`."""
_SHOWN: MutableMapping[nn.Module, tuple[Tensor, int]] = WeakIdKeyDictionary()
"""An entry of a module's last state_dict, and its version then: a sample, by which writes are seen."""


def _tell_masters(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    _SHOWN.pop(module, None)  # what was changed may be what is loaded
    for name, parameter in module._parameters.items():
        written = state_dict.get(prefix + name)
        if parameter is not None and isinstance(written, Tensor):
            update_master(parameter, written)


def check_params_fp32(models: list[nn.Module]) -> None:
    """RuntimeError for a model that has float16 parameters or buffers already."""
    for model in models:
        for kind, named in (("param", model.named_parameters()), ("buffer", model.named_buffers())):
            for name, value in named:
                if value.dtype is torch.float16:
                    expected = "torch.cuda.FloatTensor" if value.is_cuda else "torch.FloatTensor"
                    raise RuntimeError(
                        f"Found {kind} {name} with type {value.type()}, expected {expected}.\n"
                        "When using amp.initialize, you do not need to call .half() on your model before passing it, "
                        "whatever the opt_level: it casts by itself, and masters made of rounded weights have lost "
                        "their lower bits. A model that went through amp.initialize before is returned as it was "
                        "then; keep it."
                    )
