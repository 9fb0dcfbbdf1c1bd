"""What is written of prepared models, and read into them: the float32 values of their weights.

So a file needs no second copy of the masters, and fits a model that was never prepared as well.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn

from ..errors import CheckpointError
from ..session import Session, sessions_of


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
        """The model's, in float32. Only a model that copies its weights for it has its masters change places.

        That would round gradients that are clipped and not stepped yet, and a save is to change nothing.
        """
        pairs = (zip(each._masters, each._masters.named(), strict=True) for each in self._sessions)
        masters: dict[Any, Tensor] = {parameter: master for each in pairs for parameter, (_, master) in each}
        state: Any = self._model.state_dict(keep_vars=True)
        left = masters.keys() & set(self._model.parameters())
        for name, value in state.items():
            if isinstance(value, Tensor):
                left.discard(value)
                state[name] = masters.get(value, value).detach()
        if left:
            with in_float32(self._sessions):
                return self._model.state_dict()
        return state

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


class Beside:
    """What a session adds to a checkpoint of models: its state, without the masters that the models' states have."""

    def __init__(self, session: Session, models: Iterable[Any]) -> None:
        self._session = session
        self._own = {parameter for each in models if isinstance(each, nn.Module) for parameter in each.parameters()}

    def state_dict(self) -> dict[str, Any]:
        """Scales and counters, and masters of parameters that are in none of the models."""
        state = self._session.state_dict()
        masters = zip(self._session._masters, self._session._masters.named(), strict=True)
        return {**state, "masters": dict(named for parameter, named in masters if parameter not in self._own)}

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
