"""What may cure a fact. A remedy changes how some lines are computed when a step is done again; it is also a text."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ...formats import LOW_DTYPES
from ...tree import map_tensors, tensors
from ..operators import base_of
from ..places import Place, Places, walk
from ..records import Line
from ..statements import CASTS, cast_back, default_of, frame_of, statement_at, without_cast
from .source import Function, Reading, in_float32

_CASTS = CASTS | {"float", "double", "__get__", "__set__", "__set_item__"}
"""Functions that say a dtype, or ask for one: they mean it."""
PRODUCTS = frozenset({"mm", "bmm", "addmm", "baddbmm", "convolution", "addmv", "mv", "dot", "linear"})
"""Operators whose operands a region casts."""
_SMALL = 2.0**-14
"""float16's smallest normal number: constants below it are there to be added to something, or to bound it."""


@dataclass(frozen=True, slots=True)
class Remedy:
    """These lines are computed in float32 outside of autocast; constants in them are others."""

    lines: tuple[Line, ...] = ()
    constants: tuple[tuple[float, float], ...] = ()
    module: str | None = None
    """In place of lines: all that runs in this module; "" for all that runs."""
    policy: str | None = None
    """That of its session with the module in float32, as `preamp.policy` reads it."""
    within: Function | None = None
    """A function that the one line calls: all of it runs in float32, too."""
    casts: Literal["kept", "dropped", "only"] = "kept"
    """Whether lines cast to 16 bits where they say so, or stay in float32; or whether that is all that changes."""
    back: list[torch.dtype] = field(default_factory=list, compare=False)
    """What a result had to be cast back to, as it was done again: operators with 16-bit weights came next."""

    def constant(self, value: Any) -> Any:
        """What stands in place of a number."""
        if type(value) is float:
            for old, new in self.constants:
                if value == old:
                    return new
        return value

    def covers(self, line: Line, module: str | None) -> bool:
        """Whether it is about what runs here."""
        if self.module is not None:
            return self.module == "" or (module is not None and f"{module}.".startswith(f"{self.module}."))
        within = self.within
        if within is not None and line[0] == within.file and within.first <= (line[1] or 0) <= within.last:
            return True
        return line in self.lines

    def computes(self, line: Line, module: str | None) -> bool:
        """Whether what runs here is computed in float32, and not only left uncast."""
        return self.casts != "only" and self.covers(line, module)

    def text(self, device: str, seen: Mapping[Line, Reading], at: Line | None = None) -> str | None:
        """To paste in place of its lines, one by one; `seen`: what they read; `at`: the line that the reader knows of.
        None: it cannot be written.
        """
        if self.module is not None:
            return self.policy and f'session = preamp.prepare(model, optimizer, policy="{self.policy}")'
        if self.casts == "dropped" and not any(one and one.casts() for one in map(statement_at, self.lines)):
            return None
        known = at is None or self.lines == (at,)
        texts = []
        for line in sorted(self.lines, key=lambda one: (one[0] or "", one[1] or 0)):
            text = self._written(line, seen)
            if text is None:
                return None
            if self.casts != "only":
                text = f'with torch.autocast("{device}", enabled=False):\n{textwrap.indent(text, "    ")}'
            statement = statement_at(line)
            text = text if statement is None else statement.placed(text)
            there = "" if at is None or line[0] == at[0] else f" of {Path(str(line[0])).name}"
            texts.append(text if known else f"# in place of line {line[1]}{there}:\n{text}")
        return "\n".join(texts)

    def _written(self, line: Line, seen: Mapping[Line, Reading]) -> str | None:
        """The statement at one of its lines."""
        statement, reading = statement_at(line), seen.get(line)
        if statement is None or reading is None:
            return None
        if self.casts == "only":
            return without_cast(statement)
        if statement.goes_back or reading.calls_module:
            return None
        constants = dict(self.constants) if line == self.lines[0] else {}
        text = in_float32(statement, reading, constants, uncast=self.casts == "dropped")
        last = line == max(self.lines, key=lambda one: one[1] or 0)
        return cast_back(text, self.back[0]) if text is not None and self.back and last else text


def candidates(
    lines: list[Line],
    broken: list[Line],
    constants: list[float],
    module: str | None,
    policy: str | None,
    function: Function | None = None,
) -> Iterator[Remedy]:
    """Remedies in the order in which they are tried.

    `lines`: the place of the fact and those that lead to it, the nearest first; `broken`: all places of facts;
    `constants`: numbers that the operators of the first line were given; `policy`: that of a session, with the module
    in float32; `function`: what that line is in.
    """
    if policy is not None:
        yield Remedy(module=module, policy=policy)
    small = [c for c in constants if 0 < abs(c) < _SMALL]
    near = [c for c in constants if 0 < 1 - abs(c) < 2.0**-9]
    single = [(line,) for line in lines]
    chains = [*single[:1], tuple(broken[:4]), *single[1:], tuple(lines[:2]), tuple(lines)]
    chains = [*dict.fromkeys(chain for chain in chains if chain)]
    for chain in chains:
        yield Remedy(chain)
        if len(chain) == 1:
            yield Remedy(chain, casts="only")
        yield Remedy(chain, casts="dropped")
    for chain in chains if small or near else ():  # last: what is computed is another thing then
        for new in (1e-4, 1e-3, 1e-2) if chain[0] == lines[0] and len(chain) < 3 else ():
            changed = [(c, new) for c in small] + [(c, (1 - new) * (1 if c > 0 else -1)) for c in near]
            yield Remedy(chain, tuple(changed))
    if function is not None:
        yield Remedy((function.caller,), within=function)


class _Applied(TorchFunctionMode):
    """Applies a remedy to what models call, line by line."""

    def __init__(self, remedy: Remedy, places: Places) -> None:
        super().__init__()
        self._remedy, self._places = remedy, places
        self._made: dict[int, Tensor] = {}
        """Results of what the remedy is about, which are float32."""
        self._cast: dict[int, tuple[Line, Tensor]] = {}
        """Results of casts that a line says, in the middle of it: no name, so that a text cannot widen them."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        in_place = name.endswith("_") and not name.endswith("__") and id(args[0]) not in self._made
        if in_place or name in _CASTS - CASTS:
            return self._beside(func, args, kwargs)
        at, module = walk(None).source, self._places.module
        if self._remedy.casts != "kept" and casts_low(name, args, kwargs) and self._remedy.covers(at, module):
            return args[0].float()
        as_another = any(isinstance(each, Tensor) for each in args[1:])  # which is float32 by the remedy
        if (name in CASTS and not as_another) or not self._remedy.computes(at, module):
            out = self._beside(func, args, kwargs)
            if name in CASTS and isinstance(out, Tensor):
                self._cast[id(out)] = at, out
            return out
        args, kwargs = self._given(func, args, kwargs, at)
        with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
            made = func(*args, **kwargs)
        self._made.update({id(each): each for each in tensors(made)})
        return made

    def _beside(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run what the remedy is not about; its result, where that meets 16-bit weights, as it would have been."""
        try:
            return func(*args, **kwargs)
        except RuntimeError:
            low, at = _low_of((args, kwargs)), walk(None).source
            inside = any(frame_of(line, sys._getframe()) for line in self._remedy.lines if line != at)
            if inside or low not in LOW_DTYPES or not any(id(t) in self._made for t in tensors((args, kwargs))):
                raise
            self._remedy.back[:] = [low]
            args, kwargs = map_tensors(lambda t: t.to(low) if id(t) in self._made else t, (args, kwargs))
            return func(*args, **kwargs)

    def _given(self, func: Any, args: Any, kwargs: Any, at: Line) -> tuple[Any, Any]:
        """float32 in place of 16-bit tensors, and the remedy's constants; also of an epsilon that is a default."""

        def wide(tensor: Tensor) -> Tensor:
            return tensor if self._cast.get(id(tensor), (None, None))[0] == at else widened(tensor)

        args = [map_tensors(wide, self._remedy.constant(each)) for each in args]
        kwargs = {key: map_tensors(wide, self._remedy.constant(each)) for key, each in kwargs.items()}
        if kwargs.get("dtype") in LOW_DTYPES:  # of what it makes
            kwargs["dtype"] = torch.float32
        if self._remedy.constants and "eps" not in kwargs:
            default = default_of(func)
            if self._remedy.constant(default) is not default and len(args) <= 3:
                kwargs["eps"] = self._remedy.constant(default)
        return args, kwargs


def casts_low(name: str, args: Any, kwargs: Any) -> bool:
    """Whether a method casts to 16 bits."""
    to = [getattr(each, "dtype", each) for each in (*args[1:], *kwargs.values())]
    return name in ("half", "bfloat16") or (name in CASTS and any(dtype in LOW_DTYPES for dtype in to))


def widened(tensor: Tensor) -> Tensor:
    """float32 in place of a 16-bit tensor."""
    return tensor.float() if tensor.dtype in LOW_DTYPES else tensor


def applied(remedy: Remedy | None, places: Places) -> AbstractContextManager[Any]:
    """A model runs inside with the remedy."""
    return nullcontext() if remedy is None else _Applied(remedy, places)


def run_kept(
    func: Any, args: Any, kwargs: Any, remedy: Remedy | None, place: Place, within: Function | None = None
) -> Any:
    """Run an operator that was kept on a tape: under the remedy, or after what is float32 because of it.

    `within`: the function that it runs in; what one of the remedy's lines calls cannot be cast back at its end.
    """
    if remedy is None:
        return func(*args, **kwargs)
    statement = statement_at(place.at)
    # a cast to 16 bits that changed nothing was no operator, and would be one now: only without it is this line known
    is_known = remedy.casts != "kept" or statement is None or not statement.casts()
    casts = base_of(func) == "_to_copy" and kwargs.get("dtype") in LOW_DTYPES
    if is_known and (casts or remedy.casts != "only") and remedy.covers(place.at, place.module):
        args = [map_tensors(widened, remedy.constant(each)) for each in args]
        kwargs = {key: map_tensors(widened, remedy.constant(each)) for key, each in kwargs.items()}
        if casts:
            kwargs["dtype"] = torch.float32
        return func(*args, **kwargs)
    try:
        return func(*args, **kwargs)
    except RuntimeError:  # operands of two dtypes, where the code would have asked
        if within is not None and within.caller in remedy.lines:
            raise
        to = _low_of(args) if base_of(func) in PRODUCTS else torch.float32
        remedy.back[:] = [to] if to in LOW_DTYPES else []
        args = [map_tensors(lambda t: t.to(to) if t.is_floating_point() else t, each) for each in args]
        return func(*args, **kwargs)


def _low_of(args: Any) -> torch.dtype:
    """The 16-bit dtype among the arguments."""
    return next((t.dtype for t in tensors(args) if t.dtype in LOW_DTYPES), torch.float32)
