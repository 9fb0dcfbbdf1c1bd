"""The work behind `amp.initialize`, where everything is checked before anything is changed, and its undoing."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import nn

from ....errors import kind_of
from .._notice import warn
from .._scaler import LossScaler
from ..fp16_utils import FP16_Optimizer, convert_module, convert_network
from ..parallel import DistributedDataParallel as ApexDDP
from . import amp
from ._amp_state import _amp_state
from ._amp_state import maybe_print as maybe_print  # Apex has it here
from ._casted_model import cast_nested as cast_nested  # and this
from ._casted_model import check_params_fp32, keep_state_dict_full, patch_forward, unpatch_forward
from ._process_optimizer import ATTACHED, _process_optimizer

_CHANGED: Any = weakref.WeakSet()
"""Models that `initialize` has changed, for `close`."""


def check_models(models: list[Any], wrapped: bool = False) -> None:
    """RuntimeError for models inside a parallel wrapper, which would not see what is changed; `wrapped` allows it.

    Apex's own is told of only: Apex meant to refuse it, and never did.
    """
    for model in models:
        if not isinstance(model, nn.Module):
            raise TypeError(f"amp.initialize prepares torch.nn.Modules, and got {kind_of(model)}")
        if isinstance(model, ApexDDP) and not wrapped:
            warn(
                "the model is in apex.parallel.DistributedDataParallel already. It trains so; wrap it AFTER "
                "amp.initialize, as parameters are sent in the dtypes that they have then"
            )
        if isinstance(model, (nn.parallel.DistributedDataParallel, nn.DataParallel)) and not wrapped:
            kind = "DataParallel" if isinstance(model, nn.DataParallel) else "parallel.DistributedDataParallel"
            raise RuntimeError(
                f"Incoming model is an instance of torch.nn.{kind}. Parallel wrappers should only be applied to the "
                "model(s) AFTER the model(s) have been returned from amp.initialize: they read the parameters' dtypes."
            )


def check_compiled(models: list[nn.Module], dtype: torch.dtype | None) -> None:
    """RuntimeError for a model that gets a casting forward and is torch.jit's, or at a `dtype` has a part that is."""
    for model in models:
        for name, part in model.named_modules() if dtype else [("", model)]:
            if isinstance(part, torch.jit.ScriptModule):
                raise RuntimeError(
                    f"amp.initialize got {kind_of(model)}, of which {f'the part {name!r}' if name else 'all'} was "
                    "compiled by torch.jit. Casts of inputs, outputs and state_dict cannot be put on that: compile no "
                    'part, or write opt_level="O1" or "O4", which leave it as it is; it wants float32 inputs then'
                )


def check_optimizers(optimizers: list[Any]) -> None:
    """RuntimeError for an optimizer that keeps masters of its own, TypeError for what is no optimizer."""
    for optimizer in optimizers:
        if isinstance(optimizer, FP16_Optimizer):
            raise RuntimeError(
                f"An incoming optimizer is an instance of {type(optimizer).__name__}. The optimizer(s) passed to "
                "amp.initialize() must be bare instances of either ordinary Pytorch optimizers, or Apex fused "
                "optimizers: masters are made by amp."
            )
        if not hasattr(optimizer, "param_groups") or not hasattr(optimizer, "step"):
            raise TypeError(
                f"optimizers must be either a single optimizer or a list of optimizers; this is {kind_of(optimizer)}"
            )


def _listed(given: Any, what: str) -> list[Any]:
    if isinstance(given, list):
        return given
    if isinstance(given, (tuple, dict, set)):
        raise TypeError(
            f"{what}s must be either a single {what} or a list of {what}s. Got {kind_of(given)}; a list is changed in "
            "place and returned."
        )
    return [given]


def _initialize(
    models: Any, optimizers: Any, properties: Any, num_losses: int = 1, cast_model_outputs: torch.dtype | None = None,
    wrapped: bool = False, scale_bounds: tuple[float | None, float] = (None, 2.0**24),
) -> Any:  # fmt: skip
    """Cast models, process optimizers, make loss scales, patch torch; returns what it was given, in its form."""
    model_list = _listed(models, "model")
    optimizer_list = [] if optimizers is None else _listed(optimizers, "optimizer")
    check_models(model_list, wrapped)
    check_optimizers(optimizer_list)
    if properties.cast_model_type or cast_model_outputs:
        check_compiled(model_list, properties.cast_model_type)
    if not _amp_state.allow_incoming_model_not_fp32:
        check_params_fp32(model_list)
    least, most = scale_bounds
    scalers = [LossScaler(properties.loss_scale, min_loss_scale=least, max_loss_scale=most) for _ in range(num_losses)]
    processed: list[Any] = []
    try:
        for optimizer in optimizer_list:  # raises before any model is touched
            processed.append(_process_optimizer(optimizer, properties))
        _cast(model_list, optimizer_list, properties, cast_model_outputs)
        if properties.patch_torch_functions:
            low, is_verbose = properties.patch_torch_functions_type or torch.float16, _amp_state.verbosity == 2
            on_cpu = all(p.device.type == "cpu" for model in model_list for p in model.parameters())
            amp.init(loss_scale=properties.loss_scale, verbose=is_verbose, patch_type=low, takes_cpu=on_cpu)
    except BaseException:
        for optimizer in processed:
            optimizer._amp_stash.detach()
        raise
    _CHANGED.update(model_list)
    if _amp_state.loaded_unused:
        warn(
            "amp.load_state_dict() gave loss scales, and this further amp.initialize() makes new ones, so that they "
            "are lost: call it after the last amp.initialize()"
        )
    _amp_state.opt_properties, _amp_state.loss_scalers, _amp_state.loaded_unused = properties, scalers, False
    if optimizers is None:
        return models
    return models, optimizers


def _cast(models: list[Any], optimizers: list[Any], properties: Any, outputs: torch.dtype | None) -> None:
    dtype = properties.cast_model_type
    if not dtype:
        if outputs is not None:
            for model in models:
                patch_forward(model, None, outputs)
        return
    for model in models:
        if properties.keep_batchnorm_fp32:
            convert_network(model, dtype)
        else:
            for module in model.modules():
                convert_module(module, dtype)
        patch_forward(model, dtype, torch.float32 if outputs is None else outputs)
        keep_state_dict_full(model)
    if not properties.master_weights:
        for optimizer in optimizers:  # state that exists follows its parameters; masters bring theirs along later
            if optimizer.state:
                optimizer.load_state_dict(optimizer.state_dict())


def close() -> None:
    """Undo what amp did: torch's functions, models' forwards and optimizers' methods are as before, its state is new.

    Parameters keep the dtype they have, and optimizers the parameters they step: at O2 the masters, which
    `amp.master_params` gives. May be called any number of times; amp can be initialized again afterwards.
    """
    handle = getattr(_amp_state, "handle", None)
    if handle is not None:
        handle._deactivate()
    for stash in [*ATTACHED]:
        stash.detach()
    for model in [*_CHANGED]:
        unpatch_forward(model)
    _CHANGED.clear()
    amp._DECORATOR_HANDLE = None
    amp._USER_CAST_REGISTRY.clear()
    amp._USER_PROMOTE_REGISTRY.clear()
    _amp_state.reset()
