"""Optimizers of torch's names and arguments that keep float32 masters of 16-bit parameters and step in one pass."""

from torch import optim as _torchs

from ._adam import Adam, AdamW
from ._base import FusedOptimizer
from ._first_order import SGD, Adagrad, Lion, Muon
from ._layerwise import LAMB, NovoGrad
from ._loading import float32_states

__all__ = ["LAMB", "SGD", "Adagrad", "Adam", "AdamW", "FusedOptimizer", "Lion", "Muon", "NovoGrad", "float32_states"]


def instead_of(name: str) -> str:
    """What to write for an optimizer that Apex, bitsandbytes or torch has under this name; "" if none is known."""
    plain = name.removeprefix("Fused").removeprefix("Paged")
    if plain in ("Adam8bit", "AdamW8bit"):
        return f': write preamp.optim.{plain[:-4]}(..., states="8bit")'
    home = "preamp.optim" if plain in __all__ else "torch.optim" if hasattr(_torchs, plain) else None
    return f": write {home}.{plain}" + ", which preamp.prepare takes too" * (home == "torch.optim") if home else ""


def __getattr__(name: str) -> None:
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}{instead_of(name)}")
