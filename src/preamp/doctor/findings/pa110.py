"""PA110: weights changed or cast inside a region."""

from __future__ import annotations

from collections.abc import Iterator

from ...report import Finding
from .check import Check, on
from .events import ModuleCast, Observed, WeightsChanged


class PA110(Check):
    """Autocast keeps the casts of weights until its region ends."""

    @on(WeightsChanged)
    def changed(self, event: WeightsChanged) -> Iterator[Finding]:
        """A step inside of a region around the whole loop."""
        yield self.finding(
            "error",
            "weights were changed inside an autocast region that goes on: the model computes with the cast weights of "
            "before, which autocast keeps until the region ends",
            "with torch.autocast(...):  # one region a step, around forward and loss only\n"
            "    loss = criterion(model(x), y)\nloss.backward()\noptimizer.step()",
            direction="forward",
            at=event.at,
            evidence={"changes": event.changes},
        )

    @on(ModuleCast)
    def cast(self, event: ModuleCast) -> Iterator[Finding]:
        """A cast by hand inside of a region."""
        if event.in_region:
            yield self.finding(
                "warning",
                f"{event.kind}.{event.op}() inside an autocast region: from here on its parameters are 16-bit, where "
                "autocast would have cast copies of float32 ones",
                f"# remove .{event.op}(...): autocast casts by itself",
                module=event.module,
                op=event.op,
                at=event.at,
            )

    @on(Observed)
    def written(self, event: Observed) -> Iterator[Finding]:
        """A forward pass that changes its own weights."""
        for place in event.handled.writes[:1]:
            yield self.finding(
                "error",
                "a weight is changed in place while the model runs inside an autocast region: a cast of it that was "
                "made before is used on",
                "# change weights outside of the region, or compute a new tensor: w = weight.clamp(-1, 1)",
                module=event.handled.written,
                direction="forward",
                at=place.at,
            )
