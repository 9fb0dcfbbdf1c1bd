"""Does a step again, as it was or with a remedy, and says what happened: no fix is printed that was not tried."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...autocast import nodes_behind
from ..findings.pa201 import Origin
from ..hooks import Clock
from ..names import Names
from ..operators import Stream
from ..places import Places
from ..records import Line
from ..shadow.execution import Shadowed
from ..shadow.facts import Fact
from ..shadow.judge import OFF
from ..shadow.remedies import Remedy, candidates
from ..shadow.values import relative_error
from ..statements import statement_at
from .origin import Trails
from .restore import put_back_leaves
from .tape import Tape

BETTER, MUCH_BETTER = 0.5, 0.1
"""What is left of an error after a remedy that helps, at the most; the second of one that is still large."""
TRIALS = 16
"""Remedies that are tried for one fact."""
LINES = 4
"""Lines that are tried where no operator is to blame."""


@dataclass(frozen=True)
class Outcome:
    """A step that was done again."""

    finite: bool
    """Whether losses and gradients are."""
    raised: bool
    """Whether it ended by an error."""
    meant: bool
    """Whether they are finite in float32."""
    origin: Origin | None
    """Where something not finite began that reached a loss or a gradient."""
    gradient: float
    """Norm of all gradients."""
    error: float
    """Relative error of the gradients, or of the losses where there are none; infinite where they are not finite."""
    shadowed: Shadowed

    def at(self, fact: Fact) -> float:
        """Relative error of what is computed at the line of a fact, infinite where that is not finite."""
        line = fact.place.at
        if not self.finite or (fact.kind == "not finite" and line in self.places):
            return math.inf
        errors = self.shadowed.errors.items()
        return max((error for place, (error, *_) in errors if place.at == line), default=0.0)

    @property
    def places(self) -> set[Line]:
        """The lines of the facts, and of what is not finite though float32 is."""
        return {one.place.at for one in self.shadowed.facts} | {place.at for place, _ in self.shadowed.broke}


class Trials:
    """Of one step: `losses` with what is on them, `seed` the gradient that backward begins with.

    `parameters`: whose gradients are wanted.
    """

    def __init__(
        self, tape: Tape, names: Names, parameters: Sequence[Tensor], losses: Sequence[Tensor] = (), seed: float = 1.0
    ) -> None:
        self._tape, self._names, self._seed = tape, names, seed
        self._wanted = [p for p in parameters if p.requires_grad]
        self._device = losses[0].device.type if losses else tape.device
        self._losses = [loss for loss in losses if tape.knows(loss)]
        self.plain = self.again(None) if tape.whole and not tape.is_empty and (self._losses or not losses) else None
        """The step without a remedy; None where it cannot be done again."""

    def again(self, remedy: Remedy | None, without: float = 1.0) -> Outcome:
        """Do it again, `without` a scale that is on it. What raises an error is not finite."""
        tape, names = self._tape, self._names
        shadowed, trails = Shadowed(readings=tape.readings), Trails()
        trails.begin(dict(names.items()))
        places = Places(names.get, names.owners, Trials.again.__code__)
        stream = Stream(lambda: places, Clock())
        made: list[Tensor] = []
        grads: list[Tensor] = []
        origin, raised = None, False
        with tape.done_again(), torch.autograd.set_multithreading_enabled(False):
            try:
                with stream.shown_to(shadowed, trails):
                    if self._losses:
                        made = [tape.replay(loss, places, remedy) for loss in self._losses]
                    else:
                        tape.replay_calls(places, remedy)
                    with stream.paused():
                        origin = trails.origin_of(made)
                    grads = self._back([loss for loss in made if loss.requires_grad], self._seed / without)
                    with stream.paused():
                        shadowed.gradients_came(grads)
                origin = origin or trails.origin_of(grads)
            except Exception:
                raised = True
            put_back_leaves(trails.leaves)
            return _judged(made, grads, shadowed, origin, raised)

    def _back(self, losses: list[Tensor], seed: float) -> list[Tensor]:
        """Gradients without hooks on their accumulation, such as DistributedDataParallel's, where that can be had."""
        if not losses:
            return []
        seeds = [torch.full_like(loss, seed) for loss in losses]
        # Reentrant checkpointing refuses `torch.autograd.grad`, half way through.
        if any(node.name() == "CheckpointFunctionBackward" for loss in losses for node in nodes_behind(loss)):
            torch.autograd.backward(losses, seeds)
            found = [p.grad for p in self._wanted]
        else:
            found = [*torch.autograd.grad(losses, self._wanted, seeds, allow_unused=True)]
        return [grad for grad in found if grad is not None]

    def cure(self, fact: Fact, in_session: bool) -> tuple[str | None, str]:
        """A text to paste that was tried, and what happened; without a text, why there is none."""
        if self.plain is None:
            return untried(fact, self._tape, "the step cannot be done again")
        line = fact.place.at
        if line not in self.plain.places and all(place.at != line for place in self.plain.shadowed.errors):
            return untried(fact, self._tape, "the line runs outside of what can be done again")
        constants = sorted(set(self.plain.shadowed.constants.get(line, ())))
        lines = [line, *(each for each in fact.lines if each != line and self._can_write(each))][:4]
        best: tuple[float, str, str] | None = None
        tried = 0
        broken = [line, *sorted(p for p in self.plain.places if p != line and p[0] == line[0])]
        reading = self._tape.readings.get(line)
        function = None if reading is None else reading.function
        for remedy in candidates(lines, broken, constants, fact.place.module, in_session, function):
            text = remedy.text(self._device, self._tape.readings)
            if text is None:
                continue
            tried += 1
            outcome = self.again(remedy)
            text = remedy.text(self._device, self._tape.readings)  # once more: a result may have been cast back
            if text is not None and self._helps(outcome, fact) and (best is None or outcome.error < best[0] / 2):
                best = outcome.error, f"{_instead_of(remedy, line)}{text}", self._told(outcome, fact)
            if tried >= TRIALS or (best is not None and best[0] < OFF / 2):
                break
        if best is None and not tried:
            return None, "none: the line calls modules, all of which would run in float32, or is not to be read"
        if best is None:
            return None, f"{tried} change{'s' * (tried > 1)} of this line and of those before it: none helps"
        return f"{best[1]}\n# tried: {best[2]}", best[2]

    def _can_write(self, line: Line) -> bool:
        remedies = Remedy((line,)), Remedy((line,), casts="dropped")
        return any(one.text(self._device, self._tape.readings) is not None for one in remedies)

    def adds_up(self) -> tuple[Fact, str, str] | None:
        """Where the gradients are off and no operator is: the line that rids them of it, what to write, what happened.

        Those whose results are off most are tried. None where no line is enough.
        """
        if self.plain is None:
            return None
        off = sorted(self.plain.shadowed.errors.items(), key=lambda one: one[1])
        worst = {place.at: (place, *seen) for place, seen in off if place.direction == "forward"}  # the largest stays
        for line in sorted(worst, key=lambda line: -worst[line][1])[:LINES]:
            (place, error, op, dtype), remedy = worst[line], Remedy((line,))
            text = remedy.text(self._device, self._tape.readings)
            if text is None or (outcome := self.again(remedy)).error >= OFF / 2:
                continue
            before = self.plain.error
            told = f"gradient {outcome.gradient:.3g}, its error {before:.2g} -> {outcome.error:.2g}"
            return Fact("added up", op, place, dtype, (), before, error), f"{text}\n# tried: {told}", told
        return None

    def _helps(self, outcome: Outcome, fact: Fact) -> bool:
        plain, line = self.plain, fact.place.at
        if plain is None or not outcome.finite or not outcome.places <= plain.places:
            return False
        if line in outcome.places:
            return fact.kind != "not finite" and outcome.at(fact) <= MUCH_BETTER * plain.at(fact)
        better = plain.at(fact) == math.inf > outcome.at(fact) or outcome.at(fact) <= BETTER * plain.at(fact)
        return better and (outcome.at(fact) < OFF or outcome.at(fact) <= MUCH_BETTER * plain.at(fact))

    def _told(self, outcome: Outcome, fact: Fact) -> str:
        before = math.inf if self.plain is None else self.plain.at(fact)
        size = f"gradient {outcome.gradient:.3g}" if outcome.gradient else "finite"
        return f"{size}, error {'not finite' if before == math.inf else f'{before:.2g}'} -> {outcome.at(fact):.2g}"


def untried(fact: Fact, tape: Tape, why: str) -> tuple[str | None, str]:
    """The line of a fact in float32, where that can be written, and why it was not tried."""
    text = Remedy((fact.place.at,)).text(tape.device, tape.readings)
    rounded = fact.kind == "decided" and any(one and one.casts() for one in map(statement_at, fact.lines[1:]))
    known = text is not None and ".float()" in text and not rounded
    return f"{text}\n# not tried: {why}" if known else None, f"not tried: {why}"


def _instead_of(remedy: Remedy, line: Line) -> str:
    """A comment that names the lines that a text replaces, where these are others than the fact's."""
    others = sorted(number for _, number in remedy.lines if number is not None)
    if remedy.lines in ((), (line,)):
        return ""
    *first, last = map(str, others)
    return f"# in place of lines {', '.join(first)} and {last}:\n" if first else f"# in place of line {last}:\n"


def _judged(
    losses: list[Tensor],
    grads: list[Tensor],
    shadowed: Shadowed,
    origin: Origin | None,
    raised: bool,
) -> Outcome:
    with torch.no_grad():
        finite = not raised and all(bool(t.isfinite().all()) for t in (*losses, *grads))
        finite = finite and (bool(losses) or not shadowed.broke)  # an evaluation
        shadows = [(t, shadow) for t in (*losses, *grads) if (shadow := shadowed.shadows.find(t)) is not None]
        meant = not raised and all(bool(shadow.isfinite().all()) for _, shadow in shadows)
        gradient = math.sqrt(sum(float(g.detach().double().square().sum()) for g in grads)) if finite else math.inf
        error = shadowed.gradients_off if grads else max((relative_error(*pair) for pair in shadows), default=0.0)
        error = error if finite else math.inf
    return Outcome(finite, raised, meant, origin, gradient, error, shadowed)
