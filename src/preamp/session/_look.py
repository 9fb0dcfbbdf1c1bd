"""What is known of an optimizer's gradients between a backward pass and the step."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor
from torch.nn import Parameter

from ..kernels import Reading
from ..ledger import Collected


@dataclass(slots=True)
class Look:
    """What was read of an optimizer's gradients before its step, and what is to be done to them."""

    reading: Reading
    parameters: list[Parameter]
    inverse: Tensor | None
    """0-d float32 that makes them true; None: they are."""
    clip: Tensor | None = None
    """0-d float32, by which they are to shrink besides."""
    clipped: tuple[list[int], list[int]] = ((), ())  # type: ignore[assignment]
    """Identities and versions of the gradients that `clip` was made for."""
    true: bool = False
    """Whether `inverse` and `clip` have been applied, so that anybody may read and change them."""
    kept: list[Parameter] = field(default_factory=list)
    """Low parameters whose gradients rest in float32 beside 16-bit ones, since several losses add up in them."""
    norm: Tensor | None = None
    """L2 norm of the true gradients before clipping, once asked for."""
    collected: Collected | None = None
    """What an optimizer of `preamp.optim` steps, where that was read in the gradients' place."""

    @property
    def factor(self) -> Tensor | None:
        """What the gradients are still to be multiplied by."""
        if self.true or self.inverse is None or self.clip is None:
            return None if self.true else (self.clip if self.inverse is None else self.inverse)
        return self.inverse * self.clip
