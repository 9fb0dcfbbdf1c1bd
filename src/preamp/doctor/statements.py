"""Statements of the user's, as text: what they read, cast and make, and how they read when it is float32."""

from __future__ import annotations

import ast
import inspect
import linecache
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from types import FrameType
from typing import Any

import torch

from .records import Line

CASTS = frozenset({"to", "half", "bfloat16", "type", "type_as"})
"""Methods that may cast to 16 bits."""
_SIGNS = {ast.Add: "+", ast.Sub: "-"}
_SIMPLE = (ast.Assign, ast.AugAssign, ast.AnnAssign, ast.Return, ast.Expr)


@dataclass(frozen=True)
class Statement:
    """A simple statement of a file: an assignment, a return or an expression."""

    node: ast.stmt
    lines: tuple[str, ...]
    """Its lines as they stand."""
    file: str = ""
    head: str = ""
    """What it is the only one of, on one line with it: "def forward(self, x):"."""

    def reads(self) -> dict[str, list[ast.expr]]:
        """The names that it reads ("x", "self.scale", "batch['x']"), with where they stand. Of `x.t()` it reads x."""
        found: dict[str, list[ast.expr]] = {}
        called = {id(call.func) for call in self._calls()}
        written = set(map(id, self._written()))

        def visit(node: ast.AST) -> None:
            if id(node) in written:
                return
            if isinstance(node, ast.Attribute) and id(node) in called:
                visit(node.value)
            elif isinstance(node, (ast.Name, ast.Attribute)) and isinstance(node.ctx, ast.Load):
                spelled = dotted(node)
                if spelled is not None and id(node) not in called:
                    found.setdefault(spelled, []).append(node)
                elif spelled is None:
                    visit(node.value if isinstance(node, ast.Attribute) else node)
            else:
                match node:
                    case ast.Subscript(value=value, slice=ast.Constant(), ctx=ast.Load()) if dotted(value):
                        found.setdefault(ast.unparse(node), []).append(node)
                for child in ast.iter_child_nodes(node):
                    visit(child)

        visit(self.node)
        return found

    def _calls(self) -> list[ast.Call]:
        return [node for node in ast.walk(self.node) if isinstance(node, ast.Call)]

    def _written(self) -> Iterator[ast.expr]:
        """What it writes to and must stay itself: x of `x[0] = y`, of `x.data = y`, of `x.mul_(y)` and of `out=x`."""
        for node in ast.walk(self.node):
            if isinstance(node, (ast.Subscript, ast.Attribute)) and isinstance(node.ctx, ast.Store):
                yield node.value
            elif isinstance(node, ast.Call):
                yield from (each.value for each in node.keywords if each.arg == "out")
                name = node.func.attr if isinstance(node.func, ast.Attribute) else ""
                in_place = name.endswith("_") and not name.endswith("__")
                if isinstance(node.func, ast.Attribute) and in_place and not isinstance(node.func.value, ast.Call):
                    yield node.func.value

    @property
    def goes_back(self) -> bool:
        """Whether it calls a backward pass, or steps: no precision of its own to change."""
        called = [call.func.attr for call in self._calls() if isinstance(call.func, ast.Attribute)]
        return not {"backward", "step", "grad"}.isdisjoint(called)

    def calls(self) -> list[str]:
        """What it calls: names, and parts of lists ("self.layers[0]")."""
        called = [call.func for call in self._calls()]
        parts = [one for one in called if isinstance(one, ast.Subscript) and dotted(one.value)]
        return [name for name in map(dotted, called) if name is not None] + [*map(ast.unparse, parts)]

    def casts(self) -> list[tuple[ast.Call, ast.expr]]:
        """Calls that may cast, each with what it casts."""
        methods = [(call, call.func) for call in self._calls() if isinstance(call.func, ast.Attribute)]
        found = [(call, method.value) for call, method in methods if method.attr in CASTS]
        devices = {id(call) for call, _ in found for each in call.args if _names_device(each)}
        return [one for one in found if len(found) == 1 or id(one[0]) not in devices]

    def dtypes(self) -> Iterator[ast.expr]:
        """The dtypes in which it makes something: of `torch.arange(n, dtype=x.dtype)`, and not of a cast."""
        for call in self._calls():
            if (dotted(call.func) or "").rpartition(".")[2] not in CASTS:
                yield from (each.value for each in call.keywords if each.arg == "dtype")

    def numbers(self) -> list[ast.Constant]:
        """The floating numbers that stand in it."""
        return [n for n in ast.walk(self.node) if isinstance(n, ast.Constant) and isinstance(n.value, float)]

    def rewritten(self, changes: Mapping[ast.expr, str]) -> str:
        """Its text with these parts of it written otherwise, without its indentation."""
        text = [line.encode() for line in self.lines]
        first = self.node.lineno
        for node, new in sorted(changes.items(), key=lambda one: (-one[0].lineno, -one[0].col_offset)):
            begin, end = node.lineno - first, (node.end_lineno or node.lineno) - first
            kept = text[begin][: node.col_offset], text[end][node.end_col_offset :]
            text[begin : end + 1] = [kept[0] + new.encode() + kept[1]]
        indent = self.node.col_offset
        return "\n".join(
            line[indent:].decode() if self.head or not line[:indent].strip() else line.decode().strip() for line in text
        )

    def placed(self, text: str) -> str:
        """A text that takes its place, behind what it is the only statement of."""
        return f"{self.head}\n{textwrap.indent(text, '    ')}" if self.head else text


def dotted(node: ast.expr) -> str | None:
    """The text of an expression of names and dots, self.norm.eps; None for any other."""
    if isinstance(node, ast.Name):
        return node.id
    inner = dotted(node.value) if isinstance(node, ast.Attribute) else None
    return None if inner is None else f"{inner}.{node.attr}"  # type: ignore[attr-defined]


@lru_cache(maxsize=64)
def parsed(file: str) -> ast.Module | None:
    """A file's syntax; None where it cannot be read as Python."""
    try:
        return ast.parse("".join(linecache.getlines(file)))
    except (SyntaxError, ValueError):
        return None


@lru_cache(maxsize=1024)
def statement_at(line: Line) -> Statement | None:
    """The simple statement at a line; None where there is none, or no source, or something else in front or behind."""
    file, number = line
    tree = None if file is None else parsed(file)
    if file is None or number is None or tree is None:
        return None
    there = [n for n in ast.walk(tree) if isinstance(n, _SIMPLE) and n.lineno <= number <= (n.end_lineno or n.lineno)]
    if len(there) != 1:
        return None
    found = there[0]
    lines = linecache.getlines(file)[found.lineno - 1 : found.end_lineno]
    head = lines[0].encode()[: found.col_offset].decode().strip()
    if head and (not head.endswith(":") or len(lines) > 1):  # behind another, or at once a part of one that goes on
        return None
    return Statement(found, tuple(line.rstrip("\n") for line in lines), file, head)


def frame_of(line: Line, frame: FrameType | None) -> FrameType | None:
    """The frame that runs this line now."""
    while frame is not None and (frame.f_code.co_filename, frame.f_lineno) != line:
        frame = frame.f_back
    return frame


def without_cast(statement: Statement) -> str | None:
    """The statement with what it casts in float32 instead; None where it casts nothing, or casts what was cast."""
    changes: dict[ast.expr, str] = {call: f"{_operand(of)}.float()" for call, of in statement.casts()}
    nested = any(node in changes for call in changes for node in ast.walk(call) if node is not call)
    return statement.rewritten(changes) if changes and not nested else None


def _operand(node: ast.expr) -> str:
    """Its text, for a dot behind it."""
    text = ast.unparse(node)
    return text if isinstance(node, (ast.Name, ast.Attribute, ast.Call, ast.Subscript)) else f"({text})"


def _names_device(node: ast.expr) -> bool:
    return "device" in ast.unparse(node) or isinstance(node, ast.Constant)


def default_of(function: Any, name: str = "eps") -> Any:
    """The default of a function's argument, from its signature or torch's schema of it; None where neither says."""
    try:
        return inspect.signature(function).parameters[name].default
    except (KeyError, TypeError, ValueError):
        default = getattr(getattr(torch.ops.aten, getattr(function, "__name__", ""), None), "default", None)
        arguments = () if default is None else default._schema.arguments
        return next((each.default_value for each in arguments if each.name == name), None)


def going_on_in_float32(statement: Statement, adds_tensor: bool) -> str | None:
    """A statement by which a sum or a counter goes on, with a float32 one in its place; None for any other.

    `adds_tensor`: what is added is a tensor. Arguments and what a loop runs through stay what others hold: those are
    None, too.
    """
    node, tree = statement.node, parsed(statement.file)
    target: ast.expr
    left: ast.expr
    if isinstance(node, ast.AugAssign):
        target, left, op, right = node.target, node.target, node.op, node.value
    elif isinstance(node, ast.Assign) and isinstance(node.value, ast.BinOp):
        target, left, op, right = node.targets[0], node.value.left, node.value.op, node.value.right
    else:
        return None
    sign, name = _SIGNS.get(type(op)), dotted(target)
    if tree is None or sign is None or name is None or name != dotted(left):
        return None
    for each in ast.walk(tree):
        loop = ast.walk(each.target) if isinstance(each, ast.For) else ()
        if (isinstance(each, ast.arg) and each.arg == name) or name in map(ast.unparse, loop):
            return None
    if adds_tensor:  # the sum may begin as a number of Python's
        return f"{name} = {name} {sign} {_operand(right)}.float()"
    return f"{name} = {name}.float() {sign} {ast.unparse(right)}"


def cast_back(text: str, dtype: torch.dtype) -> str | None:
    """The text of a statement with its value cast to a dtype; None where it has none."""
    statement = Statement(ast.parse(text).body[0], tuple(text.split("\n")))
    value = statement.node.value if isinstance(statement.node, (ast.Return, ast.Assign)) else None
    written = None if value is None else ast.get_source_segment(text, value)
    return None if value is None else statement.rewritten({value: f"({written}).to({dtype})"})


def with_default(text: str, old: float, new: float) -> str | None:
    """The text with another epsilon in the call of torch's of which it is the default; None where there is none."""
    for call in ast.walk(ast.parse(text)):
        name = call.func.attr if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) else ""
        function = getattr(torch.nn.functional, name, None)
        is_given = isinstance(call, ast.Call) and any(k.arg == "eps" for k in call.keywords)
        if callable(function) and not is_given and default_of(function) == old:
            spelled = ast.unparse(call)
            return text.replace(spelled, f"{spelled[:-1]}, eps={new:g})") if spelled in text else None
    return None
