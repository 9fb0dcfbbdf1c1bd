"""PA204: updates that rounding takes away."""

from __future__ import annotations

from collections.abc import Iterator

from ...formats import name_of
from ...report import Finding
from .check import Check, on
from .events import ChangedBetweenSteps, WeightsStepped

UNCHANGED = 0.5
"""Share of the numbers that a step, or a line, leaves as they were, from which it is reported."""


class PA204(Check):
    """16-bit weights, and averages of them, that do not move."""

    code = "PA204"

    @on(WeightsStepped)
    def stepped(self, event: WeightsStepped) -> Iterator[Finding]:
        """The module with the largest share that a step left as it was."""
        total = sum(total for _, total, _ in event.weights)
        same = sum(same for *_, same in event.weights)
        if not total or same / total < UNCHANGED:
            return
        worst, count, unchanged = max(event.weights, key=lambda one: one[2] / one[1])
        dtype, (_, name) = name_of(worst.dtype), event.names.parameter(worst)
        evidence = {"weights unchanged": round(same / total, 3), "worst": name, "dtype": dtype}
        yield self.finding(
            "warning",
            f"{same / total:.0%} of the {total} weights with a gradient are after the step what they were before: the "
            f"update is less than half of what {dtype} can tell apart there",
            "session = preamp.prepare(model.float(), optimizer, level='O5')  # float32 masters\n"
            "# or preamp.optim with stochastic rounding",
            module=event.names.common(p for p, total, same in event.weights if same / total >= UNCHANGED),
            op=event.optimizer,
            at=event.at,
            evidence={**evidence, "unchanged there": round(unchanged / count, 3)},
        )

    @on(ChangedBetweenSteps)
    def stalled_average(self, event: ChangedBetweenSteps) -> Iterator[Finding]:
        """A running average, or another copy of the weights. A line that multiplies by 1 would be one too."""
        if event.at[0] is None or not event.total or event.unchanged / event.total < UNCHANGED:
            return
        share = event.unchanged / event.total
        yield self.finding(
            "warning",
            f"{share:.0%} of {event.total} {event.dtype} numbers are the same after {event.op}_: the change is less "
            f"than half of what {event.dtype} can tell apart there, so a running average stands still",
            "shadow = copy.deepcopy(model).float()  # averages and copies of weights in float32",
            op=event.op,
            at=event.at,
            evidence={"unchanged": round(share, 3), "dtype": event.dtype},
        )
