"""Which gradients lie there scaled, and which were unscaled since: told apart tensor by tensor.

One flag for all is not enough: two optimizers are unscaled one after the other, and a backward pass adds scaled
gradients onto whatever the last step left.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.weak import WeakTensorKeyDictionary

from ..report import Finding
from ._stack import Line


class Gradients:
    """Follows the gradients of optimizers from backward pass to step; holds none of them alive."""

    def __init__(self) -> None:
        self._scaled: Any = WeakTensorKeyDictionary()
        self._true: Any = WeakTensorKeyDictionary()
        """Unscaled in place, and not cleared since."""
        self._mixed: Any = WeakTensorKeyDictionary()
        """Scaled ones were added onto unscaled ones."""
        self._versions: Any = WeakTensorKeyDictionary()
        self._by_hand: Any = WeakTensorKeyDictionary()

    def before_backward(self, optimizers: Iterable[Optimizer]) -> None:
        """Remember what lies there. What was cleared in place since it was unscaled is as good as new."""
        lying = list(_gradients(optimizers))
        self._versions = WeakTensorKeyDictionary()
        for grad in lying:
            self._versions[grad] = grad._version
        kept = [grad for grad in lying if grad in self._true and grad.layout is torch.strided]
        for grad, some in zip(kept, _not_zero(kept), strict=True):
            if not some:
                del self._true[grad]
                self._mixed.pop(grad, None)

    def after_backward(self, optimizers: Iterable[Optimizer], by_scaler: bool, by_hand: float | None) -> None:
        """Gradients have arrived, with a scaler's scale on them, or with the script's own in front of the loss."""
        if not by_scaler and by_hand is None:
            return
        for grad in _gradients(optimizers):
            if self._versions.get(grad) == grad._version:
                continue  # no part of this backward pass
            if by_scaler:
                self._scaled[grad] = True
                if grad in self._true:
                    self._mixed[grad] = True
            if by_hand is not None:  # by how much the script multiplied the loss
                self._by_hand[grad] = grad._version, by_hand

    def unscaled(self, optimizer: Optimizer) -> None:
        """A scaler has divided an optimizer's gradients by its scale, in place."""
        for grad in _gradients([optimizer]):
            self._scaled.pop(grad, None)
            self._true[grad] = True

    def stepped(self, optimizer: Optimizer) -> None:
        """A scaler's step has used them, divided or not."""
        for grad in _gradients([optimizer]):
            self._scaled.pop(grad, None)
            self._mixed.pop(grad, None)

    @property
    def some_scaled(self) -> bool:
        """Whether any gradient at all is still scaled."""
        return len(self._scaled) > 0

    def any_scaled(self, parameters: Iterable[Tensor]) -> bool:
        """Whether one of their gradients is still scaled."""
        return any(p.grad is not None and p.grad in self._scaled for p in parameters)

    def all_true(self, parameters: Iterable[Tensor]) -> bool:
        """Whether their gradients were unscaled, all of them, and none grew since."""
        grads = [p.grad for p in parameters if p.grad is not None]
        return bool(grads) and all(g in self._true and g not in self._scaled for g in grads)

    def mixed(self, optimizer: Optimizer) -> int:
        """How many of an optimizer's gradients are a sum of scaled and unscaled ones."""
        return sum(grad in self._mixed for grad in _gradients([optimizer]))

    def scaled_by_hand(self, optimizer: Optimizer) -> float | None:
        """The script's own scale, where all gradients are as the backward pass left them: nobody took it off."""
        kept = [(grad, self._by_hand.get(grad)) for grad in _gradients([optimizer])]
        factors = {seen[1] for grad, seen in kept if seen is not None and seen[0] == grad._version}
        whole = bool(kept) and all(seen is not None and seen[0] == grad._version for grad, seen in kept)
        return factors.pop() if whole and len(factors) == 1 else None


def _gradients(optimizers: Iterable[Optimizer]) -> Iterable[Tensor]:
    return (p.grad for one in optimizers for group in one.param_groups for p in group["params"] if p.grad is not None)


def goes_back_in_half(loss: Tensor, limit: int = 4000) -> bool:
    """Whether any gradient of this loss is float16 on its way: a node gets one in the dtype of what it gave.

    Of a graph larger than `limit` nodes, those next to the loss are looked at.
    """
    seen: set[Any] = set()
    left = deque([loss.grad_fn])
    while left and len(seen) < limit:
        node = left.popleft()
        if node is None or node in seen:
            continue
        seen.add(node)
        if any(one.dtype is torch.float16 for one in node._input_metadata):
            return True
        left.extend(before for before, _ in node.next_functions)
    return False


def _not_zero(grads: list[Tensor]) -> list[bool]:
    """For each, whether anything in it is not zero: one wait for each device, seen by no mode."""
    if not grads:
        return []
    by_device: dict[torch.device, list[int]] = {}
    for index, grad in enumerate(grads):
        by_device.setdefault(grad.device, []).append(index)
    found = [False] * len(grads)
    with torch.no_grad(), _disable_current_modes():
        for indices in by_device.values():
            counts = torch.stack([grads[i].detach().count_nonzero() for i in indices]).tolist()
            for index, count in zip(indices, counts, strict=True):
                found[index] = bool(count)
    return found


def like_a_scale(factor: float) -> bool:
    """Whether a constant in front of a loss is taken for a loss scale: a power of two, 64 or more."""
    return factor >= 64 and math.frexp(factor)[0] == 0.5


APEX_CLIP = (
    "with amp.scale_loss(...) as scaled_loss: scaled_loss.backward()\n# and clip after this block, "
    "amp.master_params(optimizer)"
)


SESSION_BACKWARD = (
    "session.backward(loss)  # in place of loss.backward(): it multiplies by the loss scale\nsession.step()"
)
SCALED_SESSION = (
    "session = preamp.prepare(model, optimizer, level='O2')  # its scale is 'dynamic' unless told by scale="
)


def never_scaled(why: str, made: str | None, cure: str | None, place: Line) -> Finding:
    """PA107: float16 products, and no scale on the loss."""
    return Finding(
        "PA107", "warning",
        f"float16 gradients without a loss scale: {why}, so gradients below 6e-8 are flushed to zero",
        direction="backward", file=place[0], line=place[1],
        evidence={"compute dtype": "fp16", "scale": 1, "scaler made at": made},
        fix=cure or "scaler = torch.amp.GradScaler()\nscaler.scale(loss).backward()\n"
        "scaler.step(optimizer)\nscaler.update()\n# or bfloat16, which needs no scale",
    )  # fmt: skip


def clipped_scaled(name: str, scale: float | None, place: Line, fix: str | None) -> Finding:
    """PA106: clipping of gradients that still have a scale on them."""
    return Finding(
        "PA106", "error",
        f"{name} sees gradients that are still {scale:g} times too large: nearly every step is clipped, and to a "
        "length that changes with the scale",
        op=name, file=place[0], line=place[1], evidence={"scale": scale},
        fix=fix or "scaler.unscale_(optimizer)  # once, before this line",
    )  # fmt: skip


def updated_between(place: Line) -> Finding:
    """PA107: the scale changes between two steps that belong to one backward pass."""
    return Finding(
        "PA107", "error",
        "scaler.update() runs between two scaler.step() of one backward: the second optimizer is unscaled by another "
        "scale than was on its loss, and growth counts double",
        file=place[0], line=place[1],
        fix="scaler.step(first)\nscaler.step(second)\nscaler.update()  # once, after the last",
    )  # fmt: skip


def left_out(scale: float | None, optimizer: Optimizer, place: Line) -> Finding:
    """PA107: a step outside of the scaler that is on the loss."""
    return Finding(
        "PA107", "error",
        f"optimizer.step() takes gradients that are still {scale:g} times too large: the scaler is left out of the "
        "step",
        op=type(optimizer).__name__, file=place[0], line=place[1], evidence={"scale": scale},
        fix="scaler.step(optimizer)  # in place of optimizer.step()\nscaler.update()",
    )  # fmt: skip


def unguarded(optimizer: Optimizer, place: Line) -> Finding:
    """PA107: gradients that were unscaled and are not finite, stepped all the same."""
    return Finding(
        "PA107", "error",
        "optimizer.step() takes unscaled gradients that are not finite: scaler.step(optimizer) would have skipped this "
        "step",
        op=type(optimizer).__name__, file=place[0], line=place[1],
        fix="scaler.step(optimizer)  # in place of optimizer.step(), also after scaler.unscale_(optimizer)\n"
        "scaler.update()",
    )  # fmt: skip


def mixed_up(count: int, scale: float, optimizer: Optimizer, place: Line) -> Finding:
    """PA107: gradients that were unscaled were left lying, and a backward pass added scaled ones."""
    return Finding(
        "PA107", "error",
        f"{count} gradients are a sum of some that were unscaled before and some that are {scale:g} times too large: "
        "what scaler.unscale_() or scaler.step() had divided was not cleared before the next backward()",
        op=type(optimizer).__name__, file=place[0], line=place[1], evidence={"gradients": count, "scale": scale},
        fix="optimizer.zero_grad()  # after every step, taken or skipped\n"
        "# when accumulating: unscale_, clipping, scaler.step and scaler.update once, after the last backward()",
    )  # fmt: skip


def never_taken_off(factor: float, optimizer: Optimizer, place: Line) -> Finding:
    """PA107: the script's own scale is on the loss, and on the gradients that are stepped."""
    return Finding(
        "PA107", "warning",
        f"the loss was multiplied by {factor:g} before backward(), and optimizer.step() takes the gradients as they "
        "are: if that is a loss scale, nobody takes it off; if not, nothing protects float16 gradients below 6e-8",
        op=type(optimizer).__name__, file=place[0], line=place[1], evidence={"factor": factor},
        fix="scaler = torch.amp.GradScaler()  # instead of the constant\n"
        "scaler.scale(loss).backward()\nscaler.step(optimizer)\nscaler.update()",
    )  # fmt: skip
