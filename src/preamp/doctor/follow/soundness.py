"""Whether the loss and the gradients of each step are finite, and where they ceased to be."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from ..findings.events import BatchNotFinite
from ..findings.pa201 import Diagnosis
from ..measure import all_finite
from ..shadow.remedies import Remedy
from ..statements import statement_at
from .run import Run
from .scales import Scales

DIAGNOSES = 8
"""Steps that are not finite and are replayed: the first ones say most."""


class Soundness:
    """Checks every backward pass; the first few that are not finite are replayed to find out why."""

    def __init__(self, run: Run, scales: Scales, replay: bool) -> None:
        self._run, self._scales, self._replay = run, scales, replay
        self.bad_gradients = False
        """Whether a gradient was not finite in this step: a scaler skips for that, not for the loss."""
        self._damaged = False
        """Whether the weights are not finite: nothing that follows can be."""
        self._diagnoses = 0
        self._held_back: Diagnosis | None = None
        """What a scale of the script's own brought about: a disease if the step is taken all the same."""
        self._versions: list[int] | None = None

    def check(self, losses: list[Tensor]) -> None:
        """After a backward pass from these."""
        run = self._run
        sick_loss = not all(bool(loss.isfinite().all()) for loss in losses)
        gradients = [p.grad for p in run.parameters() if p.grad is not None]
        sick_gradients = bool(gradients) and not all_finite(gradients)
        self.bad_gradients |= sick_gradients
        if not (sick_loss or sick_gradients) or self._damaged:
            return
        run.bad = "loss" if sick_loss else "gradients"
        if self._replay and self._diagnoses < DIAGNOSES:
            self._diagnoses += 1
            self._diagnose(losses)

    def _diagnose(self, losses: list[Tensor]) -> None:
        run = self._run
        scale, by_hand = self._scales.on_losses(losses)
        # All processes must call sharded models together, and only these gradients may be non-finite.
        rows = run.tape.samples(masks=False) if run.names.is_sharded else ()
        found = None if run.names.is_sharded else self._diagnosis(losses, scale)
        if rows:
            run.emit(BatchNotFinite(rows, run.tape.called()))
        elif found is None:
            run.recorder.write("unexplained", step=run.step, what=run.bad, at=run.backward_at)
        elif not found.by_scale:
            run.emit(found)
        elif by_hand:
            self._held_back = found
        else:
            self._overflowed(found, scale)

    def _diagnosis(self, losses: list[Tensor], scale: float) -> Diagnosis | None:
        """What the replay of the step shows; None where it cannot be replayed, or is sound when it is.

        `scale`: what is on the backward pass. An overflow that is gone without it is the scale's doing.
        """
        run = self._run
        trials = self._scales.trials(losses, scale)
        plain = trials.plain
        origin = None if plain is None or plain.raised else plain.origin
        if plain is None or origin is None:
            return None
        # a scale that has halved down to 0 is not what makes an inf, and nothing can be divided by it
        by_scale = scale not in (0.0, 1.0) and not origin.from_data and trials.again(None, 1.0).origin is None
        if origin.file is None and origin.module is not None:
            # A model made of torch's modules only: the line that called it, which a replay does not run.
            file, line = run.tape.called_at(origin.module, run.names.get)
            origin = replace(origin, file=file, line=line)
        if origin.from_data or by_scale:
            samples, cast = (run.tape.samples(), run.tape.readings.overflowed()) if origin.from_data else ((), None)
            return Diagnosis(origin, run.step, by_scale, samples, cast=cast)
        line_of_it = origin.file, origin.line
        run.origins.add(line_of_it)
        known = [fact for place, fact in plain.shadowed.broke if place.at == line_of_it]
        known += [fact for fact in plain.shadowed.facts if fact.place.at == line_of_it]
        before = {line for fact in known for line in fact.lines}  # an epsilon that vanished there is the cause
        known += [fact for fact in plain.shadowed.facts if fact.code == "PA101" and fact.place.at in before]
        known.sort(key=lambda fact: fact.code != "PA101")
        if not known and plain.meant and line_of_it in plain.shadowed.grown:
            known = [plain.shadowed.grown[line_of_it]]
        if not known:
            not_there = "float32 is not finite there either, so precision is not the cause"
            return Diagnosis(origin, run.step, tried="no line was found that leads there" if plain.meant else not_there)
        fix, tried = trials.cure(known[0])
        lines = map(statement_at, known[0].lines[:2])
        if fix and origin.op.startswith("aten.log") and any(one and "softmax(" in "".join(one.lines) for one in lines):
            fix += "\n# or F.log_softmax(logits, -1) in place of the logarithm of a softmax; for a loss F.cross_entropy"
        return Diagnosis(origin, run.step, fact=known[0], fix=fix, tried=tried)

    def _overflowed(self, found: Diagnosis, scale: float) -> None:
        """The scale alone is the cause: a scaler skips such a step."""
        place = found.origin.where
        file, line = place.pop("at")
        self._run.recorder.write("overflow", step=self._run.step, scale=scale, file=file, line=line, **place)

    def died(self, ran_low: bool, decided: bool) -> None:
        """The script has ended by an error of its own: do the step that was going on again, and in float32.

        `decided`: 16 bits have decided an index, which a replay is given as it was: an error there says nothing.
        """
        run = self._run
        if not self._replay or not ran_low or run.names.is_sharded or run.tape.is_empty:
            return
        trials = run.trials()
        if trials.plain is None or not trials.plain.raised:
            return
        run.tell(trials.plain.shadowed.facts, trials)
        raises = trials.again(Remedy(module="")).raised
        if not (raises and decided):
            run.recorder.write("in_float32", raises=raises)

    def before_step(self) -> None:
        """The step is about to be tried."""
        if self.bad_gradients:
            self._versions = [p._version for p in self._run.parameters()]

    def stepped(self, skipped: bool) -> bool:
        """It was, or was not; returns whether it was skipped: an optimizer of the script's own may see to that."""
        run = self._run
        if self.bad_gradients and not skipped and self._versions is not None:
            parameters = run.parameters()
            self._damaged = not all_finite(p.detach() for p in parameters if p.is_floating_point())
            # torch's fused optimizers write without counting: no count says "skipped" only of weights that are whole
            skipped = not self._damaged and self._versions == [p._version for p in parameters]
        found, self._held_back = self._held_back, None
        if found is not None and skipped:
            self._overflowed(found, 1.0)
        elif found is not None:
            run.emit(found)
        run.bad, self.bad_gradients, self._versions = None, False, None
        return skipped
