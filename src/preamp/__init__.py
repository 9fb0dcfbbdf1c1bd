"""preamp: automatic mixed precision for PyTorch.

A training loop with it:

    session = preamp.prepare(model, optimizer, level="O2")
    for x, y in loader:
        with session.autocast():
            loss = loss_fn(model(x), y)
        session.backward(loss)
        session.clip_grad_norm_(1.0)
        session.step()
        session.zero_grad()
"""

from importlib import import_module as _import_module
from typing import TYPE_CHECKING, Any

from ._version import __version__, only_version_is_asked

if TYPE_CHECKING or not only_version_is_asked():
    from . import errors, optim
    from .autocast import autocast, float_function, half_function, promote_function
    from .eps import safe_eps
    from .errors import PreampError, PreampWarning
    from .policy import Policy, policy
    from .rules import OpRules
    from .scaling import DynamicScale, GradScaler, HysteresisScale, NoScale, StaticScale, WindowScale
    from .session import Session, StepReport, prepare

if TYPE_CHECKING:
    from . import checkpoint, compat, doctor, lr_finder, parallel, plan, report, zoo
    from .compat.install import install_as_apex, uninstall_as_apex

__all__ = [
    "DynamicScale",
    "GradScaler",
    "HysteresisScale",
    "NoScale",
    "OpRules",
    "Policy",
    "PreampError",
    "PreampWarning",
    "Session",
    "StaticScale",
    "StepReport",
    "WindowScale",
    "__version__",
    "autocast",
    "checkpoint",
    "compat",
    "doctor",
    "errors",
    "float_function",
    "half_function",
    "install_as_apex",
    "lr_finder",
    "optim",
    "parallel",
    "plan",
    "policy",
    "prepare",
    "promote_function",
    "report",
    "safe_eps",
    "uninstall_as_apex",
    "zoo",
]

_ON_DEMAND = ("checkpoint", "compat", "doctor", "lr_finder", "parallel", "plan", "report", "zoo")
_DOORS = ("install_as_apex", "uninstall_as_apex")


def __getattr__(name: str) -> Any:
    if name in _ON_DEMAND:  # instruments: nobody waits for them who only trains
        return _import_module(f".{name}", __name__)
    if name in _DOORS:
        return getattr(_import_module(".compat.install", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
