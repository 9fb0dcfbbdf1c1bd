"""PA211: moments that cannot move.

What it is. Adam divides by the root of a second moment, which every step moves by 1 - beta2 of its distance to the
squared gradient: by a thousandth with torch's beta2 of 0.999. bfloat16 tells numbers 0.4 % to 0.8 % apart, so in a
model that was cast to it a moment is only moved by a gradient some times its usual size, and nothing at all can make it
smaller. The finding is an optimizer with 16-bit second moments of which a step leaves half or more as they were, among
those that it moves in float32. Float32 moments, or a beta2 of 0.95, leave a few percent.

Why it hurts. The moments remember the large gradients of the first steps, and the updates are too short for as long as
the run lasts: in small measured runs the moments were 1.4 to 11 times too large, and the final loss 2 % to 3 % worse
beside float32 moments where the learning rate decays. It is most often met together with weights that do not move
([PA204](PA204.md)), and later.

What it shows. In each step that the doctor looks at (`--every`), every operator of the optimizer that changes a moment
is done again in float32, and the doctor counts the moments that move there and do not move here. Optimizers of
`preamp.optim` are not judged: their moments are float32, or rounded stochastically, which leaves most of them where
they were in any one step and moves them rightly on average.

The cure. Float32 moments, and masters with them: level O5. (Or the model in float32 under `torch.autocast`; or an
optimizer of `preamp.optim`, which steps bfloat16 weights with float32 moments.)

When it is harmless. Where gradients keep their size over the whole run, the moments that do not move are right as they
are: with a constant learning rate losses were the same to half a percent. In the first hundred or two hundred steps
they do move, as each step still is a large part of them; nothing is reported there. In float16 they move more often (11
bits), but vanish below 6e-8 ([PA101](PA101.md)).

See also: [PA204](PA204.md), weights that rounding leaves where they were; [optimizers](../optimizers.md);
[levels](../levels.md).
"""

from __future__ import annotations

from collections.abc import Iterator

from ...report import Finding
from ..shadow.facts import Absorbed
from .check import Check, on

FROZEN = 0.5
"""Share of the second moments that a step leaves as they were, from which it is reported. In float32, or with a beta2
of 0.95, it is a few percent at the most; from half on what Adam divides by is mostly a memory of the first steps."""


class PA211(Check):
    """Second moments kept in 16 bits, of which a step leaves most as they were."""

    @on(Absorbed)
    def absorbed(self, event: Absorbed) -> Iterator[Finding]:
        """All that one step did to the second moments of an optimizer."""
        if not event.is_moment or event.stayed < FROZEN * event.moved:
            return
        share = event.stayed / event.moved
        yield self.finding(
            "warning",
            f"a step left {share:.0%} of {event.moved} second moments as they were, and in float32 they move: "
            f"{event.dtype} cannot hold changes as small as 1 - beta2 of them, so they hardly fall any more",
            "session = preamp.prepare(model.float(), optimizer, level='O5')  # masters and moments in float32\n"
            "# or preamp.optim.AdamW in place of torch.optim.AdamW",
            module=event.module,
            op=type(event.optimizer).__name__,
            at=event.at,
            step=event.step,
            evidence={"moments unchanged": round(share, 3), "dtype": event.dtype},
        )
