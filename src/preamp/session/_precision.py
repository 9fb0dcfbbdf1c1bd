"""A model in float32 for a while."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor, nn
from torch.nn import Parameter

from ..ledger import Masters
from ..modules import Conversion


class FullPrecision:
    """Models that hold their masters, with float32 buffers and without casts; their gradients are put aside.

    `enter` and `leave` may be interrupted at any line. `leave` then finishes what was begun, and undoes it.
    """

    def __init__(self, models: Iterable[nn.Module], masters: Masters, conversions: Sequence[Conversion]) -> None:
        self._models, self._masters, self._conversions = list(models), masters, conversions
        self._aside: dict[Parameter, Tensor] | None = None
        self.depth = 0
        """How many are inside now."""

    def enter(self) -> None:
        """Put models in float32. `SessionError` where masters cannot take the parameters' place; then `leave`."""
        self._aside = {p: p.grad for model in self._models for p in model.parameters() if p.grad is not None}
        self._masters.full()
        for parameter in self._aside:
            parameter.grad = None
        for conversion in self._conversions:
            conversion.bypass()
            conversion.to_float()

    def leave(self) -> None:
        """Undo `enter`, as far as it came."""
        if self._aside is None:
            return
        for conversion in self._conversions:
            conversion.to_low()
        self._masters.low()
        for conversion in self._conversions:
            conversion.resume()
        for parameter, gradient in self._aside.items():
            parameter.grad = gradient
        self._aside = None
