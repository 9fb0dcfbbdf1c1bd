"""What is wrong with a model's precision, where, and what to write instead.

report = preamp.doctor.examine(model, optimizer, "O2", example=(x,))      # before the first step
with preamp.doctor.watch(session, every=50) as w:                         # while it trains
    ...
w.report()
origin = preamp.doctor.find_origin(forward, models=model)                 # who made the first inf or nan
"""

from .command.watching import Watching, watch
from .findings.pa201 import Origin
from .lint import examine, fix
from .records import JsonLines, Sink, TensorBoard
from .replay.origin import find_origin

__all__ = ["JsonLines", "Origin", "Sink", "TensorBoard", "Watching", "examine", "find_origin", "fix", "watch"]
