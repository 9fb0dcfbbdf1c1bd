"""What is wrong with a model's precision, where, and what to write instead.

report = preamp.doctor.examine(model, optimizer, "O2", example=(x,))      # before the first step
with preamp.doctor.watch(session, every=50) as w:                         # while it trains
    ...
w.report()
origin = preamp.doctor.find_origin(forward, models=model)                 # who made the first inf or nan
"""

from ._examine import examine
from ._lint import fix
from ._origin import Origin, find_origin
from ._records import JsonLines, Sink
from ._sinks import TensorBoard
from ._watching import Watching, watch

__all__ = ["JsonLines", "Origin", "Sink", "TensorBoard", "Watching", "examine", "find_origin", "fix", "watch"]
