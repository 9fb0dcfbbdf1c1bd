"""The float32 values of a model's 16-bit entries, of the masters that are in the same file."""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

from ..errors import PreampWarning
from ..formats import LOW_DTYPES
from ..sharding import is_sharded
from ._content import place, several_in


def in_full(state: Any, amp: Any, model: Any, path: Any) -> Any:
    """The state of one or several models, with masters in place of entries that are what those round to.

    Entries that have the same 16-bit dtype in `model` stay: masters that a session has for them only it can give back,
    if something goes wrong.

    A master is known by the name of its parameter (what parallel and compiled wrappers and the names of several models
    add to it aside) and by its value, so that a state of other weights, as of an average, stays what it is. A
    `PreampWarning` if there are masters for none of it.
    """
    masters = amp.get("masters") if isinstance(amp, Mapping) else None
    if not isinstance(state, Mapping) or not isinstance(masters, Mapping):
        return state
    named: dict[str, list[Tensor]] = defaultdict(list)
    for name, master in masters.items():
        if isinstance(master, Tensor):
            for known in {name, name.partition(":")[2]}:
                named[known].append(master)
    several, models = several_in(state), model if isinstance(model, Mapping) else {None: model}
    found: dict[Any, Tensor] = {}
    has_low = False
    for each in [state] if several is None else several.values():
        for name, value in each.items() if isinstance(each, Mapping) else ():
            if isinstance(value, Tensor) and value.dtype in LOW_DTYPES:
                has_low = True
                master = next((m for m in _called(name, named) if _rounds_to(m, value)), None)
                if master is not None:
                    found[_key(value)] = master
    if masters and has_low and not found:
        warnings.warn(
            f"{path} has float32 masters, and they are of other weights than the model's in it (of an average, say), "
            "which are loaded as they are: 16-bit numbers. For float32 ones save the model inside "
            "session.full_precision(values_only=True)",
            PreampWarning,
            stacklevel=3,
        )
    if several is None:
        return _widened(state, found, models.get(None))
    return {"several": {name: _widened(each, found, models.get(name)) for name, each in several.items()}}


def _widened(state: Any, found: Mapping[Any, Tensor], model: Any) -> Any:
    """A state_dict with what was found for its entries; tied ones are one tensor, and have one master."""
    if not isinstance(state, Mapping) or not found:
        return state
    wide: Any = state.copy() if hasattr(state, "copy") else dict(state)
    if hasattr(state, "_metadata"):  # versions of modules, which steer how a state is loaded
        wide._metadata = state._metadata
    own = {} if model is None else model.state_dict()
    for name, value in state.items():
        if isinstance(value, Tensor) and getattr(own.get(name), "dtype", None) is not value.dtype:
            wide[name] = found.get(_key(value), value)
    return wide


def _called(name: Any, named: Mapping[str, list[Tensor]]) -> Iterator[Tensor]:
    """The masters of this name, then those of what is left of it without its first parts."""
    left = str(name)
    while left:
        yield from named.get(left, ())
        left = left.partition(".")[2]


def _rounds_to(master: Tensor, low: Tensor) -> bool:
    if master.shape != low.shape or is_sharded(master) != is_sharded(low):
        return False
    exact = master.to(low.device)
    rounded, off = exact.to(low.dtype), (low.float() - exact).abs()
    same = (rounded == low) | (rounded.isnan() & low.isnan())
    return bool((same | (off <= (rounded.float() - exact).abs())).all())  # split masters round ties away from zero


def _key(tensor: Tensor) -> Any:
    return place(tensor) or id(tensor)
