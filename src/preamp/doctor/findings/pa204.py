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

from ...report import Finding
from ..shadow.facts import Absorbed
from .check import Check, on

UNCHANGED = 0.5
"""Share of the numbers that would have moved in float32 and did not, from which it is reported."""

DECAY = 2e-4
"""Weight decay of one step from which it is a warning that it is lost: it takes 2 % of a weight in a hundred steps."""


class PA204(Check):
    """16-bit weights that an optimizer's step, or its weight decay, does not move."""

    @on(Absorbed)
    def absorbed(self, event: Absorbed) -> Iterator[Finding]:
        """One line of an optimizer's step, or the whole step of one of torch's."""
        if event.optimizer is None or not event.is_weight or event.stayed < UNCHANGED * event.moved:
            return
        share, total, dtype = event.stayed / event.moved, event.moved, event.dtype
        decay = event.op in ("mul", "div")
        what = "weight decay changes" if decay else "the update changes"
        kept = "rounds to 1" if decay else f"is less than half of what {dtype} can tell apart there"
        slight = decay and event.by is not None and abs(1 - event.by) < DECAY
        yield self.finding(
            "info" if slight else "warning",
            f"{share:.0%} of {total} {dtype} weights stay what they are where {what} them in float32: "
            f"{'a factor so near 1' if decay else 'the change'} {kept}",
            "session = preamp.prepare(model.float(), optimizer, level='O5')  # float32 masters\n"
            "# or preamp.optim with stochastic rounding",
            module=event.module,
            op=type(event.optimizer).__name__,
            at=event.at,
            evidence={"weights unchanged": round(share, 3), "operator": event.op, "dtype": dtype},
        )
