"""preamp: automatic mixed precision for PyTorch.

A training loop with it:

    session = preamp.prepare(model, optimizer, level="O4")
    for x, y in loader:
        with session.autocast():
            loss = loss_fn(model(x), y)
        session.backward(loss)
        session.clip_grad_norm_(1.0)
        session.step()
        session.zero_grad()
"""

from importlib import import_module as _import_module
from sys import modules as _modules
from types import ModuleType as _ModuleType
from typing import TYPE_CHECKING, Any

from ._version import __version__

if TYPE_CHECKING:
    from . import checkpoint, compat, doctor, errors, lr_finder, optim, parallel, plan, report, zoo
    from .autocast import autocast, float_function, half_function, promote_function
    from .compat.install import install_as_apex, uninstall_as_apex
    from .eps import safe_eps
    from .errors import PreampError, PreampWarning
    from .policy import Policy, policy
    from .rules import OpRules
    from .scaling import DynamicScale, GradScaler, HysteresisScale, NoScale, StaticScale
    from .session import Session, SessionScaler, StepReport, prepare

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
    "SessionScaler",
    "StaticScale",
    "StepReport",
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

_MODULE_OF = {
    "autocast": "autocast",
    "float_function": "autocast",
    "half_function": "autocast",
    "promote_function": "autocast",
    "install_as_apex": "compat.install",
    "uninstall_as_apex": "compat.install",
    "safe_eps": "eps",
    "PreampError": "errors",
    "PreampWarning": "errors",
    "Policy": "policy",
    "policy": "policy",
    "OpRules": "rules",
    "DynamicScale": "scaling",
    "GradScaler": "scaling",
    "HysteresisScale": "scaling",
    "NoScale": "scaling",
    "StaticScale": "scaling",
    "Session": "session",
    "SessionScaler": "session",
    "StepReport": "session",
    "prepare": "session",
}
"""The modules of the public names that are not modules themselves; each is imported when first asked for."""


_OF_APEX = {
    "amp": "from preamp.compat.apex import amp",
    "initialize": "preamp.prepare(model, optimizer, level=...)",
    "scale_loss": "session.backward(loss)",
    "master_params": "session.clip_grad_norm_(...)",
}
"""What stands here in place of what Apex's amp has."""


def __getattr__(name: str) -> Any:
    if name in _OF_APEX:
        raise AttributeError(
            f"module {__name__!r} has no attribute {name!r}, which is Apex's: write {_OF_APEX[name]}, or keep Apex's "
            "calls and begin with preamp.install_as_apex()"
        )
    if name[:1].isupper() and name not in _MODULE_OF:
        instead = _import_module(".optim", __name__).instead_of(name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}{instead}")
    if name.startswith("_"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name in _MODULE_OF:
        value = getattr(_import_module(f".{_MODULE_OF[name]}", __name__), name)
    else:
        try:
            value = _import_module(f".{name}", __name__)
        except ModuleNotFoundError as error:
            if error.name != f"{__name__}.{name}":
                raise
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from None
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


class _Package(_ModuleType):
    """A package whose modules `autocast` and `policy` do not take the place of what users call by these names."""

    def __setattr__(self, name: str, value: Any) -> None:
        # the import system sets a module as an attribute of its package
        if not (name in _MODULE_OF and isinstance(value, _ModuleType)):
            super().__setattr__(name, value)


_modules[__name__].__class__ = _Package
