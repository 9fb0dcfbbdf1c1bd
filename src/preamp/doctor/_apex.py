"""Follows Apex's `scale_loss`, whose own work with gradients is no doing of the script's."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ._patches import Patches

if TYPE_CHECKING:
    from ._scaling import Scaling
    from ._watch import Watch


class Apex:
    """Knows whether a `scale_loss` block is open, and tells which scale it put on a loss."""

    def __init__(self, scaling: Scaling, watch: Watch) -> None:
        self._scaling, self._watch = scaling, watch
        self.inside = False
        self._patched: Any = None

    def look(self, patches: Patches) -> None:
        """Follow `amp.scale_loss` if the script has imported it by now."""
        amp = sys.modules.get("apex.amp") or getattr(sys.modules.get("apex"), "amp", None)
        if amp is not None and self._patched is not amp and hasattr(amp, "scale_loss"):
            self._patched = amp
            patches.wrap(amp, "scale_loss", self._scale_loss)

    @contextmanager
    def _scale_loss(self, original: Any, *args: Any, **kwargs: Any) -> Iterator[Any]:
        self.inside = True
        region = original(*args, **kwargs)
        try:
            with self._watch.paused():
                scaled = region.__enter__()
            try:
                self._note(scaled, args[0] if args else None)
                yield scaled
            except BaseException:
                with self._watch.paused():
                    if not region.__exit__(*sys.exc_info()):
                        raise
            else:
                with self._watch.paused():  # it flattens and unscales
                    region.__exit__(None, None, None)
                self._watch.gradients_are_true()
        finally:
            self.inside = False
            self._scaling.left_apex()

    def _note(self, scaled: Any, loss: Any) -> None:
        if isinstance(scaled, Tensor) and isinstance(loss, Tensor) and loss.numel() == 1:
            scale = float(scaled.detach().double() / loss.detach().double())
            if scale == scale and scale not in (0.0, 1.0, float("inf")):
                self._scaling.note(scaled, scale)
