"""preamp in timm's `train.py`, and in the scripts of MAE, DeiT and Swin, which use its scaler."""

from __future__ import annotations

from timm.utils import NativeScaler

from ..session import Session, SessionScaler


class PreampScaler(NativeScaler):
    """timm's `NativeScaler`, which scales, clips and steps by a session.

    >>> session = preamp.prepare(model, optimizer, level="O2")
    >>> loss_scaler = PreampScaler(session)
    >>> amp_autocast = session.autocast
    """

    def __init__(self, session: Session) -> None:
        self._scaler = SessionScaler(session)
