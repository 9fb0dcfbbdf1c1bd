"""A loss scaler as plain numbers, which any `torch.load` reads, and back; Apex saved the object itself."""

from __future__ import annotations

from typing import Any

from ....errors import StateError, kind_of
from ..amp.scaler import LossScaler

FIELDS = {
    "loss_scale": "_loss_scale", "unskipped": "_unskipped", "dynamic": "dynamic", "scale_window": "_scale_seq_len",
    "min_loss_scale": "_min_loss_scale", "max_loss_scale": "_max_loss_scale",
}  # fmt: skip
"""Every field of `amp.scaler.LossScaler`, and the attribute it lies in, there and in Apex's."""


def state_of(scaler: LossScaler) -> dict[str, Any]:
    """Every field of a scaler."""
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
