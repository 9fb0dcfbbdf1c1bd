"""Whether the loss and the gradients of each step are finite, and where they ceased to be."""

from __future__ import annotations

import cmath
from typing import TYPE_CHECKING

from torch import Tensor

from ..report import Finding
from ._finite import all_finite
from ._replay import Diagnosis, diagnose, samples
from ._scaled import like_a_scale
from ._stack import Line

if TYPE_CHECKING:
    from ._watch import Watch

DIAGNOSES = 8
"""Sick steps that are replayed; the first ones tell."""


class Soundness:
    """Looks after every backward pass; a sick one is done again to see why, the first few times."""

    def __init__(self, watch: Watch, replay: bool) -> None:
        self._watch, self._replay = watch, replay
        self.bad: str | None = None
        """What was not finite in this step, "loss" or "gradients"."""
        self.bad_gradients = False
        """Whether a gradient was not finite in this step: a scaler skips for that, not for the loss."""
        self._damaged = False
        """Whether the weights are: what follows is sick whatever it does."""
        self._diagnoses = 0
        self._held_back: Diagnosis | None = None
        """What a scale of the script's own brought about: a disease if the step is taken all the same."""
        self._versions: list[int] | None = None

    def look_at(self, losses: list[Tensor]) -> None:
        """After a backward pass from these."""
        watch = self._watch
        sick_loss = not all(map(_is_finite, losses))
        gradients = [p.grad for p in watch.parameters() if p.grad is not None]
        sick_gradients = bool(gradients) and not all_finite(gradients)
        self.bad_gradients |= sick_gradients
        if not (sick_loss or sick_gradients) or self._damaged:
            return
        self.bad = "loss" if sick_loss else "gradients"
        if not self._replay or self._diagnoses >= DIAGNOSES:
            return
        self._diagnoses += 1
        scale, by_hand = self._scale_on(losses)
        found: Diagnosis | None = None
        rows: tuple[int, ...] = ()
        if watch.names.is_sharded:  # a call is one of all processes, and these may be the only gradients that are sick
            rows = samples(watch.tape, masks=False)
        else:
            with watch.calls.ours():
                found = diagnose(watch.tape, watch.names, losses, scale, watch.parameters())
        if rows:
            watch.tell(_of_the_batch(rows, watch.tape.called()))
        elif found is None:
            watch.recorder.write("unexplained", step=watch.step, what=self.bad, at=watch.backward_at)
        elif not found.by_scale:
            watch.tell(found.finding(watch.step))
        elif by_hand:
            self._held_back = found
        else:
            watch.recorder.write("overflow", step=watch.step, scale=scale, **found.place())

    def _scale_on(self, losses: list[Tensor]) -> tuple[float, bool]:
        """What is on the loss, and whether the script put it there itself."""
        if len(losses) != 1:
            return 1.0, False
        scale = self._watch.scaling.scale_of(losses[0])
        factor = self._watch.tape.factor_on(losses[0]) if scale == 1 else None
        return (factor, True) if factor is not None and like_a_scale(factor) else (scale, False)

    def before_step(self) -> None:
        """The step is about to be tried."""
        if self.bad_gradients:
            self._versions = [p._version for p in self._watch.parameters()]

    def stepped(self, skipped: bool) -> bool:
        """It was, or was not; returns whether it was skipped: an optimizer of the script's own may see to that."""
        watch = self._watch
        if self.bad_gradients and not skipped and self._versions is not None:
            parameters = watch.parameters()
            self._damaged = not all_finite(p.detach() for p in parameters if p.is_floating_point())
            # torch's fused optimizers write without counting: no count says "skipped" only of weights that are whole
            skipped = not self._damaged and self._versions == [p._version for p in parameters]
        found, self._held_back = self._held_back, None
        if found is not None and skipped:
            watch.recorder.write("overflow", step=watch.step, scale=1.0, **found.place())
        elif found is not None:
            watch.tell(found.finding(watch.step))
        self.bad, self.bad_gradients, self._versions = None, False, None
        return skipped


def _is_finite(loss: Tensor) -> bool:
    """Of one number this takes a tenth of what an operator takes."""
    return cmath.isfinite(loss.item()) if loss.numel() == 1 else bool(loss.isfinite().all())


def _of_the_batch(rows: tuple[int, ...], place: Line) -> Finding:
    """PA207 of a step that was not done again: what came in tells."""
    return Finding(
        "PA207", "error", "a batch was not finite when it came in, and neither was what followed from it",
        direction="forward", file=place[0], line=place[1], evidence={"entries of the batch": list(rows)},
        fix="assert torch.isfinite(x).all()  # where batches are made; drop the entry, or mend it there",
    )  # fmt: skip
