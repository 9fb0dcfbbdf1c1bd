"""The loss scale of one loss, the way from scaled gradients to true ones, and its state in a checkpoint."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from ...kernels import check_and_unscale_


class LossScaler:
    """A static or dynamic loss scale.

    `loss_scale`: "dynamic" or a number. A dynamic scale starts at `init_scale` or `max_loss_scale`, whichever is less;
    it is halved, not below `min_loss_scale`, when a gradient is not finite, and doubled, not above `max_loss_scale`,
    after `scale_window` clean updates. A static one is never checked and never changes. `scale_factor` is accepted and,
    as in Apex, without effect: both factors are 2. `_overflow_buf`, an integer tensor of one entry on the gradients'
    device, is what `update_scale` reads; scripts that reduce gradients by themselves put one of their own there.
    """

    has_fused_kernel = True

    def __init__(
        self, loss_scale: float | str, init_scale: float = 2.0**16, scale_factor: float = 2.0,
        scale_window: int = 2000, min_loss_scale: float | None = None, max_loss_scale: float = 2.0**24,
    ) -> None:  # fmt: skip
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
        self, model_grads: Iterable[Tensor], master_grads: Iterable[Tensor], unused_scale: float | None = None,
        models_are_masters: bool = False, scale_override: float | None = None,
    ) -> None:  # fmt: skip
        """Write `model_grads / scale` into `master_grads`, and note when a dynamic scale overflowed.

        Gradients: any floating dtype, pairwise of one shape; they may be the same tensors. The flag stays on the
        device until `update_scale`. `scale_override`: the scale that they have, if not the present one.
        """
        scale = self._loss_scale if scale_override is None else scale_override
        model, master = list(model_grads), list(master_grads)
        if not master or (scale == 1.0 and models_are_masters and not self.dynamic):
            return
        pairs = [(g, m) for g, m in zip(model, master, strict=True) if g is not m]
        if pairs:
            torch._foreach_copy_([m for _, m in pairs], [g for g, _ in pairs])
        found = check_and_unscale_(master, torch.full((), 1.0 / scale, dtype=torch.float32, device=master[0].device))
        if self.dynamic:
            if self._overflow_buf.device != found.device:  # only what goes to the host has to be waited for
                self._overflow_buf = self._overflow_buf.to(found.device, non_blocking=found.device.type != "cpu")
            self._overflow_buf.masked_fill_(found > 0, 1)

    def unscale_with_stashed(
        self, model_grads: Iterable[Tensor], stashed_master_grads: Iterable[Tensor], master_grads: Iterable[Tensor],
        scale_override: tuple[float, float, float] | None = None,
    ) -> None:  # fmt: skip
        """Write `model_grads / scale + stashed_master_grads` into `master_grads`; only the former are judged.

        `scale_override`: the scales of the two and of the sum, if not the present one, 1 and 1.
        """
        have, stashed_have, wanted = scale_override or (self._loss_scale, 1.0, 1.0)
        kept = [gradient * (wanted / stashed_have) for gradient in stashed_master_grads]
        self.unscale(model_grads, master := list(master_grads), scale_override=have / wanted)
        if kept:
            torch._foreach_add_(master, kept)

    def update_scale(self) -> bool:
        """Move a dynamic scale by what the gradients were like; True if the step must be skipped.

        This is where the host waits for the device, once for each update.
        """
        if self.dynamic and not self._has_overflow:
            self._has_overflow = bool(self._overflow_buf.item())
        if self._has_overflow and self.dynamic:
            self._unskipped = 0
            self._loss_scale = max(self._loss_scale / 2.0, self._min_loss_scale or 0.0)
            return True
        self._unskipped += 1
        if self.dynamic and self._unskipped >= self._scale_seq_len:
            self._loss_scale = min(self._max_loss_scale, self._loss_scale * 2.0)
            self._unskipped = 0
        return False


def state_of(scaler: LossScaler) -> dict[str, Any]:
    """The attributes of a scaler, all plain numbers, which any `torch.load` reads; Apex saved the object itself."""
    return {name: value for name, value in vars(scaler).items() if not isinstance(value, Tensor)}


def scaler_of(saved: Any) -> LossScaler:
    """A scaler as it was saved: from `state_of`, or from an object of Apex's, whose attributes have the same names.

    The scalers of `fp16_utils.loss_scaler`, which older checkpoints hold, have `cur_scale` only. KeyError if there is
    no scale to be found.
    """
    fields = dict(saved if isinstance(saved, dict) else vars(saved))
    if "cur_scale" in fields:
        window = fields.get("scale_window")
        fields = {"_loss_scale": fields["cur_scale"], "dynamic": window is not None, "_scale_seq_len": window or 2000}
    scaler = LossScaler("dynamic" if fields.get("dynamic") else fields["_loss_scale"])
    vars(scaler).update({name: fields[name] for name in state_of(scaler) if name in fields})
    return scaler
