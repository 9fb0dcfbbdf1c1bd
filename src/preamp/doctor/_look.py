"""What is looked at in a training step: operators in a few of them, magnitudes in every N-th."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..autocast import MARKER
from ..report import Finding
from ._audit import Held, seen
from ._between import Between
from ._live import Live
from ._places import key_of
from ._recomputed import Recomputed
from ._scaled import clipped_scaled
from ._telemetry import Pending, Telemetry
from ._underflow import findings, underflows
from ._updates import flushed

if TYPE_CHECKING:
    from ._watch import Watch


ENOUGH = 64
"""Model calls of one step that are looked at."""


class Look:
    """Begins with a model call of a step that is to be looked at, and is over with the attempt to step."""

    def __init__(self, watch: Watch, every: int | None, replay: bool) -> None:
        self._watch, self._every, self._replay = watch, every, replay
        self._live: Live | None = None
        self._recomputed: Recomputed | None = None
        self._between: Between | None = None
        self._held: Held | None = None
        """Where operators were looked at in this step."""
        self._telemetry: Telemetry | None = None
        self._done: Telemetry | None = None
        """Of a step that is over, until the weights are seen that it left."""
        self._left: list[Live | Between] = []
        self._taken = False
        self._turn, self._opened = -1, 0
        self._again, self._again_in, self._replayed = False, -1, False
        """Whether this step is to be done again to be looked at, the last turn of which that was so, and whether what
        is looked at was."""
        self._regions = False, False
        """Whether the model was called in a region, and in one of preamp's."""
        self._pending: Pending | None = None
        self.low_now: set[torch.dtype] = set()
        """The same, of this step only; empty where operators were not looked at."""
        self.low: set[torch.dtype] = set()
        """16-bit dtypes of matrix products seen."""

    def open(self, turn: int, module: nn.Module | None) -> None:
        """A model is about to run, in this turn of its optimizer; its call has begun already."""
        watch = self._watch
        self._stop_between()
        self.settle()
        if self._every is None:
            return  # only losses are wanted
        self._opened = self._opened + 1 if turn == self._turn else 1
        self._turn = turn
        if self._opened > ENOUGH:  # a rollout, or a long accumulation: what there is to see was seen
            self._judge()
            if self._telemetry is not None:
                self._telemetry.close()
            return
        compiled = watch.asked.compiled
        if compiled and self._live is None and self._is_close(turn) and turn != self._again_in:
            self._again_in, self._again = turn, True
        if self._live is None and not compiled and self._is_close(turn):
            weights = {id(p): p for p in watch.names.parameters()}
            self._live = Live(watch.names, weights, watch.clock, lambda: watch.asked.keeps_casts)
            if module is not None:
                self._live.places.entered(module)
            self._live.__enter__()
            self._recomputed = Recomputed(watch.names)
        on = torch.is_autocast_enabled(MARKER)
        self._regions = on or any(torch.is_autocast_enabled(kind) for kind in ("cpu", "cuda")), on
        if self._live is not None:
            self._tell_regions(self._live)
        if self._telemetry is None and turn % self._every == 0:
            self._telemetry = Telemetry(watch.names, watch.step, watch.clock)
        if self._telemetry is not None and not compiled:
            self._telemetry.in_backward = False
            self._telemetry.open()
            self._telemetry.regions = tuple(kind for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind))

    def _is_close(self, turn: int) -> bool:
        """Whether operators are looked at: in the first step, and then more and more rarely.

        Not in compiled code, which would run as written under the observation, with other roundings.
        """
        every = self._every or 1
        return turn == 0 or (turn % every == 0 and (turn // every).bit_count() == 1)

    def _tell_regions(self, live: Live) -> None:
        live.autocast_on, ours = self._regions
        live.torchs_own = live.autocast_on and not ours

    def _look_again(self, loss: Tensor) -> None:
        """Do a step of compiled code again, as written and with autograd, and look at that."""
        watch = self._watch
        weights = {id(p): p for p in watch.names.parameters()}
        live = Live(watch.names, weights, watch.clock, lambda: False, Look._look_again.__code__)
        self._tell_regions(live)
        if self._telemetry is not None:
            self._telemetry.open()
        try:
            with watch.tape.done_again(watch.calls), live:
                if watch.tape.knows(loss):
                    again = watch.tape.replay(loss, live.places, watch.names.get)
                    if self._telemetry is not None and again.requires_grad:
                        self._telemetry.in_backward = True
                        torch.autograd.grad(again, list(weights.values()), torch.ones_like(again), allow_unused=True)
                else:
                    watch.tape.replay_calls(live.places, watch.names.get)
        except Exception:  # a model that cannot be called a second time
            live.places.close()
        else:
            self._live, self._replayed = live, True
        finally:
            if self._telemetry is not None:
                self._telemetry.close()

    def before_backward(self, scale: float, losses: Sequence[Tensor]) -> None:
        """The losses are there, with this scale on them."""
        if self._again and losses:
            self._again = False
            self._look_again(losses[0])
        if self._live is not None:
            self._live.grad_keys = frozenset()  # what autograd and we do with gradients is no reading of the script's
            self._live.backward_scale = scale
        if self._telemetry is not None:
            self._telemetry.in_backward = True
            self._telemetry.backward_scale = scale

    def after_backward(self, still_scaled: bool) -> None:
        """Gradients are there; `still_scaled`: who reads them reads scaled ones."""
        if self._telemetry is not None:
            self._telemetry.close()
            for path in self._telemetry.outside[:1]:
                self._watch.tell(self._watch.asked.not_in_thread(path))
        if self._live is not None and still_scaled:
            grads = (p.grad for p in self._watch.names.parameters() if p.grad is not None)
            self._live.grad_keys = frozenset(key_of(grad) for grad in grads)

    def gradients_are_true(self) -> None:
        """They have been unscaled, or are about to be: who reads them now reads what he means."""
        if self._live is not None:
            self._live.grad_keys = frozenset()

    @contextmanager
    def gradients_may_be_read(self) -> Iterator[None]:
        """Who reads them inside knows that they are scaled."""
        live = self._live
        kept = live.grad_keys if live is not None else frozenset()
        self.gradients_are_true()
        try:
            yield
        finally:
            if live is not None:
                live.grad_keys = kept

    @contextmanager
    def paused(self) -> Iterator[None]:
        """What runs inside is neither the script's nor its model's."""
        live = self._live
        if live is not None:
            live.paused = True
        try:
            yield
        finally:
            if live is not None:
                live.paused = False

    def before_step(self, optimizer: Optimizer | None) -> None:
        """The step is whole; its gradients lie there."""
        watch = self._watch
        was_close = self._live is not None
        self.low_now = set()
        self._judge()
        if self._held is not None:
            self._held.before_step(watch.names)
        if was_close and torch.float16 in self.low and not watch.bad:
            self._underflow()
        telemetry = self._telemetry
        if telemetry is not None and not telemetry.has_weights:
            known = {id(p) for p in watch.names.parameters()}
            own = [p for group in optimizer.param_groups for p in group["params"]] if optimizer is not None else []
            own = [p for p in own if id(p) in known]  # an optimizer of masters has others
            telemetry.weights(own or watch.names.parameters(), watch.scaling.scale_now())

    def _underflow(self) -> None:
        """PA202: measured where the step can be done again, and else told from what is left."""
        watch = self._watch
        scale, lying = watch.scaling.scale_of_backward(), watch.scaling.scale_now()
        again = self._replay and len(watch.losses) == 1 and not watch.names.is_sharded
        found = underflows(watch, watch.losses[0], scale, lying) if again else None
        if found is None:
            told = flushed(watch, lying)
        else:
            told = findings(found, scale)
            rows = [asdict(one) for one in found]
            watch.recorder.write("underflow", step=watch.step, scale=scale, rows=rows)
        for finding in told:
            watch.tell(finding)

    def attempted(self, taken: bool) -> None:
        """The step was taken or skipped. What it changed is looked at later: masters may not be copied back yet."""
        self._sweep()
        if self._telemetry is not None:
            self._telemetry.close()
            self._done, self._telemetry, self._taken = self._telemetry, None, taken
        held, self._held = self._held, None
        if held is not None:
            held.after_step(self._watch.optimizers.values())
            self._watch.recorder.write("held", step=self._watch.step, rows=held.rows())
            if taken:
                self._between = Between()
                self._between.__enter__()

    def _stop_between(self) -> None:
        between, self._between = self._between, None
        if between is not None:
            between.stop()
            for finding in between.findings():
                self._watch.tell(finding)

    def close(self) -> None:
        """Look no more, and record what there is."""
        self._sweep()
        self._stop_between()
        self._judge()
        if self._telemetry is not None:
            self.attempted(taken=False)
        self.settle()
        self.settle()

    def give_up(self) -> None:
        """Look no more and judge nothing."""
        live, self._live = self._live, None
        between, self._between = self._between, None
        recomputed, self._recomputed = self._recomputed, None
        telemetry, self._telemetry = self._telemetry, None
        self._done = self._pending = None
        self._every = None
        if live is not None:
            live.paused = True
        self._left += [one for one in (between, live) if one is not None]
        self._sweep()
        for other in (recomputed, telemetry):
            if other is not None:
                other.close()

    def _sweep(self) -> None:
        """Take away modes that could not be when an error of ours came up inside of them."""
        for one in self._left:
            one.stop()

    def settle(self) -> None:
        """Record the counts that have arrived, and send those of the last step."""
        if self._pending is not None:
            self._watch.recorder.write("telemetry", **self._pending.facts())
            self._pending = None
        if self._done is not None:
            self._done.updates(self._taken)
            self._pending, self._done = self._done.send(), None
            if not self._pending.is_under_way:
                self.settle()

    def _judge(self) -> None:
        """Stop looking at operators, and say what they showed."""
        live, self._live = self._live, None
        if live is None:
            return
        watch = self._watch
        live.stop()
        if self._recomputed is not None:
            self._recomputed.close()
            for finding in self._recomputed.findings():
                watch.tell(finding)
            self._recomputed = None
        if live.reads:
            watch.tell(_read_while_scaled(live.reads[0], watch.scaling.scale or 1.0))
        for place, base in live.hooked[:1]:
            fix = (
                "scaler.unscale_(optimizer)\ntorch.nn.utils.clip_grad_value_(model.parameters(), ...)  # not in a hook"
            )
            watch.tell(clipped_scaled(f"a hook with {base}", live.backward_scale, place.own or (None, None), fix))
        for finding in live.findings():
            if self._replayed and finding.file is None:
                file, line = watch.tape.called_at(finding.module, watch.names.get)
                finding = replace(finding, file=file, line=line)
            watch.tell(finding)
        self._replayed = False
        self.low_now = set(live.products.trained_low)
        self.low |= self.low_now
        for finding in watch.asked.findings(live):
            watch.tell(finding)
        watch.recorder.write("audit", step=watch.step, **seen(live, watch.names))
        self._held = Held()


def _read_while_scaled(place: object, scale: float) -> Finding:
    return Finding(
        "PA106", "info",
        f"gradients are read, or changed, while they are still {scale:g} times too large",
        file=getattr(place, "file", None), line=getattr(place, "line", None), evidence={"scale": scale},
        fix="scaler.unscale_(optimizer)  # once, before this line",
    )  # fmt: skip
