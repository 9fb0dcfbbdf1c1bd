"""The order of a session's calls: backward passes, clipping, steps. What would do harm in another order is refused."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain, combinations
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from ..errors import PreampWarning, SessionError
from ..kernels import multiply_, present_in
from ..ledger import Gradients, Masters, gradients_of, is_marked, mark, parameters_of
from ..scaling import LossScale
from ..sharding import agreed
from ._losses import Losses, PendingScales
from ._others import OtherLeaves
from ._regions import FullPrecision
from ._released import Released, weakly
from ._report import StepReport

LOOKED_AT = 16
"""Parameters of an optimizer whose gradients are looked at as they come."""


class CallOrder:
    """Checks calls before they do anything, and notices backward passes that are not the session's.

    For that it hooks some parameters of each optimizer: hooks on a thousand would take as long as the backward pass of
    a small model. A pass that reaches none of the hooked ones goes unnoticed.
    """

    def __init__(
        self, optimizers: Mapping[str, Optimizer], gradients: Gradients, masters: Masters, losses: Losses,
        pending: PendingScales, full: FullPrecision, others: OtherLeaves, group: Any, is_stage: bool,
    ) -> None:  # fmt: skip
        self._optimizers, self._gradients, self._masters = list(optimizers.values()), gradients, masters
        self._losses, self._pending, self._full, self._group = losses, pending, full, group
        self._others, self._is_stage = others, is_stage
        self.shares, self._counted = False, 0  # whether optimizers have parameters in common, and how many in all
        self._scaled_by_hand = False
        """Whether the session has given out a scaled loss, so that any backward pass may be that of such a one."""
        self.ours = 0
        """How many of the session's backward passes are running."""
        self._seen: dict[Optimizer, list[Parameter]] = {}
        self._scale = torch.ones((), device="cpu")  # of the last step
        self._hooks: list[Any] = []
        self._looks, self.changed = 0 if losses.separate_scales else 8, False
        """In how many more steps changes of scaled gradients are looked for, and whether the last one had some."""
        for optimizer in self._optimizers if losses.scaled and not is_stage else ():
            some = self._seen[optimizer] = _some(p for p in parameters_of(optimizer) if p.is_leaf and p.requires_grad)
            self._look_at(some, CallOrder._gradient_came, optimizer)
        if not self._optimizers:
            self._look_at(_some(p for p in masters if p.requires_grad), CallOrder._nobody_steps)

    def _look_at(self, parameters: list[Parameter], method: Callable[..., None], *args: Any) -> None:
        came = weakly(method, self, *args)
        self._hooks += [parameter.register_post_accumulate_grad_hook(came) for parameter in parameters]

    def close(self) -> None:
        """Notice nothing more."""
        for hook in self._hooks:
            hook.remove()

    # -- backward

    def _find_common(self) -> None:
        """Look for parameters that optimizers have in common, where there are more than at the last look."""
        groups = [group["params"] for optimizer in self._optimizers for group in optimizer.param_groups]
        if (count := sum(map(len, groups))) != self._counted:
            self._counted, self.shares = count, len(set(chain.from_iterable(groups))) < count
        if self.shares and self._losses.separate_scales:
            raise SessionError(
                "add_param_group() has given an optimizer parameters that another one has, whose gradients would be "
                "those of two losses with scales of their own: give them to one optimizer"
            )

    def check_backward(self) -> None:
        """Check before a backward pass that somebody steps its gradients, and that they fit those that are there."""
        if len(self._optimizers) > 1:
            self._find_common()
        if not self._optimizers and (self._losses.scaled or len(self._masters)):
            self._nobody_steps()
        if self._gradients.stepping is not None and (self._losses.scaled or len(self._masters)):
            raise SessionError("backward() in a hook of a step would add to the gradients that it takes: call it after")
        if self._full.depth and self._full.closed_over and self._losses.scaled:
            raise SessionError(
                "backward() by the session inside full_precision(), where an optimizer steps by itself with a closure: "
                "it would take gradients that are multiplied by the loss scale. Write loss.backward() in its place"
            )
        for parameter in () if self._full.depth else chain.from_iterable(self._seen.values()):
            if parameter.grad is not None and is_marked(parameter.grad, "_preamp_plain"):
                raise SessionError(
                    "there are gradients of a loss.backward() that is not the session's, and those of "
                    "session.backward() are multiplied by the loss scale: added to them the former would vanish when "
                    "they are unscaled. Write session.backward(loss) for each loss, or clear gradients in between"
                )

    def _nobody_steps(self, parameter: Parameter | None = None) -> None:
        """Refuse a backward pass whose gradients no optimizer steps; `parameter`: one that has got a gradient."""
        if parameter is not None and self._full.depth:
            return
        scaled = self._losses.scaled and parameter is None
        why = "are multiplied by the loss scale" if scaled else "belong to 16-bit copies of float32 masters"
        raise SessionError(
            f"backward() in a session that was prepared without an optimizer: the gradients {why}, and an "
            "optimizer of your own would step them as they are. Give prepare() the optimizer and write "
            "session.step(); for gradients of inputs, session.grad(loss, x)"
        )

    def scaled(self, loss: Tensor) -> Tensor:
        """Prepare a scaled loss that the session gives out: as its backward pass begins, gradients are to rest."""
        self._scaled_by_hand = True
        if loss.requires_grad and self._losses.scaled:
            loss.register_hook(self._scaled_goes_back)
        return loss

    def _scaled_goes_back(self, _: Tensor) -> None:
        if not self._full.depth:
            self._gradients.rest()
        self._others.mark_after_this(self.came)

    def came(self) -> None:
        """Note the versions of some gradients as a scaled backward pass has left them, in the first steps."""
        if self._looks:
            mark([parameter.grad for parameter in chain.from_iterable(self._seen.values())], "_preamp_came")

    def _gradient_came(self, optimizer: Optimizer, parameter: Parameter) -> None:
        if self._scaled_by_hand or self._full.depth or parameter.grad is None or self._gradients.is_true(optimizer):
            return
        if self._pending.running:
            raise SessionError(
                "a loss.backward() after session.backward() has added gradients to those that are multiplied by "
                "the loss scale, which these are not: they would vanish when they are unscaled. Write "
                "session.backward(loss) for each loss, or session.unscale_() before it"
            )
        mark([parameter.grad], "_preamp_plain")

    # -- between backward and step

    def check_full(self, call: str) -> None:
        """Refuse a call in full precision that is meant for gradients which that has put aside."""
        if self._full.depth and self._full.waiting:
            raise SessionError(
                f"{call} inside full_precision(), which has put the gradients from before it aside: call it outside"
            )

    def check_apart(self, call: str, chosen: Sequence[Optimizer]) -> None:
        """Check that gradients of parameters that optimizers have in common are unscaled, clipped, stepped by one."""
        if not self.shares:
            return
        apart = self._losses.scaled or self._masters.wanted  # else optimizers may step in turn what one has clipped
        found = {each: None for each in self._optimizers if each in chosen or (apart and self._gradients.is_true(each))}
        for one, two in combinations(found, 2):
            if not set(parameters_of(one)).isdisjoint(parameters_of(two)) and (apart or "clip" in call):
                raise SessionError(
                    f"{call}: {type(one).__name__} and {type(two).__name__} have parameters in common, whose gradients "
                    "would be changed once for each. Call it for one of them, optimizer=..., and step that one before "
                    "the next backward pass, which is for the other"
                )

    def check_clip(self, name: str, chosen: Sequence[Optimizer]) -> None:
        """Check that there are gradients to clip: from a backward pass to the step."""
        self.check_full(f"{name}()")
        self._looks, self.changed = 0, False  # clipping is the session's, which may change gradients before the step
        self.check_apart(f"{name}()", chosen)
        if self._is_stage or self._gradients.carried:
            due = True
        elif self._losses.scaled:
            due = bool(self._pending.names) and not all(map(self._pending.has_stepped, chosen))
        else:
            due = self._pending.running or any(map(self._gradients.is_due, chosen))
        if not due:
            raise SessionError(
                f"{name}() finds no gradient that a step is due for, and would change nothing: call it after "
                "session.backward(loss) and before session.step()"
            )

    # -- step

    def check_step(self, chosen: Sequence[Optimizer], steps: int) -> list[str]:
        """Check a step of some optimizers; returns the losses whose gradients it applies. `steps`: made before."""
        self.check_full("step()")
        if len(self._optimizers) > 1:
            self._find_common()
            self.check_apart("step()", chosen)
        losses, pending = self._losses, self._pending
        if self.ours and losses.scaled:
            self._check_all_came(chosen)
        ran = pending.names
        if self._is_stage and not losses.separate_scales:
            if not steps:
                self._check_scaled_somewhere(ran)
            ran = ran or pending.all_ran()  # and were scaled where they were computed
        if not ran and not losses.scaled and any(map(self._gradients.is_due, self._optimizers)):
            ran = pending.all_ran()  # by loss.backward(), which is right without a scale
        if not ran:
            since = " since the last step" if steps else ""
            why = (
                ", or after zero_grad(): there is nothing to step, for gradients of a loss.backward() of your own are "
                "not multiplied by the loss scale, and would vanish as they are unscaled. Write session.backward(loss) "
                "before each session.step(); in a framework's loop its own call, as Lightning's manual_backward(loss) "
                "and Accelerate's accelerator.backward(loss). For gradients that are made by hand, make them of "
                "session.scale(loss)"
                if losses.scaled
                else ", and no gradient has come since: it would change nothing, or repeat a step. Run "
                "session.backward(loss) before each session.step()"
            )
            raise SessionError(f"step() without session.backward(){since}{why}")
        once = losses.scaled and not losses.separate_scales and not self._is_stage
        again = [each for each in chosen if pending.has_stepped(each)] if once else []
        if again:
            raise SessionError(
                f"step() of this {type(again[0]).__name__} a second time after one session.backward(): its gradients "
                "are unscaled already, and would be once more. Step each optimizer once for each backward pass"
            )
        if once and self.shares and any(is_marked(g, "_preamp_stepped") for o in chosen for g in gradients_of(o)):
            raise SessionError(
                f"step() of {type(chosen[0]).__name__} takes gradients that another optimizer has stepped by, and that "
                "are unscaled already: run session.backward(loss) for each of them, and clear gradients in between"
            )
        if self._looks:
            self._looks -= 1
            scaled = [each for each in chosen if not self._gradients.is_true(each)]
            some = [p.grad for each in scaled for p in self._seen.get(each, ()) if p.grad is not None]
            self.changed = self._looks > 0 and any(getattr(g, "_preamp_came", g._version) != g._version for g in some)
        return ran

    def tell_of_clipping(self, report: StepReport) -> None:
        """Warn if gradients were changed by hand while they were scaled, and are as small as clipped true ones."""
        capturing = torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
        if capturing or report.scale < 256 or not report.scale * report.grad_norm <= 100:  # not finite, perhaps
            return
        self._looks, self.changed = 0, False
        norm = f"the true ones have the norm {report.grad_norm:.2g}" if report.grad_norm else "all of them are 0 now"
        warnings.warn(
            f"gradients were changed after backward, while they were multiplied by the loss scale {report.scale:g}: "
            f"{norm}, and the step was taken. To clip, write session.clip_grad_norm_(max_norm). "
            "For any other change call session.unscale_() first, or scaler.unscale_(optimizer)",
            PreampWarning,
            stacklevel=3,
        )

    def _check_all_came(self, chosen: Sequence[Optimizer]) -> None:
        """Check, in a step that a hook makes during backward, that the optimizer has all of its gradients."""
        for each in chosen:
            late = sum(p.requires_grad and p.grad is None for p in parameters_of(each))
            if late:
                raise SessionError(
                    f"step() inside of session.backward(), where {late} parameters of {type(each).__name__} have no "
                    "gradient yet: with a loss scale a step takes all gradients of an optimizer at once. Nothing has "
                    "been stepped: write session.step() after the backward pass, or give each parameter an optimizer "
                    "of its own"
                )

    def check_gradients(self, parameters: Sequence[Parameter]) -> None:
        """Check that a step after a scaled backward pass has gradients; a stage of a pipeline may have none."""
        if parameters or self._is_stage or not self._losses.scaled:
            return
        raise SessionError(
            "step() finds no gradient, and would change nothing: they were cleared after session.backward(), or the "
            "loss reaches no parameter of the optimizer. Clear gradients after session.step(), or before the forward "
            "pass. An optimizer whose parameters had no part in this loss need not be stepped: leave it out, "
            "session.step(optimizer) of the others"
        )

    def stepped(self, chosen: Sequence[Optimizer], scale: Tensor) -> None:
        """Mark gradients as used by a step, under this loss scale."""
        for each in chosen:
            some = [parameter.grad for parameter in self._seen.get(each, ()) if not self.shares]
            mark(some or gradients_of(each)[: None if self.shares else 1], "_preamp_stepped")
        self._scale = scale

    def before_pass(self, loss: Tensor, scale: LossScale) -> None:
        """Have gradients that a step has used, and nobody has cleared, be clipped as there, and get a pass's scale."""
        if self._losses.scaled:
            self._others.find(loss)
        for each in {**self._seen, **self._gradients.clipped}:
            some = (not self.shares and self._seen.get(each)) or list(parameters_of(each))
            kept = [p for p in some if p.grad is not None and is_marked(p.grad, "_preamp_stepped")]
            if kept and each in self._gradients.clipped:
                self._gradients.shrink(self._gradients.clipped.pop(each))
            if kept and each in self._seen and not self._losses.separate_scales:
                now, every = scale.current(self._gradients.device), kept if self.shares else list(parameters_of(each))
                multiply_(present_in([p for p in every if p not in self._masters])[1], now)
                multiply_(present_in(self._masters.among(every))[1], now / self._scale)  # no step unscales them

    def _check_scaled_somewhere(self, ran: Sequence[str]) -> None:
        """Check before the first step that some stage has scaled its loss; a host sync."""
        device = self._gradients.device
        scales = any(self._losses[name].inverse(device) is not None for name in self._losses)
        if scales and not bool(agreed(torch.tensor(float(len(ran)), device=device), self._group, largest=True)):
            raise SessionError(
                "no stage of the group has scaled its loss, and gradients that are not scaled would vanish when they "
                "are unscaled. Where the loss is computed, write session.backward(loss), or have the schedule's "
                "loss_fn return session.scale(loss)"
            )


class BackwardPass:
    """A backward pass of a session, while it runs. One that fails is not recorded, as its gradients are not whole."""

    def __init__(self, order: CallOrder, name: str, released: Released | None) -> None:
        self._order, self._name, self._released = order, name, released
        self._stepped = 0 if released is None else len(released)

    def __enter__(self) -> None:
        order = self._order
        order.ours += 1
        self._first = order._pending.ran(self._name)
        self._before = order._others.gradients() if order._losses.scaled else []

    def __exit__(self, failed: type[BaseException] | None, *_: object) -> None:
        order = self._order
        order.ours -= 1
        if self._before:
            order._others.mark(self._before)
        if order._looks:
            order.came()
        if failed is not None and self._first:
            order._pending.forget(self._name)
        if failed is not None and self._released is not None:
            self._released.forget(self._stepped)


def _some(parameters: Iterable[Parameter]) -> list[Parameter]:
    """Up to seventeen of them, evenly spread, the first and the last among them."""
    every = list(parameters)
    return every[:: max(1, len(every) // LOOKED_AT)][:LOOKED_AT] + every[LOOKED_AT:][-1:]
