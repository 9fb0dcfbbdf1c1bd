"""The loss scale of one loss, the way from scaled gradients to true ones, and its state in a checkpoint."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from ...errors import StateError, kind_of
from ...kernels import check_and_unscale_

_Override = tuple[float, float, float]


class LossScaler:
    """A static or dynamic loss scale.

    `loss_scale`: "dynamic" or a number. A dynamic scale starts at `init_scale` or `max_loss_scale`, whichever is less;
    it is halved, not below `min_loss_scale`, when a gradient is not finite, and doubled, not above `max_loss_scale`,
    after `scale_window` clean updates. A static one is never checked and never changes. `scale_factor` is accepted and,
    as in Apex, without effect: both factors are 2. `_overflow_buf`, an integer tensor of one entry on the gradients'
    device, is what `update_scale` reads; scripts that reduce gradients by themselves put one of their own there.
    """

    warned_no_fused_kernel = False
    warned_unscaling_non_fp32_grad = False
    has_fused_kernel = True

    def __init__(
        self,
        loss_scale: float | str,
        init_scale: float = 2.0**16,
        scale_factor: float = 2.0,
        scale_window: int = 2000,
        min_loss_scale: float | None = None,
        max_loss_scale: float = 2.0**24,
    ) -> None:
        self.dynamic = loss_scale == "dynamic"
        self._loss_scale = float(min(max_loss_scale, init_scale)) if self.dynamic else float(loss_scale)
        self._max_loss_scale = max_loss_scale
        self._min_loss_scale = min_loss_scale
        self._scale_seq_len = scale_window
        self._unskipped = 0
        self._has_overflow = False
        self._overflow_buf = torch.zeros(1, dtype=torch.int32)

    def loss_scale(self) -> float:
        """The scale as it stands."""
        return self._loss_scale

    def clear_overflow_state(self) -> None:
        """Forget what the last gradients were like."""
        self._has_overflow = False
        self._overflow_buf.zero_()

    def unscale(
        self,
        model_grads: Iterable[Tensor],
        master_grads: Iterable[Tensor],
        unused_scale: float | None = None,
        models_are_masters: bool = False,
        scale_override: float | _Override | None = None,
    ) -> None:
        """Write `model_grads / scale` into `master_grads`, and note when a dynamic scale overflowed.

        Gradients: any floating dtype, pairwise of one shape; they may be the same tensors. The flag stays on the
        device until `update_scale`.
        """
        scale, _, out = self._scales(scale_override)
        model, master = list(model_grads), list(master_grads)
        if scale == out and models_are_masters and not self.dynamic:
            return
        pairs = [(g, m) for g, m in zip(model, master, strict=True) if g is not m]
        if pairs:
            torch._foreach_copy_([m for _, m in pairs], [g for g, _ in pairs])
        self._scale_(master, out / scale)

    def unscale_with_stashed(
        self,
        model_grads: Iterable[Tensor],
        stashed_master_grads: Iterable[Tensor],
        master_grads: Iterable[Tensor],
        scale_override: _Override | None = None,
    ) -> None:
        """Write `model_grads / scale + stashed_master_grads` into `master_grads`; only the first are checked.

        `master_grads` may be either of the others' tensors. All three: of one length, pairwise of one shape.
        """
        scale, stashed_scale, out = self._scales(scale_override)
        model, master = list(model_grads), list(master_grads)
        same = stashed_scale == out
        stashed = [kept if same else kept / stashed_scale * out for kept in stashed_master_grads]
        new = [
            torch.empty_like(m, dtype=torch.promote_types(g.dtype, m.dtype)).copy_(g)
            for g, m in zip(model, master, strict=True)
        ]
        self._scale_(new, out / scale)
        if new:
            torch._foreach_add_(new, [kept.to(added.dtype) for kept, added in zip(stashed, new, strict=True)])
            torch._foreach_copy_(master, new)

    def update_scale(self) -> bool:
        """Move a dynamic scale by what the gradients were like; True if the step must be skipped.

        This is where the host waits for the device, once for each update.
        """
        if self.dynamic and not self._has_overflow:
            self._has_overflow = bool(self._overflow_buf.item())
        if self._has_overflow and self.dynamic:
            self._unskipped = 0
            lowered = self._loss_scale / 2.0
            self._loss_scale = max(self._min_loss_scale, lowered) if self._min_loss_scale else lowered
            return True
        self._unskipped += 1
        if self.dynamic and self._unskipped >= self._scale_seq_len:
            self._loss_scale = min(self._max_loss_scale, self._loss_scale * 2.0)
            self._unskipped = 0
        return False

    def _scales(self, override: float | _Override | None) -> _Override:
        """(scale on the gradients, scale on the stashed ones, scale wanted)."""
        if override is None:
            return self._loss_scale, 1.0, 1.0
        return override if isinstance(override, tuple) else (override, 1.0, 1.0)

    def _scale_(self, gradients: list[Tensor], factor: float) -> None:
        if not gradients:
            return
        inverse = torch.full((), factor, dtype=torch.float32, device=gradients[0].device)
        found = check_and_unscale_(gradients, inverse)
        if self.dynamic:
            self._flag(found)

    def _flag(self, found: Tensor) -> None:
        """Note on the device whether `found`, 0-d, is above 0."""
        if self._overflow_buf.device != found.device:  # only what goes to the host has to be waited for
            self._overflow_buf = self._overflow_buf.to(found.device, non_blocking=found.device.type != "cpu")
        self._overflow_buf.masked_fill_(found > 0, 1)


FIELDS = {
    "loss_scale": "_loss_scale", "unskipped": "_unskipped", "dynamic": "dynamic", "scale_window": "_scale_seq_len",
    "min_loss_scale": "_min_loss_scale", "max_loss_scale": "_max_loss_scale",
}  # fmt: skip
"""Every field of a `LossScaler`, and the attribute it lies in, here and in Apex's."""


def state_of(scaler: LossScaler) -> dict[str, Any]:
    """Every field of a scaler as plain numbers, which any `torch.load` reads; Apex saved the object itself."""
    return {name: getattr(scaler, attribute) for name, attribute in FIELDS.items()}


def scaler_of(saved: Any) -> LossScaler:
    """A scaler as it was saved: from `state_of`, or from an object of Apex's with the same attributes.

    The scalers of `fp16_utils.loss_scaler`, which older checkpoints hold, have `cur_scale` only. `StateError` if
    there is no scale to be found.
    """
    if isinstance(saved, dict):
        fields = dict(saved)
    else:
        fields = {name: getattr(saved, own) for name, own in FIELDS.items() if hasattr(saved, own)}
        if "loss_scale" not in fields and hasattr(saved, "cur_scale"):
            fields = {"loss_scale": saved.cur_scale, "dynamic": hasattr(saved, "scale_window")}
            if fields["dynamic"]:
                fields["scale_window"] = saved.scale_window
    if "loss_scale" not in fields:
        raise StateError(
            f"state_dict['loss_scaler'] is {kind_of(saved)} without a loss scale, so gradients would be "
            "divided by the wrong number: pass what FP16_Optimizer.state_dict() returned"
        )
    scaler = LossScaler("dynamic" if fields.get("dynamic") else fields["loss_scale"])
    for name, attribute in FIELDS.items():
        if name in fields:
            setattr(scaler, attribute, fields[name])
    return scaler
