"""What is wrong with a model's precision, where, and what to write instead.

report = preamp.doctor.examine(model, optimizer, "O2", example=(x,))      # before the first step
with preamp.doctor.watch(session, every=50) as w:                         # while it trains
    ...
w.report()
preamp.doctor.compare_logprobs(sampler, trainer)                          # two engines, the same tokens
"""

from importlib import import_module as _import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .command.watching import Watching, watch
    from .lint import examine
    from .logprobs import LogprobComparison, compare_logprobs
    from .records import JsonLines, Sink

__all__ = ["JsonLines", "LogprobComparison", "Sink", "Watching", "compare_logprobs", "examine", "watch"]

_HOMES = {
    "command.watching": ("Watching", "watch"),
    "lint": ("examine",),
    "logprobs": ("LogprobComparison", "compare_logprobs"),
    "records": ("JsonLines", "Sink"),
}


def __getattr__(name: str) -> Any:
    for home, names in _HOMES.items():  # when asked for: `preamp doctor` needs this package, and no torch
        if name in names:
            return getattr(_import_module(f".{home}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
