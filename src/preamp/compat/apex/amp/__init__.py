"""apex.amp: mixed precision of both of its generations, on today's torch."""

from . import __version__
from . import compat as compat
from . import scaler as scaler
from ._amp_state import _amp_state, master_params
from ._initialize import close
from .amp import (
    bfloat16_function,
    float_function,
    half_function,
    init,
    promote_function,
    register_bfloat16_function,
    register_float_function,
    register_half_function,
    register_promote_function,
)
from .frontend import initialize, load_state_dict, state_dict
from .handle import disable_casts, scale_loss

__all__ = [
    "__version__",
    "_amp_state",
    "bfloat16_function",
    "close",
    "disable_casts",
    "float_function",
    "half_function",
    "init",
    "initialize",
    "load_state_dict",
    "master_params",
    "promote_function",
    "register_bfloat16_function",
    "register_float_function",
    "register_half_function",
    "register_promote_function",
    "scale_loss",
    "state_dict",
]
