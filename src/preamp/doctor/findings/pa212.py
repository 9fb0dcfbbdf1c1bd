"""PA212: sums kept in 16 bits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from torch import Tensor
from torch.nn import Parameter

from ...report import Finding
from ..records import Line
from ..shadow.facts import Absorbed
from ..statements import going_on_in_float32, statement_at
from .check import Check, on

STAYS = 0.9
"""Share of the numbers that would have moved in float32 and did not, from which a sum has stopped."""
WRONG = 0.1
"""Relative error of an accumulated gradient from which it is reported."""
IN_VAIN = 16
"""Additions in a row without effect, up to the last, after which a sum has stopped, too."""
TENSOR = 16
"""Numbers from which one look is enough. A single number stays now and then, and has to stay in two looks."""

_GRADIENTS = (
    "for parameter in model.parameters():  # where the optimizer steps float32 masters\n"
    "    parameter.grad_dtype = torch.float32\n"
    "# or session = preamp.prepare(model.float(), optimizer, level='O4')  # float32 gradients"
)


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
        fix = in_float32(event)
        if event.buffer is not None:
            what = "numbers of a buffer"
        elif event.is_weight:
            what, fix = "weights", "# keep them in float32: model.float(), and torch.autocast where it computes"
        elif event.op in ("mul", "lerp") or event.parameters or (event.moved >= TENSOR and not of_one):
            what = "numbers of an average"
            is_model = event.parameters or isinstance(event.last(), Parameter)
            whole = "copy.deepcopy(model).float()" if is_model else "begin it with torch.float32"
            fix = fix or f"# keep the average in float32: {whole}"
        else:
            what, fix = "a sum", fix or "# add up in float32: what is added as .float(), to a sum in float32"
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
            _GRADIENTS if hasattr(Tensor, "grad_dtype") else _GRADIENTS.partition("\n# or ")[2],
            module=event.module,
            op=event.op,
            direction="backward",
            at=event.at,
            evidence={"error of the sum": round(event.error, 3), "dtype": event.dtype, "additions": event.times},
        )


def in_float32(event: Absorbed) -> str | None:
    """What to write for the buffer or parameters that change at a line, or in place of it; None where it is no sum."""
    tried = f"# tried: from the same numbers on, in float32, all {event.moved} move"
    if event.buffer is not None:
        name = event.buffer
        return (
            "for part in model.modules():  # after the cast of the model\n"
            f"    if hasattr(part, {name!r}):\n        part.{name} = part.{name}.float()\n{tried}"
        )
    if event.parameters:
        part = f"model.get_submodule({event.module!r})" if event.module else "model"
        return f"{part}.float()  # after the cast of the model\n{tried}"
    statement = statement_at(event.at)
    text = None if statement is None else going_on_in_float32(statement, event.adds_tensor)
    return None if text is None or statement is None else f"{statement.placed(text)}\n{tried}"
