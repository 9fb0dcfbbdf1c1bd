"""PA212: sums kept in 16 bits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from ...report import Finding
from ..records import Line
from ..shadow.facts import Absorbed
from .check import Check, on

STAYS = 0.9
"""Share of the numbers that would have moved in float32 and did not, from which a sum has stopped."""
WRONG = 0.1
"""Relative error of an accumulated gradient from which it is reported."""
IN_VAIN = 16
"""Additions in a row without effect, up to the last, after which a sum has stopped, too."""
TENSOR = 16
"""Numbers from which one look is enough. A single number stays now and then, and has to stay in two looks."""


class PA212(Check):
    """Sums, averages and accumulated gradients that are so large that what is added to them is lost."""

    def __init__(self) -> None:
        self._looks: Counter[Line] = Counter()
        self._told: set[Line] = set()

    @on(Absorbed)
    def absorbed(self, event: Absorbed) -> Iterator[Finding]:
        """One line that adds up, outside of an optimizer."""
        if event.optimizer is not None or event.counts:
            return
        if event.is_gradient:
            yield from self._of_gradients(event)
            return
        if event.at[0] is None or (event.stayed < STAYS * event.moved and event.in_vain < IN_VAIN):
            return
        if event.at in self._told:  # another operator of the same line
            return
        self._looks[event.at] += event.times
        if event.moved < TENSOR and self._looks[event.at] < 2:
            return
        self._told.add(event.at)
        share = event.stayed / event.moved
        of_one = event.moved <= event.times  # a sum, of one number
        if event.buffer is not None:
            name = f"model.{event.module}.{event.buffer}" if event.module else f"model.{event.buffer}"
            what, fix = "numbers of a buffer", f"{name} = {name}.float()  # after the cast of the model"
        elif event.op in ("mul", "lerp") or event.parameters or (event.moved >= TENSOR and not of_one):
            what, fix = (
                "numbers of an average",
                "average = copy.deepcopy(model).float()  # averages of weights in float32",
            )
        else:
            what, fix = "a sum", "total = total + x.detach().float()  # or x.item(): sums in float32"
        stays = "numbers stay what they are at this line, and in float32 they move"
        if of_one:
            stays = "additions leave it as it is at this line, and in float32 it moves"
        yield self.finding(
            "warning",
            f"{what} in {event.dtype}: {share:.0%} of {event.moved} {stays}. What is added is less than half of what "
            "16 bits can tell apart there",
            fix,
            module=event.module,
            op=event.op,
            at=event.at,
            evidence={"unchanged": round(share, 3), "dtype": event.dtype, "times": event.times},
        )

    def _of_gradients(self, event: Absorbed) -> Iterator[Finding]:
        if event.error < WRONG:
            return
        yield self.finding(
            "warning",
            f"a gradient that is added up in {event.dtype}, {event.times} additions in this step, is {event.error:.0%} "
            "off from the same sum in float32: what comes late is less than half of what it can tell apart",
            "session = preamp.prepare(model.float(), optimizer, level='O4')  # float32 gradients\n"
            "# or add up in float32: for m, p in zip(masters, model.parameters()): m.grad.add_(p.grad); p.grad = None",
            module=event.module,
            op=event.op,
            direction="backward",
            at=event.at,
            evidence={"error of the sum": round(event.error, 3), "dtype": event.dtype, "additions": event.times},
        )
