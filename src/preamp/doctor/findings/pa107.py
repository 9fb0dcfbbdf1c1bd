"""PA107: float16 gradients without a loss scale."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from ...report import Finding
from ..records import NOWHERE, Rank
from .check import BY_SESSION, Check, on
from .events import LossNotScaled, StepBegins
from .pa203 import longest_without_update

_UPDATE = "scaler.step(optimizer)\nscaler.update()  # once a step"
_STEP_BY_SESSION = BY_SESSION.partition("\n")[2]
_BY_SCALER = "scaler.scale(loss).backward()\nscaler.step(optimizer)\nscaler.update()"


class PA107(Check):
    """A scale that is missing, or that a step, an update or a backward pass goes past."""

    errors = (
        (
            "step() has already been called since the last update",
            "scaler.update() is missing after scaler.step()",
            f"{_UPDATE}, after the last optimizer",
        ),
        (
            "No inf checks were recorded prior to update",
            "scaler.update() runs without a scaler.step() before it",
            _UPDATE,
        ),
        (
            "No inf checks were recorded for this optimizer",
            "scaler.step() of an optimizer without gradients",
            "scaler.scale(loss).backward()  # before scaler.step(optimizer), with this optimizer's parameters in the "
            "loss",
        ),
        (
            "was called by itself: gradients of session.backward()",
            "optimizer.step() takes gradients that are still multiplied by the loss scale",
            _STEP_BY_SESSION,
        ),
        (
            "was called by itself, and the session keeps float32 masters",
            "loss.backward() and optimizer.step() pass by the session, which scales losses and steps float32 masters: "
            "what the optimizer would write into the 16-bit copies is lost",
            BY_SESSION,
        ),
    )

    @on(LossNotScaled)
    def not_scaled(self, event: LossNotScaled) -> Iterator[Finding]:
        """Float16 products, and no scale on the loss."""
        why = "nothing scales the loss"
        if event.is_scaled_elsewhere:
            why = "a loss scale is used elsewhere, and not here"
        elif event.scaler_at[0]:
            why = "a GradScaler was made and scale() is not called on this loss"
        fix = f"scaler = torch.amp.GradScaler()\n{_BY_SCALER}\n# or bfloat16, which needs no scale"
        if event.by_session and not event.is_scaled_elsewhere:
            why = "the session was prepared without a loss scale"
            fix = "session = preamp.prepare(model, optimizer, level='O2')  # and no scale=: it is dynamic then"
            if not event.has_half_session:
                why = "the session computes in bfloat16 and has none, and a float16 region is not its own"
                fix = "with session.autocast():  # in place of torch.autocast(..., dtype=torch.float16)"
        elif event.has_half_session:
            fix = f"{BY_SESSION}\n# session.backward multiplies by the loss scale"
        elif event.has_half_parameters:  # whose gradients torch's scaler refuses to unscale
            fix = f"session = preamp.prepare(model.float(), optimizer, level='O2')\n{BY_SESSION}"
        elif event.is_scaled_elsewhere:
            fix = "scaler.scale(loss).backward()  # each loss: scaler.step() divides all gradients by the scale"
        yield self.finding(
            "warning",
            f"float16 gradients without a loss scale: {why}, so gradients below 6e-8 are flushed to zero",
            fix,
            at=event.at,
            direction="backward",
            evidence={"compute dtype": "fp16", "scale": 1, "scaler made at line": event.scaler_at[1]},
        )

    @on(StepBegins)
    def step(self, event: StepBegins) -> Iterator[Finding]:
        """A step with gradients that are not as they should be."""
        where: dict[str, Any] = {"op": event.optimizer, "at": event.at}
        scale = event.scale
        if event.updated_at is not None:
            yield self.finding(
                "error",
                "scaler.update() runs between two scaler.step() of one backward: the second optimizer is unscaled by "
                "another scale than was on its loss, and growth counts double",
                "scaler.step(first)\nscaler.step(second)\nscaler.update()  # once, after the last",
                at=event.updated_at,
            )
        if event.mixed:
            yield self.finding(
                "error",
                f"{event.mixed} gradients are a sum of some that were unscaled before and some that are {scale:g} "
                "times too large: what scaler.unscale_() or scaler.step() had divided was not cleared before the next "
                "backward()",
                "optimizer.zero_grad()  # after every step, taken or skipped\n"
                "# when accumulating: unscale_, clipping, scaler.step and scaler.update once, after the last "
                "backward()",
                **where,
                evidence={"gradients": event.mixed, "scale": scale},
            )
        if event.is_again:
            yield self.finding(
                "error",
                "optimizer.step() takes the gradients a second time that scaler.step() has used, also where it has "
                "skipped them as not finite",
                "# remove this optimizer.step(): scaler.step(optimizer) has called it",
                **where,
            )
        if event.is_scaled:
            yield self.finding(
                "error",
                f"optimizer.step() takes gradients that are still {scale:g} times too large: the scaler is left out of "
                "the step",
                "scaler.step(optimizer)  # in place of optimizer.step()\nscaler.update()",
                **where,
                evidence={"scale": scale},
            )
        if event.is_unguarded and not event.is_again:
            yield self.finding(
                "error",
                "optimizer.step() takes unscaled gradients that are not finite: scaler.step(optimizer) would have "
                "skipped this step",
                "scaler.step(optimizer)  # in place of optimizer.step(), also after scaler.unscale_(optimizer)\n"
                "scaler.update()",
                **where,
            )
        if event.factor is not None:
            yield self.finding(
                "warning",
                f"the loss was multiplied by {event.factor:g} before backward(), and optimizer.step() takes the "
                "gradients as they are: if that is a loss scale, nobody takes it off; if not, nothing protects float16 "
                "gradients below 6e-8",
                f"scaler = torch.amp.GradScaler()  # instead of the constant\n{_BY_SCALER}",
                **where,
                evidence={"factor": event.factor},
            )

    def at_end(self, rank: Rank) -> Iterator[Finding]:
        """A scaler that is never updated, or not where steps are skipped."""
        end, steps = rank.facts.get("end", {}), rank.steps
        at = rank.scaler_at
        if at == NOWHERE or not any(step["scale"] for step in steps) or len(steps) < 2:
            return
        skipped = longest_without_update(rank)
        if sum(step["updates"] for step in steps) + end.get("updates", 0) == 0:
            yield self.finding(
                "error",
                "scaler.update() is never called: the scale neither falls after an overflow nor grows",
                _UPDATE,
                at=at,
                evidence={"steps": len(steps), "updates": 0},
            )
        elif skipped:
            scale = steps[skipped[0]]["scale"]
            yield self.finding(
                "error",
                f"{len(skipped)} steps in a row were skipped and scaler.update() was not called after any of them: the "
                f"scale stays at {scale or 0:g}, at which gradients overflow",
                "scaler.step(optimizer)  # also where gradients are not finite: it skips by itself\n"
                "scaler.update()  # in every branch, whether the step was taken or not",
                at=at,
                step=steps[skipped[0]]["step"],
                evidence={"skipped": len(skipped), "scale": scale, "steps": len(steps)},
            )


def like_a_scale(factor: float | None) -> bool:
    """Whether a constant in front of a loss is taken for a loss scale: a power of two, 64 or more."""
    return factor is not None and factor >= 64 and math.frexp(factor)[0] == 0.5
