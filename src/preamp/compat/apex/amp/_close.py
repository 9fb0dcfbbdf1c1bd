"""The end of amp in a process, which Apex did not have."""

from __future__ import annotations

from . import amp as _amp
from ._amp_state import _amp_state
from ._casted_model import unpatch_forward
from ._initialize import KNOWN
from ._process_optimizer import release


def close() -> None:
    """Undo what amp did: torch's functions, models' forwards and optimizers' methods are as before, its state is new.

    Parameters keep the dtype they have, and optimizers the parameters they step: at O2 the masters, which
    `amp.master_params` gives. May be called any number of times; amp can be initialized again afterwards.
    """
    handle = getattr(_amp_state, "handle", None)
    if handle is not None:
        handle._deactivate()
    for ref in KNOWN:
        thing = ref()
        if thing is not None and hasattr(thing, "_amp_stash"):
            release(thing)
        elif thing is not None:
            unpatch_forward(thing)
    KNOWN.clear()
    _amp._DECORATOR_HANDLE = None
    _amp._USER_CAST_REGISTRY.clear()
    _amp._USER_PROMOTE_REGISTRY.clear()
    _amp_state.reset()
