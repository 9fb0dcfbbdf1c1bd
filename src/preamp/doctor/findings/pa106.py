"""PA106: gradients clipped or read while still scaled."""

from __future__ import annotations

from collections.abc import Iterator

from ...report import Finding
from ..records import NOWHERE, Line
from .check import Check, on
from .events import GradientsClipped, Observed

_FIXES = {
    None: "scaler.unscale_(optimizer)  # once, before this line",
    "session": "session.clip_grad_norm_(max_norm)",
    "apex": "with amp.scale_loss(...) as scaled_loss: scaled_loss.backward()\n# and clip after this block, "
    "amp.master_params(optimizer)",
    "hook": "scaler.unscale_(optimizer)\ntorch.nn.utils.clip_grad_value_(model.parameters(), ...)  # not in a hook",
}


class PA106(Check):
    """Scaled gradients are clipped to another length than was meant, and mislead code that reads them."""

    errors = (
        (
            "unscale_() has already been called",
            "gradients are unscaled twice in one step",
            "# call scaler.unscale_(optimizer) once a step",
        ),
    )

    @on(GradientsClipped)
    def clipped(self, event: GradientsClipped) -> Iterator[Finding]:
        """Clipping by a function of torch's."""
        yield self._clipped(event.op, event.scale, event.at, _FIXES[event.within])

    @on(Observed)
    def observed(self, event: Observed) -> Iterator[Finding]:
        """Reading or clipping by operators of the script's, or by a hook in the backward pass."""
        handled = event.handled
        for place, op in handled.clipped[:1]:
            yield self._clipped(f"{op} of gradients", event.scale, place.at, _FIXES[None])
        for place in () if handled.clipped else handled.reads[:1]:
            yield self.finding(
                "info",
                f"gradients are read while they are still {event.scale:g} times too large",
                _FIXES[None],
                at=place.at,
                evidence={"scale": event.scale},
            )
        for place, op in handled.bounded[:1]:
            yield self._clipped(f"a hook with {op}", handled.backward_scale, place.own or NOWHERE, _FIXES["hook"])
        for place, op, scale in handled.used[:1]:
            yield self.finding(
                "error",
                f"{op} takes gradients of torch.autograd.grad that are still {scale:g} times too large: what is "
                "computed of them is no part of the loss that was meant, and changes with the scale",
                "inverse = 1 / scaler.get_scale()\ngrads = [grad * inverse for grad in grads]  # before this line",
                op=op,
                at=place.at,
                evidence={"scale": scale},
            )

    def _clipped(self, op: str, scale: float, at: Line, fix: str) -> Finding:
        message = (
            f"{op} sees gradients that are still {scale:g} times too large: nearly every step is clipped, and to a "
            "length that changes with the scale"
        )
        return self.finding("error", message, fix, op=op, at=at, evidence={"scale": scale})
