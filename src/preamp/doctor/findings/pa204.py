"""PA204: updates that rounding takes away.

What it is. bfloat16 keeps 8 bits of a number: next to 1 lies 1.0078. A step that moves a weight by less than half of
that distance leaves it exactly as it was. The finding is measured: the share of the weights that have a gradient and
that a step did not change, from one half on.

Why it hurts. Adam moves a weight by about its learning rate. At 1e-5, a weight of 0.01 lies between neighbours 6e-5
apart and does not move, in this step or in any other. Only weights close to zero train; fine-tuning in pure bfloat16 is
where it shows.

The cure. Step float32 masters: leave the model in float32 under a region, as here, or take preamp's level O5. preamp's
optimizers can also round stochastically (`rounding="stochastic"`), which keeps the mean of the updates without a second
copy of the weights.

When it is harmless. bfloat16 weights at a learning rate that moves them: most updates are many bits wide early in
training, and then nothing is said. Weights without a gradient, and those whose gradient is zero, do not count.

See also: [PA111](PA111.md), the same in float16; [optimizers](../optimizers.md), masters and rounding.
"""

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
