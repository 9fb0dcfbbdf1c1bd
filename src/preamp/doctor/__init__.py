"""What is wrong with a model's precision, where, and what to write instead.

report = preamp.doctor.examine(model, optimizer, "O2", example=(x,))      # before the first step
with preamp.doctor.watch(session, every=50) as w:                         # while it trains
    ...
w.report()
"""

from importlib import import_module as _import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .command.watching import Watching, watch
    from .lint import examine
    from .records import JsonLines, Sink

__all__ = [
    "JsonLines",
    "Sink",
    "Watching",
    "examine",
    "watch",
]

_HOMES = {
    "command.watching": ("Watching", "watch"),
    "lint": ("examine",),
    "records": ("JsonLines", "Sink"),
}


def __getattr__(name: str) -> Any:
    for home, names in _HOMES.items():  # when asked for: `preamp doctor` needs this package, and no torch
        if name in names:
            return getattr(_import_module(f".{home}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
