"""What is wrong with a model's precision, where, and what to write instead.

report = preamp.doctor.examine(model, optimizer, "O2", example=(x,))      # before the first step
origin = preamp.doctor.find_origin(forward, models=model)                 # who made the first inf or nan
"""

from ._examine import examine
from ._lint import fix
from ._origin import Origin, find_origin

__all__ = ["Origin", "examine", "find_origin", "fix"]
