"""What statements of the user's read where they run, and how they read with a remedy in them."""

from __future__ import annotations

import ast
import sys
from collections.abc import Mapping
from types import FrameType
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from ...formats import LOW_DTYPES
from ..places import is_users
from ..records import Line
from ..statements import Statement, dotted, frame_of, statement_at, with_default, without_cast

_NOT_WITHIN = frozenset({"backward", "step", "grad", "autocast"})
"""What a function does that has a precision of its own, or none."""


class Function(NamedTuple):
    """A function of the user's that computes without models and regions."""

    file: str
    first: int
    last: int
    caller: Line
    """The line that called it."""


class Reading(NamedTuple):
    """What the names are that a statement reads."""

    low: frozenset[str]
    """16-bit tensors."""
    numbers: Mapping[str, float]
    """Python's floating numbers: an epsilon that a module keeps."""
    calls_module: bool = False
    """Whether a module is called that is no single layer in float32: all of it would change. Or an object of torch's is
    read that keeps 16-bit tensors, a distribution: no text changes those."""
    calls_layer: bool = False
    """Whether any module is called: that would be in float32, too."""
    function: Function | None = None
    """The function that it is in, where that may run in float32 as a whole."""
    dtypes: frozenset[str] = frozenset()
    """16-bit dtypes in which it makes something."""


class Readings(dict[Line, Reading]):
    """What the statement at a line reads, of lines that were seen to run."""

    def __init__(self) -> None:
        super().__init__()
        self.casts: Any = WeakTensorKeyDictionary()
        """Small 16-bit tensors that were cast outside of models: a version, what each was cast from, the line."""

    def overflowed(self) -> tuple[Line, float] | None:
        """Where finite numbers were cast to float16 and became infinite, and the largest of them."""
        for tensor, (version, exact, line) in self.casts.items():
            if version == tensor._version and bool(tensor.isinf().any()) and bool(exact.isfinite().all()):
                return line, float(exact.abs().max())
        return None

    def note(self, line: Line) -> None:
        """Remember what the statement at this line reads, if it runs now."""
        statement = None if line in self else statement_at(line)
        frame = None if statement is None else frame_of(line, sys._getframe())
        if statement is not None and frame is not None:
            self[line] = read_in(frame, statement)._replace(function=_function_of(frame))
            function = self[line].function
            if function is not None:
                self.note(function.caller)


def read_in(frame: FrameType, statement: Statement) -> Reading:
    """What a statement reads where it is running."""
    low, numbers, hides = set(), {}, False
    for name in statement.reads():
        value = _value_of(name, frame)
        hides |= _hides_low(value)
        if isinstance(value, Tensor) and value.dtype in LOW_DTYPES:
            low.add(name)
        elif type(value) is float:
            numbers[name] = value
    made_in = {spelled for node in statement.dtypes() if (spelled := dotted(node)) is not None}
    dtypes = frozenset(spelled for spelled in made_in if _value_of(spelled, frame) in LOW_DTYPES)
    called = [value for name in statement.calls() if isinstance(value := _value_of(name, frame), nn.Module)]
    return Reading(frozenset(low), numbers, hides or not all(map(_is_layer, called)), bool(called), dtypes=dtypes)


def _value_of(spelled: str, frame: FrameType) -> Any:
    first, *rest = spelled.partition("[")[0].split(".")
    value: Any = frame.f_locals.get(first, frame.f_globals.get(first))
    for attribute in rest:
        value = getattr(value, attribute, None)
    if not spelled.endswith("]"):
        return value
    key = spelled.partition("[")[2][:-1]
    holds = isinstance(value, (list, tuple, Mapping, nn.ModuleList, nn.ModuleDict, nn.Sequential))
    try:
        return value[frame.f_locals[key] if key in frame.f_locals else ast.literal_eval(key)] if holds else None
    except (LookupError, TypeError, ValueError):
        return None


def _hides_low(value: Any) -> bool:
    if isinstance(value, (Tensor, nn.Module, type)) or not type(value).__module__.startswith("torch."):
        return False
    return any(isinstance(t, Tensor) and t.dtype in LOW_DTYPES for t in getattr(value, "__dict__", {}).values())


def _is_layer(module: nn.Module) -> bool:
    """Whether it is one layer of torch's with weights in float32, or has no weights."""
    weights, of_torch = list(module.parameters()), type(module).__module__.startswith("torch.nn.modules.")
    alone = not any(True for _ in module.children()) and (of_torch or not weights)
    return alone and not any(p.dtype in LOW_DTYPES for p in weights)


def _function_of(frame: FrameType) -> Function | None:
    """The function that runs there, unless it runs models, backward passes or regions."""
    code, caller = frame.f_code, frame.f_back
    while caller is not None and not is_users(caller.f_code.co_filename):
        caller = caller.f_back
    names = {*code.co_names, *code.co_varnames, *code.co_freevars} - {"self"}
    own = frame.f_locals.get("self")
    held = [frame.f_locals.get(n, frame.f_globals.get(n, getattr(own, n, None))) for n in names]
    layers = all(_is_layer(each) for each in held if isinstance(each, nn.Module))
    if caller is None or code.co_name == "<module>" or _NOT_WITHIN & names or not layers:
        return None
    last = max(line for _, _, line in code.co_lines() if line is not None)
    return Function(code.co_filename, code.co_firstlineno, last, (caller.f_code.co_filename, caller.f_lineno))


def in_float32(
    statement: Statement, reading: Reading, constants: Mapping[float, float], *, uncast: bool = False
) -> str | None:
    """The statement with its 16-bit tensors cast to float32, and with other constants; None where these do not show.

    `uncast`: what it casts to 16 bits is float32, too.
    """
    changes: dict[ast.expr, str] = {}
    reads, left = statement.reads(), dict(constants)
    for name in reading.low:
        changes |= dict.fromkeys(reads.get(name, ()), f"{name}.float()")
    changes |= {node: "torch.float32" for node in statement.dtypes() if dotted(node) in reading.dtypes}
    for number in statement.numbers():
        value = number.value
        if isinstance(value, float) and value in constants:
            changes[number] = f"{constants[value]:g}"
            left.pop(value, None)
    for name, value in reading.numbers.items():
        if value in constants:
            changes |= dict.fromkeys(reads.get(name, ()), f"{constants[value]:g}")
            left.pop(value, None)
    text: str | None = statement.rewritten(changes)
    for old, new in left.items():
        text = None if text is None else with_default(text, old, new)
    if text is not None and uncast and statement.casts():
        text = without_cast(Statement(ast.parse(text).body[0], tuple(text.split("\n"))))
    return text if text is None else text.replace(".float().float()", ".float()")
