"""PA111 of buffers: counters and running averages that are 16-bit, and so stop moving."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils.weak import WeakIdKeyDictionary, WeakTensorKeyDictionary

from ..formats import LOW_DTYPES, format_of, name_of
from ..report.finding import Finding
from ._lint_observe import Call, Watcher
from ._stack import Line

_MOVES = frozenset({"add", "sub", "mul", "lerp", "addcmul", "addcdiv", "copy"})
"""Operators by which a count or an average goes on from what it was; a copy brings what another one has computed."""


class BufferWatcher(Watcher):
    """Follows the 16-bit buffers of modules. Statistics of torch's own norm layers have a finding of their own."""

    def __init__(self) -> None:
        self._held: Any = WeakIdKeyDictionary()
        """Path, module and name of each buffer."""
        self._next: Any = WeakTensorKeyDictionary()
        """What was computed from one: that of the buffer, and the line."""
        self._moved: list[tuple[str, nn.Module, str, Tensor, Line]] = []

    def begin(self, parts: Iterable[tuple[str, nn.Module]]) -> None:
        """Know the buffers."""
        for path, module in parts:
            for name, buffer in module._buffers.items():
                if buffer is not None and buffer.dtype in LOW_DTYPES and not isinstance(module, _NormBase):
                    self._held[buffer] = path, module, name

    def after(self, call: Call) -> None:
        """A count goes on in place, or in a new tensor that takes the buffer's place."""
        if not self._held or call.base not in _MOVES or not call.args or not isinstance(call.args[0], Tensor):
            return
        target = call.args[0]
        whole = target if target._base is None else target._base
        known = self._held.get(whole)
        in_place = call.name.partition(".")[0].endswith("_")
        if known is not None and in_place:
            source = call.args[1] if call.base == "copy" and len(call.args) > 1 else None
            if call.base != "copy" or (isinstance(source, Tensor) and source in self._next):
                self._moved.append((*known, whole, call.place()))
        elif isinstance(call.out, Tensor) and not in_place:
            read = next((self._held[t] for t in call.inputs if t in self._held), None)
            if read is None:
                read = next((self._next[t][:3] for t in call.inputs if t in self._next), None)
            if read is not None:
                self._next[call.out] = *read, call.place()

    @property
    def findings(self) -> list[Finding]:
        """One of each buffer that moved."""
        for tensor, (path, module, name, place) in list(self._next.items()):
            if module._buffers.get(name) is tensor:
                self._moved.append((path, module, name, tensor, place))
        found = []
        told: set[tuple[int, str]] = set()
        for path, module, name, buffer, (file, line) in self._moved:
            if (id(module), name) in told or buffer.dtype not in LOW_DTYPES:
                continue
            told.add((id(module), name))
            found.append(_moving(path, name, buffer, file, line))
        return found


def _moving(path: str, name: str, buffer: Tensor, file: str | None, line: int | None) -> Finding:
    dtype, limit = name_of(buffer.dtype), round(2 / format_of(buffer.dtype).epsilon)
    return Finding(
        "PA111", "warning",
        f"the buffer {name} is {dtype} and goes on from its own value in every forward pass: a count stops at {limit}, "
        f"and a running average stands still once it moves by less than 1/{limit} of itself",
        module=path, file=file, line=line, evidence={"buffer": name, "dtype": dtype, "stops at": limit},
        fix=f"module.{name} = module.{name}.float()  # after the cast; preamp's levels O2 and O5 do not cast it\n"
        "# or count in an integer buffer, which no cast touches: torch.zeros((), dtype=torch.long)",
    )  # fmt: skip
