"""`amp.initialize`, the options behind an opt_level, and the state that a checkpoint needs."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch

from .._notice import deprecated_warning
from ._amp_state import _amp_state, maybe_print, warn_or_err
from ._initialize import _initialize

_OPTIONS: dict[str, Any] = {
    "enabled": False,
    "opt_level": None,
    "cast_model_type": None,
    "patch_torch_functions": False,
    "keep_batchnorm_fp32": None,
    "master_weights": None,
    "loss_scale": 1.0,
}


class Properties:
    """The options in force, as attributes; `options` is the dict of them."""

    patch_torch_functions_type: torch.dtype | None = None

    def __init__(self) -> None:
        vars(self).update(_OPTIONS)

    @property
    def options(self) -> dict[str, Any]:
        """All options but `patch_torch_functions_type`, in the order in which they are printed."""
        return {name: getattr(self, name) for name in _OPTIONS}


_OF_CASTED_MODELS = ("cast_model_type", "keep_batchnorm_fp32", "master_weights")
"""Options that have no place where torch's functions are patched: there the model stays in float32."""


def _checked(properties: Any, name: str, value: Any) -> Any:
    """The value to set an option to."""
    if isinstance(value, str) and value in ("True", "False"):  # what argparse makes of it
        value = value == "True"
    patches = properties.opt_level in ("O1", "O4")
    full = name == "cast_model_type" and (value is False or value is torch.float32)
    if patches and value is not None and not full and name in _OF_CASTED_MODELS:
        warn_or_err(
            f"{properties.opt_level} inserts casts around torch's functions rather than model weights, which remain "
            f"FP32, batchnorm's too: {name}={value!r} has no place there. Leave it out, or write opt_level='O2'."
        )
    if name == "patch_torch_functions" and value and not patches:
        warn_or_err("Currently, patch_torch_functions=True should only be set by selecting opt_level='O1' (or 'O4').")
    if name == "cast_model_type" and isinstance(value, str):
        raise ValueError(f"cast_model_type must be a torch.dtype, False or None, not {value!r}; write torch.float16")
    if name == "keep_batchnorm_fp32":
        assert value in (True, False, None), (
            "keep_batchnorm_fp32 must be a boolean, the string 'True' or 'False', or None, "
            f"found keep_batchnorm_fp32={value}"
        )
    return float(value) if name == "loss_scale" and value != "dynamic" else value


class OptLevel:
    """A row of the table of levels; calling it fills in the options."""

    def __init__(self, name: str, brief: str, low: torch.dtype | None = None, **options: Any) -> None:
        self.name, self.brief, self.low, self.options = name, brief, low, options

    def __call__(self, properties: Properties) -> Properties:
        """The options of this level, unchecked."""
        vars(properties).update({**_OPTIONS, "enabled": True, "opt_level": self.name, **self.options})
        properties.patch_torch_functions_type = self.low
        return properties


_HALF, _BFLOAT16, _FLOAT = torch.float16, torch.bfloat16, torch.float32

opt_levels = {
    level.name: level
    for level in (
        OptLevel(
            "O0", "O0:  Pure FP32 training.",
            cast_model_type=_FLOAT, keep_batchnorm_fp32=None, master_weights=False, loss_scale=1.0,
        ),
        OptLevel(
            "O1", "O1:  Insert automatic casts around Pytorch functions and Tensor methods.", low=_HALF,
            patch_torch_functions=True, loss_scale="dynamic",
        ),
        OptLevel(
            "O2", "O2:  FP16 training with FP32 batchnorm and FP32 master weights.",
            cast_model_type=_HALF, keep_batchnorm_fp32=True, master_weights=True, loss_scale="dynamic",
        ),
        OptLevel(
            "O3", "O3:  Pure FP16 training.",
            cast_model_type=_HALF, keep_batchnorm_fp32=False, master_weights=False, loss_scale=1.0,
        ),
        OptLevel(
            "O4", "O4:  Insert automatic casts around Pytorch functions and Tensor methods (BFLOAT16).",
            low=_BFLOAT16, patch_torch_functions=True, loss_scale=1,
        ),
        OptLevel(
            "O5", "O5:  BFLOAT16 training with FP32 batchnorm and FP32 master weights.",
            cast_model_type=_BFLOAT16, patch_torch_functions=None, keep_batchnorm_fp32=True, master_weights=True,
            loss_scale=1,
        ),
    )
}  # fmt: skip

O0, O1, O2, O3, O4, O5 = opt_levels.values()


def initialize(
    models: Any,
    optimizers: Any = None,
    enabled: bool = True,
    opt_level: str = "O1",
    cast_model_type: Any = None,
    patch_torch_functions: bool | None = None,
    keep_batchnorm_fp32: bool | str | None = None,
    master_weights: bool | None = None,
    loss_scale: float | str | None = None,
    cast_model_outputs: torch.dtype | None = None,
    num_losses: int = 1,
    verbosity: int = 1,
    min_loss_scale: float | None = None,
    max_loss_scale: float = 2.0**24,
    *,
    patch_torch_functions_type: torch.dtype | None = None,
    distributed: bool | None = None,
) -> Any:
    """Prepare models and optimizers for mixed precision at an opt_level, in place, and return them in the form given.

    `models`: a module or a list; `optimizers`: an optimizer, a list, or None. `opt_level`: "O0" to "O5"; the other
    options override single entries of it where they are not None. `cast_model_type`: a dtype, or False for no cast.
    `loss_scale`: "dynamic", a number or its text. `num_losses`: how many `loss_id`s `scale_loss` will be given.
    `verbosity`: 0 to 2. `patch_torch_functions_type`: the 16-bit dtype of O1 and O4. `distributed`: True says that the
    models are in a parallel wrapper already, which O1 and O4 can take: they leave parameters as they are.

    RuntimeError: an unknown opt_level, options that exclude each other, models that are 16-bit or in a parallel
    wrapper, optimizers seen before. TypeError: tuples. ValueError: a loss_scale that is no number.
    """
    deprecated_warning(
        "apex.amp was deprecated, and removed from Apex in 2025. It goes on working in preamp.compat.apex; "
        "`preamp migrate` shows the lines of preamp's own API that take its place."
    )
    properties: Any = Properties()
    _amp_state.verbosity = verbosity
    if not enabled:
        _amp_state.opt_properties = properties
        return models if optimizers is None else (models, optimizers)
    if not torch.backends.cudnn.enabled:
        raise RuntimeError("Amp requires torch.backends.cudnn.enabled = True; set it back before amp.initialize.")
    if opt_level not in opt_levels:
        raise RuntimeError(
            f"Unexpected optimization level {opt_level}. Options are 'O0', 'O1', 'O2', 'O3', 'O4', 'O5'.  Note that in "
            "`O0`, `O1`, etc., the prefix O is the letter O, not the number zero."
        )
    level = opt_levels[opt_level]
    level(properties)
    maybe_print(f"Selected optimization level {level.brief}", True)
    maybe_print("Defaults for this optimization level are:", True)
    _print_options(properties)
    maybe_print("Processing user overrides (additional kwargs that are not None)...", True)
    overrides = {
        "cast_model_type": cast_model_type,
        "patch_torch_functions": patch_torch_functions,
        "keep_batchnorm_fp32": keep_batchnorm_fp32,
        "master_weights": master_weights,
        "loss_scale": loss_scale,
    }
    for name, value in overrides.items():
        if value is not None:
            setattr(properties, name, _checked(properties, name, value))
    if patch_torch_functions_type is not None:
        properties.patch_torch_functions_type = patch_torch_functions_type
    maybe_print("After processing overrides, optimization options are:", True)
    _print_options(properties)
    wrapped = bool(distributed) and not properties.cast_model_type and cast_model_outputs is None
    bounds = (min_loss_scale, max_loss_scale)
    return _initialize(models, optimizers, properties, num_losses, cast_model_outputs, wrapped, bounds)


def _print_options(properties: Properties) -> None:
    for name, value in properties.options.items():
        maybe_print(f"{name:22} : {value}", True)


def state_dict(destination: dict[str, Any] | None = None) -> dict[str, Any]:
    """The loss scales: {"loss_scaler0": {"loss_scale": float, "unskipped": int}, ...}, in `destination` if given.

    AttributeError before `initialize` has made scalers.
    """
    saved = OrderedDict() if destination is None else destination
    for i, scaler in enumerate(_amp_state.loss_scalers):
        saved[f"loss_scaler{i}"] = {"loss_scale": scaler.loss_scale(), "unskipped": scaler._unskipped}
    return saved


def load_state_dict(state_dict: dict[str, Any]) -> None:
    """Take loss scales, in the order in which they were saved. RuntimeError for keys that are none.

    AttributeError before `initialize` has made scalers.
    """
    saved = {key: value for key, value in state_dict.items() if "loss_scaler" in key}
    unexpected = [key for key in state_dict if key not in saved]
    scalers = _amp_state.loss_scalers
    if len(saved) != len(scalers):
        print(f"Warning: state_dict contains {len(saved)} entries, while {len(scalers)} loss_scalers are used")
    for i, value in enumerate(saved.values()):
        if i >= len(scalers):
            print(f"Skipping loss_scaler[{i}], since num_losses was set to {len(scalers)}")
            break
        scalers[i]._loss_scale = float(value["loss_scale"])
        scalers[i]._unskipped = int(value["unskipped"])
        _amp_state.loaded_unused = True
    if unexpected:
        names = ", ".join(f'"{key}"' for key in unexpected)
        raise RuntimeError(f"Error(s) in loading state_dict. Unexpected key(s) in state_dict: {names}.")
