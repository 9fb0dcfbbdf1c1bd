"""Takes loss scales from the states that other trainers saved."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from ..errors import CheckpointError, kind_of
from ..session import Session
from ._arguments import check_kind


class _Found(NamedTuple):
    """A scale, the good steps since it last changed, and the parameters of its schedule as far as they were saved."""

    scale: Any
    good_steps: Any
    schedule: Mapping[str, Any] = {}


def adopt_scale(session: Session, state: Mapping[str, Any], *, name: str | None = None) -> None:
    """Take over the loss scale of a run that was trained with another scaler.

    `state`: the state_dict of a `torch.amp.GradScaler` (or `preamp.GradScaler`), what `apex.amp.state_dict()` gave, or
    the state of Apex's `FP16_Optimizer`. Scale and count of good steps are taken, and from a GradScaler its factors and
    interval, so that the next steps are those that the old run would have made; the session's other counters, masters
    and bounds stay. `name`: the loss it is for, where the session has several; the scalers of apex.amp go to the
    session's losses in order.

    Raises `CheckpointError`, and nothing has changed, for any other state or one that the session has no use for;
    `ScaleError` for a scale that the session's schedule cannot have.

    >>> preamp.checkpoint.adopt_scale(session, torch.load("old.pt", weights_only=True)["scaler"])
    """
    check_kind("session", session)
    own = session.state_dict()
    losses = own["losses"]
    found = _recognised(state)
    if isinstance(found, list):
        if name is not None or len(found) != len(losses):
            raise CheckpointError(
                f"the state of apex.amp has {len(found)} loss scalers, which go to the session's losses in order, and "
                f"those are {', '.join(losses)}: to adopt one, give it alone, adopt_scale(session, "
                "state['loss_scaler0'], name=...)"
            )
        chosen = dict(zip(losses, found, strict=True))
    else:
        if name is None and len(losses) > 1:
            raise CheckpointError(f"the session has several losses: say which, name={' or '.join(map(repr, losses))}")
        if name is not None and name not in losses:
            raise CheckpointError(f"no loss of the session is called {name!r}; there are {', '.join(losses)}")
        chosen = {next(iter(losses)) if name is None else name: found}
    taken = {loss: _merged(losses[loss], each, loss) for loss, each in chosen.items()}
    session.load_state_dict({**own, "losses": {**losses, **taken}})


def _recognised(state: Any) -> _Found | list[_Found]:
    if not isinstance(state, Mapping):
        raise CheckpointError(f"a state to take a loss scale from is a dict; this is {kind_of(state)}")
    if {"scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker"} <= state.keys():
        factors = {key: state[key] for key in ("growth_factor", "backoff_factor", "growth_interval")}
        return _Found(state["scale"], state["_growth_tracker"], factors)
    if state and all(isinstance(key, str) and key.startswith("loss_scaler") and key != "loss_scaler" for key in state):
        return [_of_apex(each) for each in state.values()]
    if {"loss_scale", "unskipped"} <= state.keys():
        return _of_apex(state)
    if {"loss_scaler", "fp32_from_fp16"} <= state.keys():
        return _of_apex(state["loss_scaler"])
    if not state:
        raise CheckpointError(
            "the state is empty, as that of a GradScaler made with enabled=False: there is no scale in it, and the "
            "session's own start is as good"
        )
    raise CheckpointError(
        f"this is no state of a GradScaler, of apex.amp or of Apex's FP16_Optimizer; its keys are "
        f"{', '.join(map(str, list(state)[:8]))}. A session's own state goes to session.load_state_dict()"
    )


def _of_apex(saved: Any) -> _Found:
    """A scaler of Apex: a dict of its fields, or, in a state that was never saved as such, the object itself."""
    fields = saved if isinstance(saved, Mapping) else getattr(saved, "__dict__", {})
    for scale, count in (("loss_scale", "unskipped"), ("_loss_scale", "_unskipped"), ("cur_scale", "")):
        if scale in fields:
            return _Found(fields[scale], fields.get(count, 0))
    raise CheckpointError(f"{kind_of(saved)} without a loss scale, where Apex keeps a loss scaler")


def _merged(own: Mapping[str, Any], found: _Found, loss: str) -> dict[str, Any]:
    """A loss's state with what was found put in its place."""
    try:
        scale, good_steps = float(found.scale), int(found.good_steps)
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise CheckpointError(
            f"the state's scale is {found.scale!r:.40} after {found.good_steps!r:.40} good steps: these are no numbers"
        ) from error
    if own["kind"] == "none":
        if scale != 1:
            raise CheckpointError(
                f"the loss {loss!r} is not scaled at this level, and the state has the scale {scale:g}: nothing to "
                "adopt; leave the call out, or prepare with scale='dynamic'"
            )
        return dict(own)
    merged = {**own, "scale": scale, "skipped_in_a_row": 0}
    if "good_steps" in own:
        merged.update({key: value for key, value in found.schedule.items() if key in own})
        # A count at or beyond the interval would never meet it again, and the scale would not grow any more.
        interval = merged["growth_interval"]
        merged["good_steps"] = min(good_steps, interval - 1) if isinstance(interval, int) else good_steps
    return merged
