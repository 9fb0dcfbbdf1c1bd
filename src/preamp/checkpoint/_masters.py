"""What is written of prepared models, and read into them: the float32 values of their weights.

So a file needs no second copy of the masters, and fits a model that was never prepared as well. Masters that are split
are written as they are kept: the model's state has bfloat16 weights, and beside it are the bits that these lack.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn

from ..errors import CheckpointError
from ..ledger import whole
from ..session import Session, sessions_of

BITS = "bits"
"""Where a checkpoint has the bits of split masters: by model, and by name in its state."""


@contextmanager
def in_float32(sessions: Iterable[Session]) -> Iterator[None]:
    """Inside, the parameters of prepared models are their masters, to be read and written."""
    with ExitStack() as stack:
        for session in sessions:
            stack.enter_context(session.full_precision(values_only=True))
        yield


class InFloat32:
    """A model whose state has the masters of these sessions in place of its 16-bit weights."""

    def __init__(self, model: nn.Module, sessions: Iterable[Session]) -> None:
        self._model, self._sessions = model, sessions

    def state_dict(self) -> Any:
        """The model's, in float32."""
        return joined(*self.parts())

    def parts(self) -> tuple[Any, dict[str, Tensor]]:
        """The model's state, in float32 but for weights of split masters, and the bits of these by name.

        Only a model that copies its weights for its state has its masters change places. That would round gradients
        that are clipped and not stepped yet, and a save is to change nothing.
        """
        masters = masters_of(self._sessions)
        try:
            state: Any = self._model.state_dict(keep_vars=True)
        except TypeError:  # a method of the model's own, without torch's arguments
            state = {}
        bits: dict[str, Tensor] = {}
        left = masters.keys() & set(self._model.parameters())
        for name, value in state.items():
            if isinstance(value, Tensor):
                left.discard(value)
                kept = masters.get(value, value)
                if not isinstance(kept, Tensor):
                    kept, bits[name] = kept
                state[name] = kept.detach()
        if left:
            with in_float32(self._sessions):
                return self._model.state_dict(), {}
        return state, bits

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """As the model's, into the masters."""
        with in_float32(self._sessions):
            self._model.load_state_dict(state)


def in_full(model: Any, session: Session | None = None) -> Any:
    """A model as it is saved and loaded: by way of its masters, whatever sessions it or a part of it has."""
    if not isinstance(model, nn.Module):
        return model
    own = set(model.parameters())
    known = dict.fromkeys((*sessions_of(model), *(() if session is None else (session,))))
    sessions = [each for each in known if not own.isdisjoint(each._masters)]
    return InFloat32(model, sessions) if sessions else model


def masters_of(sessions: Iterable[Session]) -> dict[Any, Any]:
    """The masters as they are kept, by parameter."""
    return {parameter: kept for each in sessions for parameter, kept in each._masters.saved().items()}


def joined(state: Any, bits: Mapping[str, Tensor]) -> Any:
    """A model's state in float32, from one and the bits beside it; `StateError` if these are not its own."""
    for name, low in bits.items():
        state[name] = whole(name, (state.get(name), low))
    return state


class Beside:
    """What a session adds to a checkpoint of models: its state, without the masters that the models' states have."""

    def __init__(self, session: Session, models: Iterable[Any]) -> None:
        self._session = session
        self._own = {parameter for each in models if isinstance(each, nn.Module) for parameter in each.parameters()}

    def state_dict(self) -> dict[str, Any]:
        """Scales and counters, and masters of parameters that are in none of the models."""
        state = self._session.state_dict()
        names = zip(self._session._masters, state["masters"], strict=True)
        others = (name for parameter, name in names if parameter not in self._own)
        return {**state, "masters": {name: state["masters"][name] for name in others}}

    def load_state_dict(self, state: Any) -> None:
        """Load them, before the models; `CheckpointError` for masters that are neither in here nor in a model."""
        saved = state.get("masters") if isinstance(state, Mapping) else None
        if not isinstance(saved, Mapping):
            self._session.load_state_dict(state)  # which says what is wrong with it
            return
        beside = self.state_dict()["masters"].keys()
        if differ := sorted(map(str, saved.keys() ^ beside)):
            raise CheckpointError(
                f"masters ({', '.join(differ[:3])}) are where they are not looked for: a checkpoint has the masters of "
                "model= in that model's state, and those of other parameters in the session's. Give load() the models "
                "that save() was given with session="
            )
        self._session.load_state_dict({**state, "masters": {**self._session.state_dict()["masters"], **saved}})
