"""Which losses and gradients are multiplied by a loss scale: gradients are tracked tensor by tensor.

One flag for all is not enough: two optimizers are unscaled one after the other, and a backward pass adds scaled
gradients onto whatever the last step left.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.weak import WeakTensorKeyDictionary

from ...autocast import nodes_behind
from ...policy import policy
from ...session import Session
from ..findings.events import LossNotScaled, StepBegins
from ..findings.pa107 import like_a_scale
from ..names import unwrapped
from ..places import called_by_preamp, users_line
from ..records import NOWHERE, Line
from ..replay.trials import Scaling, Trials
from .run import Run

_BY_HAND = 8
"""A constant in front of a loss that is no weight of a part of it."""
_NEAR = 8
"""Autograd's nodes behind a loss among which a scale is looked for: it may have been divided, or added to others."""
_KNOWN_OPTIMIZERS = ("torch", "preamp", "apex", "transformers")


class Scales:
    """What is known of loss scales in this run: the scale in use, what applied it, and where it still is."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self.gradients = Gradients()
        self.scale: float | None = None
        """The last one used."""
        self.are_used = False
        """Whether anything scaled a loss so far."""
        self.is_pending = False
        """Whether there are gradients that are still scaled."""
        self.of_backward = Scaling()
        """What was on the last backward pass, whatever happened to the gradients since."""
        self.highest = 1.0
        """The largest so far."""
        self._adapts = False
        """Whether the last one comes down where gradients overflow."""
        self.begins_at: Tensor | None = None
        """The loss that a session goes back from, in its `backward`."""
        self.is_library = False
        """Whether a scaler, a session or a function of torch's is at work on gradients."""
        self.sessions: weakref.WeakSet[Session] = weakref.WeakSet()
        """Sessions that were made, or called `backward`."""
        self.by_session = self.in_apex = False
        self._unscales_by_hand = False
        """Whether the script has divided scaled gradients by their scale, with operators of its own."""
        self.unscales_itself = False
        """Whether a session goes back whose losses have scales of their own: it leaves true gradients."""
        self.scaler_at = self.schedule_at = NOWHERE
        self.by_scaler = False
        """Whether a scaler of torch's has scaled a loss."""
        self.updated_at: Line | None = None
        """Where the scale was updated since the last backward pass."""
        self.updates = self.schedules = self.scalers = 0
        """Since the last attempt to step; the third: scalers of torch's that were made."""
        self._scaled_at = NOWHERE
        self._scaled: list[tuple[weakref.ref[Tensor], int, float]] = []
        """Losses with a scale on them, the number of autograd's node that made each, and the scale."""
        self.in_half = False
        """Whether the last loss of which that was asked went back through float16."""

    def trials(self, losses: list[Tensor], scale: float | None = None) -> Trials:
        """What does the step again that has gone back from these, with this scale on them or what is known of one."""
        scaling = self.of_backward if scale is None else self.of_backward._replace(scale=scale)
        return self._run.trials(None, losses, scaling, self.policy_with)

    def prepared(self) -> Iterator[tuple[Session, set[nn.Module]]]:
        """Each session, and the parts of its models."""
        for session in self.sessions:
            yield session, {part for model in session.models.values() for part in unwrapped(model).modules()}

    def policy_with(self, module: str | None) -> str | None:
        """The policy of the session that has prepared the module of this path, with the module in float32; None where
        no session has.
        """
        part = dict(self._run.names.items()).get(module or "") if module else None
        for session, own in self.prepared():
            if part in own:
                fields, *rules = str(session.policy).split("; ")
                path = str(module).rpartition(":")[2]
                return "; ".join((policy(fields).level or fields, *rules, f"{path} -> full"))
        return None

    def note(self, scaled: Tensor | None, scale: float, *, adapts: bool = True) -> None:
        """A loss with a scale on it; `adapts`: it comes down where gradients overflow."""
        self.are_used, self.scale, self._scaled_at = True, scale, users_line()
        self.highest, self._adapts = max(scale, self.highest), adapts
        if scaled is not None:
            number = -1 if scaled.grad_fn is None else scaled.grad_fn._sequence_nr()
            self._scaled = [*self._scaled[-8:], (weakref.ref(scaled), number, scale)]

    def noted(self, loss: Tensor) -> float | None:
        """The scale that a scaler put on this loss, or on what it is a share or a sum of; None where none was put."""
        near = {node._sequence_nr() for node in islice(nodes_behind(loss), _NEAR)} if self._scaled else set()
        return next((scale for ref, number, scale in self._scaled[::-1] if ref() is loss or number in near), None)

    def of(self, loss: Tensor) -> float:
        """The scale that is on a loss; 1 for one that was not scaled."""
        noted = self.noted(loss)
        if noted is not None:
            return noted
        return self.scale if self.by_session and self.is_library and self.scale else 1.0

    def seed_of(self, losses: list[Tensor]) -> float:
        """The gradient that a backward pass begins with: a session leaves most losses as they are, and scales that."""
        return self.of(losses[0]) if losses and self.begins_at is losses[0] else 1.0

    @property
    def on_gradients(self) -> float:
        """The scale on the gradients as they are stored now."""
        return self.scale if self.is_pending and self.scale else 1.0

    def on_losses(self, losses: list[Tensor]) -> tuple[float, bool]:
        """What is on the loss, and whether the script put it there itself."""
        if len(losses) != 1:
            return 1.0, False
        scale = self.of(losses[0])
        factor = self._run.tape.factor_on(losses[0]) if scale == 1 else None
        return (factor, True) if factor is not None and like_a_scale(factor) else (scale, False)

    def before_backward(self, losses: list[Tensor], looks: bool) -> None:
        """Whether float16 gradients will be made, and no scale is on the loss; `looks`: the step is looked at."""
        self.gradients.before_backward(self._run.optimizers)
        if not looks and self._run.step >= 3:
            return
        self.in_half = any(map(goes_back_in_half, losses))
        if not self.is_library and called_by_preamp():
            return  # it tries what torch can do, before the first step
        if self.in_half and not all(map(self._is_scaled, losses)):
            has_half = any(one.policy.compute is torch.float16 for one in self.sessions)
            at = self._run.backward_at
            half = any(p.dtype is torch.float16 for p in self._run.parameters())
            self._run.emit(LossNotScaled(self.scaler_at, self.are_used, self.by_session, has_half, at, half))

    def _is_scaled(self, loss: Tensor) -> bool:
        """Whether anybody put a scale on a loss. One that has come down to 1 is a scale all the same: PA203's."""
        if self.in_apex or self.noted(loss) is not None or (self.by_session and self.is_library and self.are_used):
            return True
        kept = self._run.names.models  # of a loss that no model made, nothing is
        return not kept or (self._run.tape.factor_on(loss) or 0) >= _BY_HAND

    def after_backward(self, losses: list[Tensor]) -> None:
        """Gradients have arrived."""
        self.updated_at = None
        scaled = any(self.of(loss) != 1 for loss in losses) or self.in_apex
        self.is_pending = scaled and not self.unscales_itself and not self._unscales_by_hand
        scale, highest = self.scale if scaled else None, self.highest if scaled and self._adapts else None
        self.of_backward = Scaling(1.0 if scale is None else scale, self.seed_of(losses) != 1, highest)
        by_scaler = any(self.noted(loss) not in (None, 1.0) for loss in losses)
        by_scaler &= not (self.in_apex or self.by_session or self._unscales_by_hand)
        is_own = len(losses) == 1 and not (self.by_session or self.in_apex or self.scaler_at[0])
        factor = self._run.tape.factor_on(losses[0]) if is_own else None
        by_hand = factor if like_a_scale(factor) else None
        self.gradients.after_backward(self._run.optimizers, by_scaler, by_hand)

    def unscaled_by_hand(self) -> None:
        """The script has divided gradients by their scale itself, as it will in the steps that are not looked at."""
        self._unscales_by_hand, self.is_pending = True, False
        self.gradients.scaled.clear()

    def mixed(self, optimizer: Optimizer) -> int:
        """How many gradients are a sum of scaled and unscaled ones; asked once."""
        count = sum(grad in self.gradients.mixed for grad in _gradients([optimizer]))
        if not count or not self.scale or self.scale == 1:
            return 0
        self.gradients.stepped(optimizer)
        return count

    def step_begins(self, optimizer: Optimizer, **facts: Any) -> None:
        """An optimizer is about to step with gradients that are not as they should be, if any of the facts is so."""
        if any(fact not in (None, False, 0) for fact in facts.values()):
            self._run.emit(StepBegins(type(optimizer).__name__, users_line(), self.scale or 1.0, **facts))

    def before_step(self, optimizer: Optimizer) -> None:
        """An optimizer is about to step, and no scaler takes that step."""
        if self.is_library or self.in_apex or self.by_session:
            return
        own = _gradients([optimizer])
        of_copies, self.is_pending = self.is_pending and not self.gradients.scaled, False
        is_scaled = of_copies or self.gradients.any_scaled(own)
        if is_scaled:
            self.gradients.stepped(optimizer)
        # an optimizer that is not well known may divide by it inside
        by_hand = self.in_half and not self.are_used and is_well_known(optimizer)
        self.step_begins(
            optimizer,
            is_again=self.gradients.were_used(own),
            is_scaled=is_scaled,
            is_unguarded=bool(self._run.bad and self.scaler_at[0]) and self.gradients.all_true(own),
            mixed=self.mixed(optimizer),
            factor=self.gradients.scaled_by_hand(optimizer) if by_hand else None,
        )

    def are_still_scaled(self, parameters: list[Tensor]) -> bool:
        """Whether gradients that are about to be clipped still are scaled."""
        if self.is_library:
            return False
        own = [p.grad for p in parameters if p.grad is not None]
        if self.in_apex or self.by_session:
            return self.is_pending
        return self.gradients.any_scaled(own) or (self.is_pending and not self.gradients.all_true(own))

    def since_last(self) -> dict[str, Any]:
        """For the record: what happened since the last attempt to step."""
        facts = {name: getattr(self, name) for name in ("schedules", "updates", "scalers", "schedule_at")}
        facts["loss_at"] = self._scaled_at
        self.schedules = self.updates = self.scalers = 0
        return facts


def is_well_known(optimizer: Optimizer) -> bool:
    """Whether it is torch's, preamp's or Apex's: which keep state in their parameters' dtype."""
    return type(optimizer).__module__.partition(".")[0] in _KNOWN_OPTIMIZERS


class Gradients:
    """Follows the gradients of optimizers from backward pass to step; holds none of them alive."""

    def __init__(self) -> None:
        self.scaled: Any = WeakTensorKeyDictionary()
        self._true: Any = WeakTensorKeyDictionary()
        """Unscaled in place, and not cleared since."""
        self.mixed: Any = WeakTensorKeyDictionary()
        """Scaled ones were added onto unscaled ones."""
        self._versions: Any = WeakTensorKeyDictionary()
        self._used: Any = WeakTensorKeyDictionary()
        """Versions of those that a scaler has stepped with, or skipped."""
        self._by_hand: Any = WeakTensorKeyDictionary()

    def before_backward(self, optimizers: Iterable[Optimizer]) -> None:
        """Remember versions. Gradients that were cleared in place since they were unscaled count as new."""
        there = _gradients(optimizers)
        self._versions = WeakTensorKeyDictionary()
        for grad in there:
            self._versions[grad] = grad._version
        kept = [grad for grad in there if grad in self._true and grad.layout is torch.strided]
        for grad, some in zip(kept, _not_zero(kept), strict=True):
            if not some:
                del self._true[grad]
                self.mixed.pop(grad, None)

    def after_backward(self, optimizers: Iterable[Optimizer], by_scaler: bool, by_hand: float | None) -> None:
        """Gradients have arrived, with a scaler's scale on them, or with the script's own in front of the loss."""
        if not by_scaler and by_hand is None:
            return
        for grad in _gradients(optimizers):
            if self._versions.get(grad) == grad._version:
                continue  # no part of this backward pass
            if by_scaler:
                self.scaled[grad] = True
                if grad in self._true:
                    self.mixed[grad] = True
            if by_hand is not None:  # by how much the script multiplied the loss
                self._by_hand[grad] = grad._version, by_hand

    def unscaled(self, optimizer: Optimizer) -> None:
        """A scaler has divided an optimizer's gradients by its scale, in place."""
        for grad in _gradients([optimizer]):
            self.scaled.pop(grad, None)
            self._true[grad] = True

    def stepped(self, optimizer: Optimizer, *, by_scaler: bool = False) -> None:
        """A step has used them, divided or not."""
        for grad in _gradients([optimizer]):
            if by_scaler:
                self._used[grad] = grad._version
            self.scaled.pop(grad, None)
            self.mixed.pop(grad, None)

    def any_scaled(self, grads: list[Tensor]) -> bool:
        """Whether one of these is still scaled."""
        return any(grad in self.scaled for grad in grads)

    def were_used(self, grads: list[Tensor]) -> bool:
        """Whether a scaler's step had just these, and nothing has changed them since."""
        return bool(grads) and all(self._used.get(grad) == grad._version for grad in grads)

    def all_true(self, grads: list[Tensor]) -> bool:
        """Whether these were unscaled, all of them, and none grew since."""
        return bool(grads) and all(grad in self._true and grad not in self.scaled for grad in grads)

    def scaled_by_hand(self, optimizer: Optimizer) -> float | None:
        """The script's own scale, where all gradients are as the backward pass left them: it was not taken off."""
        seen = [(grad._version, self._by_hand.get(grad, (None, None))) for grad in _gradients([optimizer])]
        factors = {factor if version == now else None for now, (version, factor) in seen}
        return factors.pop() if len(factors) == 1 else None


def _gradients(optimizers: Iterable[Optimizer]) -> list[Tensor]:
    return [p.grad for one in optimizers for group in one.param_groups for p in group["params"] if p.grad is not None]


def goes_back_in_half(loss: Tensor, limit: int = 4000) -> bool:
    """Whether any gradient of this loss is float16 on its way: a node gets one in the dtype of what it gave.

    Of a graph larger than `limit` nodes, those next to the loss are read.
    """
    nodes = islice(nodes_behind(loss), limit)
    return any(one.dtype is torch.float16 for node in nodes for one in node._input_metadata)


def _not_zero(grads: list[Tensor]) -> list[bool]:
    """For each, whether anything in it is not zero; by one host sync, and unseen by dispatch modes."""
    with torch.no_grad(), _disable_current_modes():
        counts = [grad.detach().count_nonzero().to(grads[0].device) for grad in grads]
        return torch.stack(counts).bool().tolist() if counts else []
