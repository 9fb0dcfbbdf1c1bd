"""What scripts use of apex.contrib; its layers are in `_layers`."""

from . import optimizers

__all__ = ["optimizers"]
