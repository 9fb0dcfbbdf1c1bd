"""What scripts use of apex.contrib."""

from functools import partial as _partial

from ..._names import absent_attribute as _absent_attribute
from . import clip_grad, layer_norm, optimizers, xentropy

__all__ = ["clip_grad", "layer_norm", "optimizers", "xentropy"]
__getattr__ = _partial(_absent_attribute, "contrib.")
