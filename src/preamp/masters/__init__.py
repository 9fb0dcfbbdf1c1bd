"""What is kept beside parameters that a model computes with in 16 bits, so that small updates are not lost."""

from ._exchange import rebuild_reducers
from ._none import NoMasters
from ._shadows import Shadows, shadows_work
from ._split import SplitMasters
from ._whole import Masters

__all__ = ["Masters", "NoMasters", "Shadows", "SplitMasters", "rebuild_reducers", "shadows_work"]
