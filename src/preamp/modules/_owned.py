"""The modules of open sessions, and the states that are loaded into them.

`load_state_dict` of a model, of a part of it or of a wrapper around it comes down to `_load_from_state_dict` of each
module, which copies values into that module's own parameters. While there are masters, that method is ours: masters
take float32 values, which 16-bit parameters would round.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, MutableMapping
from contextlib import nullcontext
from typing import Any

from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from ..errors import SessionError
from ..ledger import Masters
from ._casting import CastingModule

_OWNED: MutableMapping[nn.Module, weakref.ref[Masters]] = WeakIdKeyDictionary()
"""The modules of open sessions, with what keeps the masters of their parameters."""

_LOAD = "_load_from_state_dict"
_torchs = getattr(nn.Module, _LOAD)


def own(modules: Iterable[nn.Module], masters: Masters) -> None:
    """Record that an open session has these modules."""
    _OWNED.update(dict.fromkeys(modules, weakref.ref(masters)))
    if len(masters) and getattr(nn.Module, _LOAD) is _torchs:
        setattr(nn.Module, _LOAD, _load_from_state_dict)
    if len(masters):
        weakref.finalize(masters, _give_back).atexit = False


def disown(modules: Iterable[nn.Module]) -> None:
    """Record that the session of these modules is closed."""
    for module in modules:
        _OWNED.pop(module, None)
    _give_back()


def _give_back() -> None:
    """Have modules load as torch does, once there are no masters."""
    if getattr(nn.Module, _LOAD) is _load_from_state_dict and not any(map(_masters_of, list(_OWNED))):
        setattr(nn.Module, _LOAD, _torchs)


def _masters_of(module: nn.Module) -> Masters | None:
    known = _OWNED.get(module)
    return None if known is None else known()


def _load_from_state_dict(self: Any, state_dict: Mapping[str, Any], prefix: str, *args: Any, **kwargs: Any) -> Any:
    masters = _masters_of(self)
    mine = {} if masters is None else {f"{prefix}{k}": p for k, p in self._parameters.items() if p is not None}
    with masters.loading(mine, state_dict) if masters and mine else nullcontext():
        return _torchs(self, state_dict, prefix, *args, **kwargs)


def check_free(root: nn.Module, masters: Masters | None = None) -> None:
    """`SessionError` if an open session has a part of a model; they may share what neither of them changes."""
    for path, module in root.named_modules():
        learns, known = any(p.requires_grad for p in module.parameters(recurse=False)), _masters_of(module)
        if known is not None and (learns or isinstance(module, CastingModule)):
            here = f"the module {path!r} of this model" if path else "this model"
            twice = "in another one of this prepare(), too: give it nn.ModuleList([a, b]), and go on calling each"
            other = "already prepared by an open session: close() that first, or give one prepare() all models"
            raise SessionError(f"{here} is {twice if known is masters else other}")
