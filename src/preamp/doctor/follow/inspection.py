"""What is inspected in a training step: operators in a few steps, magnitudes in every N-th."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import _disable_current_modes

from ...autocast import MARKER
from ...tree import tensors
from ..findings.events import Deviated, Observed, Prepared
from ..findings.pa202 import row_of
from ..handled import Handled
from ..measure import key_of
from ..operators import Stream
from ..places import Places
from ..replay.tape import Tape
from ..shadow.absorbed import Changes
from ..shadow.execution import Shadowed
from ..shadow.facts import GradientsRead
from ..shadow.judge import OFF
from ..shadow.values import gradients_beside
from .audit import Look, dtypes_of, emit_changes
from .magnitudes import Telemetry
from .precision import Precision, regions_entered
from .run import Run
from .scales import Scales

ENOUGH = 64
"""Model calls of one step that are inspected."""
FACTS = 6
"""Facts of one step for which fixes are tried."""
LOOKS, CALLS = 3, 16
"""Evaluations of a run that are looked at, and model calls of one that are."""


class Evaluation:
    """Shadows the first evaluations under `no_grad`: each from a model's call to the next step."""

    def __init__(self, run: Run, replay: bool) -> None:
        self._run, self._replay = run, replay
        self._looks = self._calls = 0
        self._shadowed: Shadowed | None = None
        self._changes = Changes()
        """What is changed in place, in all of its model calls: what adds up there may stop late."""
        self._tape = Tape(run.stream, run.tape.readings)
        self._turn = -1

    def model_called(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """A model is about to run without gradients; what is returned is handed to `model_returned`."""
        if self._shadowed is None:
            if self._looks >= LOOKS or self._run.turn == self._turn:
                return None
            self._looks, self._calls, self._turn = self._looks + 1, 0, self._run.turn
            self._shadowed = Shadowed(readings=self._tape.readings)
            self._changes = Changes()
            self._run.names.get(module)
            self._run.stream.add(self._shadowed, self._changes, inside=module)
        self._calls += 1
        if self._calls > CALLS:
            self._tape.close_window()
            self._run.stream.remove(self._shadowed)
            return None
        return self._tape.enter_model(module, args, kwargs)

    def model_returned(self, call: Any, out: Any) -> None:
        """It has returned `out`."""
        if out is not None:
            self._tape.leave_model(call, out, keep_on=True)

    def end(self) -> None:
        """A step of the training begins, or the script is over: report what there was."""
        shadowed, self._shadowed = self._shadowed, None
        if shadowed is None:
            return
        run, facts = self._run, [*shadowed.facts, *shadowed.read_out]
        self._tape.close_window()
        run.stream.remove(shadowed, self._changes)
        emit_changes(self._changes, run, run.step)
        trials = run.trials(self._tape) if facts and self._replay else None
        run.tell(facts, trials)
        run.recorder.write("evaluation", step=run.step, **shadowed.told())
        self._tape.clear()


class Inspection:
    """Begins with a model call of a step that is inspected, and ends with the attempt to step."""

    def __init__(self, run: Run, scales: Scales, precision: Precision, every: int | None, replay: bool) -> None:
        self._run, self._scales, self._precision = run, scales, precision
        self.every, self._replay = every, replay
        """Steps from one whose magnitudes are counted to the next; None: only losses are wanted."""
        self.evaluation = Evaluation(run, replay)
        self._look: Look | None = None
        """What observes the operators of this step, where they are observed."""
        self._changes: Changes | None = None
        """What is changed in place, from the first model call of a step to that of the next."""
        self._changes_in = 0
        self._telemetry: Telemetry | None = None
        self._turn, self._opened = -1, 0
        self._again, self._again_in = False, -1
        """Whether this step is to be replayed for observation, and the last turn that was."""
        self.ran_low = False
        """Whether matrix products in 16 bits were seen."""
        self.decided = False
        """Whether 16 bits were seen to decide an index or a mask otherwise."""

    def open(self, turn: int, module: nn.Module | None) -> None:
        """A model is about to run, in this turn of its optimizer; its call has begun already."""
        run = self._run
        self.evaluation.end()
        before = self._run.stop_waiting()
        if turn != self._turn:
            self._close_changes()
        if self.every is None:
            return
        self._opened = self._opened + 1 if turn == self._turn else 1
        self._turn = turn
        if self._opened > ENOUGH:  # a rollout, or a long accumulation: what there is to see was seen
            self._judge()
            if self._telemetry is not None:
                self._telemetry.close()
            return
        regions, compiled = regions_entered(), self._precision.compiled
        if self._changes is None and (turn == 0 or (turn + 1) % self.every == 0):  # `if (step + 1) % k == 0`, too
            self._changes, self._changes_in = Changes(), run.step
        if self._look is None and self._is_close(turn):
            if not compiled:
                run.shadowed = before or Shadowed(readings=run.tape.readings)
                run.shadowed.between = False
                keeps, library = lambda: self._precision.keeps_casts, lambda: self._scales.is_library
                handled = Handled(run.names, keeps, library, self._scales.unscaled_by_hand)
                self._look = Look(run, handled, run.shadowed)
                run.stream.add(*self._look.observers, inside=module)
            elif turn != self._again_in:
                self._again_in, self._again = turn, True
        if before is not None and before is not run.shadowed:
            self._tell_before(before)
        if self._look is not None:
            run.stream.add(*self._look.finders)
            self._look.handled.in_region = bool(regions) or torch.is_autocast_enabled(MARKER)
            self._look.regions.entered = regions
        if self._changes is not None and not compiled:
            run.stream.add(self._changes, inside=module)
        if self._telemetry is None and turn % self.every == 0:
            self._telemetry = Telemetry(run.names, run.step, run.clock)
        if self._telemetry is not None and not compiled:
            self._telemetry.in_backward = False
            self._telemetry.open()

    def wait(self, turn: int) -> None:
        """The script goes on to the batch of this turn, without a model yet: data, times and masks are made."""
        run = self._run
        if self.every is not None and run.shadowed is None and self._is_close(turn) and not self._precision.compiled:
            run.shadowed = Shadowed(readings=run.tape.readings, between=True)
            run.stream.add(run.shadowed)
            run.tape.open_window(between=True)

    def evaluate(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """A model is about to run without gradients; None where that is not looked at by itself."""
        if self.every is None or self._look is not None or self._precision.compiled:
            return None
        self._run.stop_waiting()
        return self.evaluation.model_called(module, args, kwargs)

    @property
    def looks(self) -> bool:
        """Whether the operators of this step are looked at, as they run or in a replay."""
        return self._look is not None or self._again

    def _is_close(self, turn: int) -> bool:
        """Whether operators are observed: in the first step, and then more and more rarely.

        Not in compiled code, which would run as written under the observation, with other roundings.
        """
        every = self.every or 1
        return turn == 0 or (turn % every == 0 and (turn // every).bit_count() == 1)

    def steps(self, optimizer: Optimizer | None) -> None:
        """An optimizer begins to step; None: it has stepped."""
        self.evaluation.end()
        if self._changes is None:
            return
        self._changes.steps(optimizer)
        if self._precision.compiled == "module":  # a compiled function may be called, or step, at any time
            self._run.stream.add(self._changes)

    def leave_compiled_alone(self) -> None:
        """A module is called: one that is compiled or called while a mode is on would run as written, and for good."""
        if self._precision.compiled and self._changes is not None:
            self._run.stream.remove(self._changes)

    def _replay_observed(self, loss: Tensor, scale: float) -> None:
        """Replay a step of compiled code, as written and with autograd, and observe that; `scale`: on this loss."""
        tape, names = self._run.tape, self._run.names
        look = Look(self._run, Handled(names), Shadowed(readings=tape.readings), replayed=True)
        places = Places(names.known, names.owners, Inspection._replay_observed.__code__)
        stream = Stream(lambda: places, self._run.clock)
        if self._telemetry is not None:
            self._telemetry.open()
        try:
            with tape.done_again(), stream.shown_to(*look.observers):
                for again in tape.replay([loss] if tape.knows(loss) else [], places) if tape.whole else ():
                    if self._telemetry is not None and again.requires_grad:
                        self._telemetry.in_backward = True
                        seed = torch.ones_like(again)
                        grads = torch.autograd.grad(again, names.parameters(), seed, allow_unused=True)
                        with stream.paused():
                            self._compare_gradients(look, scale, grads)
        except Exception:  # a model that cannot be called a second time
            return
        finally:
            if self._telemetry is not None:
                self._telemetry.close()
        self._look = look

    def before_backward(self, scale: float, losses: Sequence[Tensor]) -> None:
        """A backward pass from these losses begins, with this scale on them."""
        self.evaluation.end()
        if self._again and losses:
            self._again = False
            self._replay_observed(losses[0], scale / self._scales.seed_of(list(losses)))
        self.gradients_are_true()  # what autograd and we do with gradients is no reading of the script's
        if self._look is not None:
            self._look.handled.backward_scale = scale
        if self._telemetry is not None:
            self._telemetry.in_backward = True
            self._telemetry.backward_scale = scale

    def after_backward(self) -> None:
        """Gradients have arrived; code that reads them may read scaled ones."""
        if self._look is not None:
            self._run.stream.remove(*self._look.finders)  # scaled gradients are large because they are meant to be
            self._look.parameters = dtypes_of(self._run.names)  # before an unscaling lets them hold masters
            self._compare_gradients(self._look, self._scales.of_backward.scale or 1.0)
        if self._telemetry is not None:
            self._telemetry.close()
        if self._look is not None and self._scales.on_gradients != 1:
            grads = (p.grad for p in self._run.names.parameters() if p.grad is not None)
            self._look.handled.gradients = frozenset(key_of(grad) for grad in grads)

    def grad_asked(self, outputs: Any, grads: Sequence[Tensor | None]) -> None:
        """The script has asked for these gradients to compute with them: what they are of may have a scale on it."""
        scale = max((self._scales.noted(output) or 1.0 for output in tensors(outputs)), default=1.0)
        if self._look is not None and scale != 1:
            self._look.handled.ask(grads, scale)

    def _compare_gradients(self, look: Look, scale: float, grads: Sequence[Tensor | None] | None = None) -> None:
        """Gradients of the models' parameters, or these, have just been computed, with this scale on them."""
        shadowed, parameters = look.shadowed, self._run.names.parameters()
        grads = [p.grad for p in parameters] if grads is None else grads
        with torch.no_grad(), _disable_current_modes():
            shadowed.gradients_came(grads)
            if self._scales.in_half and shadowed.shadows.whole:
                causes = shadowed.causes.items()
                excused = {key for key, one in causes if one.kind == "not finite" or one.place.direction == "forward"}
                given = zip(parameters, grads, strict=True)
                look.exact |= gradients_beside(given, shadowed.shadows, self._run.names, scale, excused)

    def gradients_are_true(self) -> None:
        """They have been unscaled, or are about to be: code that reads them now reads true gradients."""
        if self._look is not None:
            self._look.handled.gradients = frozenset()

    def before_step(self, optimizer: Optimizer | None) -> None:
        """All gradients of the step have arrived."""
        run, scales, look = self._run, self._scales, self._look
        self._judge()
        if look is not None and look.exact and not run.bad:
            rows = sorted(look.exact.values(), key=lambda one: (-one.lost, -one.relative))
            scale = scales.of_backward.scale
            run.emit(GradientsRead(rows, scale, scales.highest))
            run.recorder.write("underflow", step=run.step, scale=scale, rows=list(map(row_of, rows)))
        telemetry = self._telemetry
        if telemetry is not None and not telemetry.has_weights:
            known = {id(p) for p in run.names.parameters()}
            own = [p for group in optimizer.param_groups for p in group["params"]] if optimizer is not None else []
            own = [p for p in own if id(p) in known]  # an optimizer of masters has others
            telemetry.weights(own or run.names.parameters(), scales.on_gradients)

    def attempted(self) -> None:
        """The step was taken or skipped."""
        self._run.stream.leave()
        telemetry, self._telemetry = self._telemetry, None
        if telemetry is not None:
            self._run.recorder.write("telemetry", **telemetry.facts())

    def _close_changes(self) -> None:
        changes, self._changes = self._changes, None
        if changes is not None:
            self._run.stream.remove(changes)
            emit_changes(changes, self._run, self._changes_in)

    def close(self) -> None:
        """End the inspection, and record what there is."""
        self.evaluation.end()
        if (before := self._run.stop_waiting()) is not None:
            self._tell_before(before)
        self._judge()
        self._close_changes()
        self.attempted()
        with torch.no_grad(), _disable_current_modes():
            for event in self._run.counters.values():
                if event.stayed < event.moved and event.stands_still():  # since it was looked at
                    self._run.emit(replace(event, stayed=event.moved))

    def _tell_before(self, before: Shadowed) -> None:
        """Report on what ran outside of models and of steps that are looked at."""
        self.decided |= any(one.kind == "decided" for one in before.facts)
        self._run.tell(before.facts, None)

    def give_up(self) -> None:
        """End the inspection and judge nothing."""
        if self._look is not None:
            self._look.regions.close()
        if self._telemetry is not None:
            self._telemetry.close()
        self._look = self._changes = self._telemetry = self.every = None

    def _judge(self) -> None:
        """Stop observing operators, and report what they showed."""
        seen, self._look = self._look, None
        if seen is None:
            return
        run, scales = self._run, self._scales
        run.shadowed = None
        seen.close(run)
        for finding in (finding for one in seen.observers for finding in one.found):
            file, line = finding.file, finding.line
            if seen.replayed and file is None:
                file, line = run.tape.called_at(finding.module, run.names.get)
            run.report(replace(finding, file=file, line=line))
        for product in seen.products.all if seen.replayed else ():
            product.at = product.at if product.at[0] else run.tape.called_at(product.module, run.names.get)
        facts = [one for one in seen.shadowed.facts if one.place.direction == "forward" or one.kind == "made"]
        facts = [one for one in facts if one.kind != "not finite" or one.place.at not in run.origins][:FACTS]
        run.recorder.write("shadow", step=run.step, **seen.shadowed.told())
        adds_up = not facts and seen.shadowed.gradients_off >= OFF and not run.bad
        trials = scales.trials(run.losses) if (facts or adds_up) and self._replay else None
        run.tell(facts, trials)
        if adds_up and trials is not None and (found := trials.adds_up()) is not None:
            run.emit(Deviated(*found))
        self.ran_low |= bool(seen.products.low)
        self.decided |= any(one.kind == "decided" for one in facts)
        modules, prepared = dict(run.names.items()), [*self._prepared()]
        run.emit(Observed(seen.products, modules, seen.handled, scales.scale or 1.0, prepared))
        low = sorted({str(product.dtype).removeprefix("torch.") for product in seen.products.low})
        facts_of_products = {"flops": seen.products.flops, "low_share": seen.products.low_share, "low": low}
        parameters = seen.parameters or dtypes_of(run.names)
        run.recorder.write("audit", step=run.step, **facts_of_products, parameters=parameters)

    def _prepared(self) -> Iterator[Prepared]:
        for session, own in self._scales.prepared():
            paths = frozenset(path for path, part in self._run.names.items() if part in own)
            yield Prepared(paths, session.policy.compute, session.policy.masters)
