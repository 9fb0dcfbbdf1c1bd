"""The float32 values of a model's 16-bit entries: of its session, or of the masters that are in the same file."""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn

from ..errors import PreampWarning
from ..formats import LOW_DTYPES
from ..session import Session, sessions_of
from ..sharding import is_sharded
from ._content import place, several_in


@contextmanager
def in_float32(sessions: Iterable[Session]) -> Iterator[None]:
    """Inside, the parameters of prepared models are their masters, to be read and written."""
    with ExitStack() as stack:
        for session in sessions:
            stack.enter_context(session.full_precision(values_only=True))
        yield


class WithMasters:
    """A prepared model whose state has its masters, and which gives them back as it is loaded."""

    def __init__(self, model: nn.Module, sessions: Iterable[Session]) -> None:
        self._model, self._sessions = model, sessions
        named = model.named_parameters(remove_duplicate=False)
        self.mastered = {name for name, parameter in named if any(parameter in each._masters for each in sessions)}
        """The names of parameters that have masters."""

    def state_dict(self) -> Any:
        """The model's, in float32."""
        with in_float32(self._sessions):
            return self._model.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """As the model's, into the masters."""
        with in_float32(self._sessions):
            self._model.load_state_dict(state)


def with_masters(model: Any, session: Session | None) -> Any:
    """One or several models, those with masters of other sessions than `session`, whose state has them, as such."""
    if isinstance(model, Mapping):
        return {name: with_masters(each, session) for name, each in model.items()}
    found = sessions_of(model) if isinstance(model, nn.Module) else []
    others = [each for each in found if each is not session and each.policy.masters]
    return WithMasters(model, others) if others else model


def in_full(state: Any, amp: Any, model: Any, path: Any) -> Any:
    """The state of one or several models, with masters in place of entries that are what those round to.

    Entries that have the same 16-bit dtype in `model` stay. A master is known by the name of its parameter (what
    parallel and compiled wrappers and the names of several models add to it aside) and by its value, so that a state of
    other weights, as of an average, stays what it is. A `PreampWarning` if no master is found, and the file has some or
    16-bit entries go into masters.
    """
    held = amp.get("masters") if isinstance(amp, Mapping) else None
    masters: Mapping[Any, Any] = held if isinstance(held, Mapping) else {}
    if not isinstance(state, Mapping):
        return state
    named: dict[str, list[Tensor]] = defaultdict(list)
    for name, master in masters.items():
        if isinstance(master, Tensor):
            for known in {name, name.partition(":")[2]}:
                named[known].append(master)
    several, models = several_in(state), model if isinstance(model, Mapping) else {None: model}
    found: dict[Any, Tensor] = {}
    rounds = False
    for key, each in {None: state}.items() if several is None else several.items():
        into_masters = models[key].mastered if isinstance(models.get(key), WithMasters) else ()
        for name, value in each.items() if isinstance(each, Mapping) else ():
            if isinstance(value, Tensor) and value.dtype in LOW_DTYPES:
                rounds = rounds or bool(masters) or name in into_masters
                master = next((m for m in _called(name, named) if _rounds_to(m, value)), None)
                if master is not None:
                    found[_key(value)] = master
    if rounds and not found:
        of_others = "float32 masters, and they are of other weights than the model's in it (of an average, say),"
        what = of_others if masters else "no float32 values of the model's 16-bit weights,"
        warnings.warn(
            f"{path} has {what} which are loaded as they are: 16-bit numbers. For float32 ones save the model inside "
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
