"""Does a step again, as it was or with a remedy, and says what happened: no fix is printed that was not tried."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...autocast import nodes_behind
from ..findings.pa201 import Origin
from ..hooks import Clock, Patches
from ..names import Names
from ..operators import Stream
from ..places import Places
from ..records import Line
from ..shadow.execution import Shadowed
from ..shadow.facts import Fact
from ..shadow.judge import OFF
from ..shadow.remedies import Remedy, applied, candidates
from ..shadow.values import relative_error
from ..statements import statement_at
from .origin import Trails
from .restore import put_back_leaves
from .tape import Tape

BETTER, MUCH_BETTER = 0.5, 0.1
"""What is left of an error after a remedy that helps, at the most; the second of one that is still large."""
_CAST = ".float()"
TRIALS = 16
"""Remedies that are tried for one fact."""
LINES = 4
"""Lines that are tried where no operator is to blame."""


_NEXT = 16.0
"""A scale at which gradients overflow is divided by this for the next try: four times what a scaler comes down by."""
_NOTHING = 2.0**-60
"""A scale below this cannot be divided out of a loss."""


class Scaling(NamedTuple):
    """The loss scale of a step."""

    scale: float = 1.0
    is_seed: bool = False
    """Whether it is what the backward pass begins with, and not on the losses."""
    highest: float | None = None
    """The largest so far, where the scale adapts: without what has brought it down it would be there."""


UNSCALED = Scaling()


@dataclass(frozen=True)
class Outcome:
    """A step that was done again."""

    scale: float
    """The loss scale with which it was."""
    forward: bool
    """Whether losses are finite."""
    finite: bool
    """Whether losses and gradients are."""
    raised: bool
    """Whether it ended by an error."""
    meant: bool
    """Whether they are finite in float32."""
    origin: Origin | None
    """Where something not finite began that reached a loss or a gradient."""
    gradient: float
    """Norm of all gradients, without the scale."""
    error: float
    """Relative error of the gradients, or of the losses where there are none; infinite where they are not finite."""
    shadowed: Shadowed

    def at(self, fact: Fact) -> float:
        """Relative error of what is computed at the line of a fact, infinite where that is not finite; of errors that
        add up that of the gradients.
        """
        line = fact.place.at
        if not self.finite or (fact.kind == "not finite" and line in self.wrong(fact.place.direction)):
            return math.inf
        return self.error if fact.kind == "added up" else self.off(line, fact.place.direction)

    def off(self, line: Line, direction: str = "") -> float:
        """Relative error of what is computed at a line, in one direction or any, whatever its inputs are."""
        errors = ((place, error) for place, (error, *_) in self.shadowed.errors.items() if place.at == line)
        return max((error for place, error in errors if place.direction.startswith(direction)), default=0.0)

    def wrong(self, direction: str = "") -> set[Line]:
        """The lines of the facts, and of what is not finite though float32 is, in one direction or any."""
        there = [one.place for one in self.shadowed.facts] + [place for place, _ in self.shadowed.broke]
        return {one.at for one in there if one.direction.startswith(direction)}

    def others(self, plain: Outcome) -> set[Line]:
        """Lines at which something is wrong that was right without the remedy.

        An infinity that leaves no trace in the gradients is none, nor is a zero that another scale made.
        """
        facts = {one.place.at for one in self.shadowed.facts if self.scale == plain.scale}
        return (self.wrong("forward") | facts) - plain.wrong()


class Trials:
    """Of one step: `losses` with what is on them.

    `parameters`: whose gradients are wanted; `policy_with`: as `Scales` has it.
    """

    def __init__(
        self,
        tape: Tape,
        names: Names,
        parameters: Sequence[Tensor],
        losses: Sequence[Tensor] = (),
        scaling: Scaling = UNSCALED,
        policy_with: Callable[[str | None], str | None] = lambda _: None,
    ) -> None:
        self._tape, self._names, self._scaling, self._policy_with = tape, names, scaling, policy_with
        self._wanted = [p for p in parameters if p.requires_grad]
        self._device = losses[0].device.type if losses else tape.device
        self._losses = [loss for loss in losses if tape.knows(loss)]
        self.plain = self.again(None) if tape.whole and not tape.is_empty and (self._losses or not losses) else None
        """The step without a remedy; None where it cannot be done again."""

    def again(self, remedy: Remedy | None, scale: float | None = None) -> Outcome:
        """Do it again, with this loss scale or as it was. What raises an error is not finite."""
        tape, names = self._tape, self._names
        shadowed, trails = Shadowed(readings=tape.readings), Trails(names.items())
        places = Places(names.get, names.owners, Trials.again.__code__)
        stream = Stream(lambda: places, Clock())
        own, is_seed, _ = self._scaling
        scale, gone = own if scale is None else scale, own < _NOTHING and not is_seed
        made: list[Tensor] = []
        grads: list[Tensor] = []
        origin, raised, patches = None, False, Patches()

        def back(engine: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            with applied(remedy, places):  # torch has left all modes before, and here it recomputes checkpoints
                return engine(*args, **kwargs)

        patches.wrap(torch.autograd, "_engine_run_backward", back, always=True)
        with tape.done_again(), torch.autograd.set_multithreading_enabled(False), closing(patches):
            try:
                with stream.shown_to(shadowed, trails):
                    made = tape.replay(self._losses, places, remedy, unscaled=gone)
                    with stream.paused():
                        origin = trails.origin_of(made)
                    seed = scale if is_seed or gone else scale / own
                    grads = self._back([loss for loss in made if loss.requires_grad], seed)
                    with stream.paused():
                        shadowed.gradients_came(grads)
                origin = origin or trails.origin_of(grads)
            except Exception:
                raised = True
            put_back_leaves(trails.leaves)
            with torch.no_grad():
                forward = not raised and all(bool(t.isfinite().all()) for t in made)
                finite = forward and all(bool(t.isfinite().all()) for t in grads)
                finite = finite and (bool(made) or not shadowed.broke)  # an evaluation
                shadows = [(t, shadow) for t in (*made, *grads) if (shadow := shadowed.shadows.find(t)) is not None]
                meant = not raised and all(bool(shadow.isfinite().all()) for _, shadow in shadows)
                gradient = math.sqrt(sum(float(g.detach().double().square().sum()) for g in grads)) / (scale or 1.0)
                error = (
                    shadowed.gradients_off if grads else max((relative_error(*pair) for pair in shadows), default=0.0)
                )
            error = error if finite else math.inf
            return Outcome(scale, forward, finite, raised, meant, origin, gradient, error, shadowed)

    def _back(self, losses: list[Tensor], seed: float) -> list[Tensor]:
        """Gradients without hooks on their accumulation, such as DistributedDataParallel's, where that can be had."""
        if not losses:
            return []
        seeds = [torch.full_like(loss, seed, dtype=torch.float64).to(loss.dtype) for loss in losses]
        # Reentrant checkpointing refuses `torch.autograd.grad`, half way through.
        if any(node.name() == "CheckpointFunctionBackward" for loss in losses for node in nodes_behind(loss)):
            torch.autograd.backward(losses, seeds)
            found = [p.grad for p in self._wanted]
        else:
            found = [*torch.autograd.grad(losses, self._wanted, seeds, allow_unused=True)]
        return [grad for grad in found if grad is not None]

    def cure(self, fact: Fact) -> tuple[str | None, str]:
        """A text to paste that was tried, and what happened; without a text, why there is none."""
        if self.plain is None:
            return untried(fact, self._tape, "the step cannot be done again")
        line = fact.place.at
        if line not in self.plain.wrong() and all(place.at != line for place in self.plain.shadowed.errors):
            return untried(fact, self._tape, "the line runs outside of what can be done again")
        constants, seen = sorted(set(self.plain.shadowed.constants.get(line, ()))), self._tape.readings
        others = [each for each in fact.lines if each != line and each in seen and not seen[each].calls_module]
        lines = [line, *sorted(others, key=lambda one: seen[one].calls_layer)][:LINES]
        best: tuple[float, str, str] | None = None
        tried = 0
        broken = [line, *sorted(p for p in self.plain.wrong() if p != line and p[0] == line[0])]
        function = seen[line].function if line in seen else None
        policy = self._policy_with(fact.place.module)
        for remedy in candidates(lines, broken, constants, fact.place.module, policy, function):
            if remedy.constants and best is not None:  # what is computed would be another thing
                break
            if remedy.text(self._device, seen) is None:
                continue
            tried += 1
            outcome = self._with(remedy, self.plain.at(fact))
            text = remedy.text(self._device, seen, line)  # now that a result may have been cast back
            helps = text is not None and _helps(self.plain, outcome, fact)
            if text is not None and helps and (best is None or outcome.error < best[0] / 2):
                best = outcome.error, text, _told(self.plain, outcome, fact)
            if tried >= TRIALS or (best is not None and best[0] < OFF / 2):
                break
        if best is None and not tried:
            return None, "nothing: the line calls other modules, or is not one that can be rewritten by itself"
        if best is None:
            return None, f"{tried} change{'s' * (tried > 1)} of this line and of those before it: none helps"
        return f"{best[1]}\n# tried: {best[2]}", best[2]

    def _with(self, remedy: Remedy, before: float) -> Outcome:
        """The step with a remedy: where what is not finite has kept a scale from its place, with one that fits."""
        best = outcome = self.again(remedy)
        scale = self._scaling.highest if before == math.inf else None
        while scale is not None and scale > 1 and outcome.forward and best.error >= OFF:
            if scale != self._scaling.scale:
                outcome = self.again(remedy, scale)
                best = min(best, outcome, key=lambda one: one.error)
                if outcome.finite:
                    break
            scale /= _NEXT
        return best

    def adds_up(self) -> tuple[Fact, str, str] | None:
        """Where the gradients are off and no operator is: the line that rids them of it, what to write, what happened.

        Those whose results are off most are tried. None where no line is enough.
        """
        if self.plain is None or self.plain.error < OFF:
            return None
        off = sorted(
            (one for one in self.plain.shadowed.errors.items() if one[1][0] < math.inf), key=lambda one: one[1]
        )
        worst = {place.at: (place, *seen) for place, seen in off if place.direction == "forward"}  # the largest stays
        for line in sorted(worst, key=lambda line: -worst[line][1])[:LINES]:
            place, error, op, dtype = worst[line]
            fact = Fact("added up", op, place, dtype, (), self.plain.error, error)
            fix, told = self.cure(fact)
            if fix is not None:
                return fact, fix, told
        return None


def _helps(plain: Outcome, outcome: Outcome, fact: Fact) -> bool:
    if not outcome.finite:
        return False
    others = outcome.others(plain)  # errors that it brings to light were there before
    if others and not (plain.finite and all(plain.off(other) >= OFF for other in others)):
        return False
    before, left, still = plain.at(fact), outcome.at(fact), fact.place.at in outcome.wrong(fact.place.direction)
    if before == math.inf:
        return left <= BETTER and not (fact.kind == "not finite" and still)
    much = left <= MUCH_BETTER * before
    return much if still else left <= BETTER * before and (left < OFF or much)


def _told(plain: Outcome, outcome: Outcome, fact: Fact) -> str:
    what, before = "all gradients" if fact.kind == "added up" else "the line", plain.at(fact)
    scaled = "" if outcome.scale == plain.scale else f" at a loss scale of {outcome.scale:g}"
    size = f", gradient norm {outcome.gradient:.3g}" if outcome.gradient else ""
    was = "not finite" if before == math.inf else f"off by {100 * before:.2g}%"
    return f"finite{scaled}{size}; {what} against float32: {was} -> off by {100 * outcome.at(fact):.2g}%"


def untried(fact: Fact, tape: Tape, why: str) -> tuple[str | None, str]:
    """The line of a fact in float32, where that can be written, and why it was not tried."""
    at, text = fact.place.at, None
    there = [(line, one) for line in fact.lines[1:] if (one := statement_at(line))]
    rounds = [(line, one.casts()) for line, one in there if one.casts() or any(one.dtypes())]
    for line, casts in rounds or [(at, [])]:  # what is rounded there is no better for a cast that comes later
        remedy = Remedy(tuple(dict.fromkeys((line, at))), casts="dropped" if casts else "kept")
        text = text or remedy.text(tape.device, tape.readings, at)
    statement = statement_at(at)
    if statement is None or text is None or text.count(_CAST) == statement.rewritten({}).count(_CAST):
        return None, f"not tried: {why}"
    return f"{text}\n# not tried: {why}", f"not tried: {why}"
