"""apex.amp: mixed precision of both of its generations, on today's torch."""

from . import __version__, amp, frontend
from ._amp_state import _amp_state, master_params
from ._initialize import close
from .amp import (
    float_function,
    half_function,
    init,
    promote_function,
    register_float_function,
    register_half_function,
    register_promote_function,
)
from .frontend import initialize, load_state_dict, state_dict
from .handle import disable_casts, scale_loss

__all__ = [
    "__version__", "_amp_state", "close", "disable_casts", "float_function", "half_function", "init", "initialize",
    "load_state_dict", "master_params", "promote_function", "register_float_function", "register_half_function",
    "register_promote_function", "scale_loss", "state_dict",
]  # fmt: skip

for _name in vars(frontend).keys() - vars(amp).keys():  # Apex's `amp.amp` has the names of `frontend`, too
    setattr(amp, _name, getattr(frontend, _name))
