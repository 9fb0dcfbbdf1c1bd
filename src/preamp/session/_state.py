"""What a state must be before a session takes it: all of it is looked at before any of it is loaded."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..errors import PreampError, StateError, kind_of
from ._checks import check_state
from ._losses import Losses


def check_whole(state: Any, policy: str, losses: Losses) -> None:
    """`StateError` (or `ScaleError`) unless every part but the masters' names and shapes fits; changes nothing.

    Those two are the masters' own to check, which they do before they take one.
    """
    if not isinstance(state, Mapping):
        raise StateError(f"a session's state is a dict, what state_dict() gave; this is {kind_of(state)}")
    kinds = {"version": int, "policy": str}
    odd = [name for name in state if not isinstance(state[name], kinds.get(name, object)) or not isinstance(name, str)]
    if odd:
        raise StateError(f"not a session's state: {odd[0]!r:.40} is {state[odd[0]]!r:.60}")
    check_state(state, policy)
    for name in ("steps", "skipped"):
        _check_count(state[name], name)
    _check_masters(state["masters"])
    scales = state["losses"]
    if not isinstance(scales, Mapping) or not all(
        isinstance(name, str) and isinstance(fields, Mapping) for name, fields in scales.items()
    ):
        raise StateError(f"the state's losses are to be a dict of dicts by name; they are {scales!r:.80}")
    losses.check(scales)
    for name in losses:
        fields = dict(scales[name])
        _check_count(fields.pop("skipped_in_a_row", None), f"skipped_in_a_row of the loss {name!r}")
        try:
            copy.deepcopy(losses[name]).load_state_dict(fields)
        except PreampError:
            raise
        except Exception as error:
            raise StateError(
                f"the scale of the loss {name!r} cannot be what the state says ({type(error).__name__}: {error})"
            ) from error


def _check_count(value: Any, name: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise StateError(f"the state has {name}={value!r:.60}: it counts steps")


def _check_masters(masters: Any) -> None:
    if not isinstance(masters, Mapping) or not all(isinstance(name, str) for name in masters):
        raise StateError(f"the state's masters are to be a dict of tensors by name; they are {masters!r:.80}")
    for name, value in masters.items():
        fits = isinstance(value, Tensor) and value.is_floating_point() and value.layout is torch.strided
        if not fits or value.device.type == "meta":
            seen = f"a {value.dtype} on {value.device}" if isinstance(value, Tensor) else f"{value!r:.60}"
            raise StateError(f"the master {name!r} is {seen} in the state: a dense floating tensor is wanted")
