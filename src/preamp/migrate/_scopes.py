"""The functions and classes of a file, and what is called and assigned in each of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import libcst as cst

from ._names import Names, dotted


@dataclass(eq=False)
class Scope:
    """The module, a class or a function, with what is called and assigned in it but not in inner scopes."""

    node: cst.Module | cst.ClassDef | cst.FunctionDef
    parent: Scope | None
    calls: list[cst.Call] = field(default_factory=list)
    assigns: list[tuple[str, cst.BaseExpression]] = field(default_factory=list)
    """Targets that are names or attributes, with their value."""
    loops: list[tuple[str, cst.BaseExpression]] = field(default_factory=list)
    """Loop variables, with what the loop runs over."""
    grown: list[tuple[str, cst.BaseExpression]] = field(default_factory=list)
    """Names that something is added to, with what is added."""
    bound: set[str] = field(default_factory=set)
    """Names bound here: parameters and targets."""
    models: set[str] = field(default_factory=set)
    """Texts that stand for models of a session."""
    optimizers: set[str] = field(default_factory=set)
    """Texts that stand for optimizers of a session, or lists of them."""

    @property
    def is_function(self) -> bool:
        """Whether it is a function or method."""
        return isinstance(self.node, cst.FunctionDef)

    @property
    def name(self) -> str:
        """The name of the function or class."""
        return "" if isinstance(self.node, cst.Module) else self.node.name.value

    def outward(self) -> Iterator[Scope]:
        """From here to the module: scopes around scopes."""
        scope: Scope | None = self
        while scope is not None:
            yield scope
            scope = scope.parent

    def method(self) -> Scope | None:
        """The method that this is or lies in."""
        for scope in self.outward():
            if scope.is_function and scope.parent is not None and isinstance(scope.parent.node, cst.ClassDef):
                return scope
        return None

    def own_class(self) -> Scope | None:
        """The class whose method this is or lies in."""
        method = self.method()
        return None if method is None else method.parent

    def outermost(self) -> Scope | None:
        """The function or method that stands in no other function."""
        found = None
        for scope in self.outward():
            found = scope if scope.is_function else found
        return found

    def parameters(self) -> list[str]:
        """Names of a function's positional parameters."""
        if not isinstance(self.node, cst.FunctionDef):
            return []
        return [p.name.value for p in (*self.node.params.posonly_params, *self.node.params.params)]


class Scopes(cst.CSTVisitor):
    """All scopes of a file; `of` finds the scope of a call, statement or definition."""

    def __init__(self, names: Names) -> None:
        self._names = names
        self.module = Scope(names.module, None)
        self.all = [self.module]
        self.of: dict[cst.CSTNode, Scope] = {}
        self.by_definition: dict[cst.CSTNode, Scope] = {}
        self._stack = [self.module]
        names.module.visit(self)

    def on_visit(self, node: cst.CSTNode) -> bool:
        """Enter a node."""
        scope = self._stack[-1]
        self.of[node] = scope
        if isinstance(node, (cst.FunctionDef, cst.ClassDef)):
            scope.bound.add(node.name.value)
            inner = Scope(node, scope)
            self.by_definition[node] = inner
            self.all.append(inner)
            self._stack.append(inner)
        elif isinstance(node, cst.Param):
            scope.bound.add(node.name.value)
        elif isinstance(node, cst.Call):
            scope.calls.append(node)
            self._grow(node.func, [arg.value for arg in node.args])
        elif isinstance(node, cst.AugAssign) and (text := dotted(node.target)) is not None:
            scope.grown.append((text, node.value))
        elif isinstance(node, cst.Assign):
            for target in node.targets:
                self._bind(target.target, node.value)
        elif isinstance(node, cst.AnnAssign) and node.value is not None:
            self._bind(node.target, node.value)
        elif isinstance(node, cst.For):
            self._loop(node)
        return True

    def on_leave(self, original_node: cst.CSTNode) -> None:
        """Leave a node."""
        if isinstance(original_node, (cst.FunctionDef, cst.ClassDef)):
            self._stack.pop()

    def _bind(self, target: cst.BaseExpression, value: cst.BaseExpression) -> None:
        scope = self._stack[-1]
        if isinstance(target, (cst.Tuple, cst.List)):
            values = value.elements if isinstance(value, (cst.Tuple, cst.List)) else ()
            for index, element in enumerate(target.elements):
                paired = len(values) == len(target.elements)
                self._bind(element.value, values[index].value if paired else value)
            return
        text = dotted(target)
        if text is not None:
            scope.assigns.append((text, value))
            if isinstance(target, cst.Name):
                scope.bound.add(text)

    def _loop(self, node: cst.For) -> None:
        scope = self._stack[-1]
        for text in _target_names(node.target):
            scope.bound.add(text)
            scope.loops.append((text, node.iter))

    def _grow(self, func: cst.BaseExpression, values: list[cst.BaseExpression]) -> None:
        if isinstance(func, cst.Attribute) and func.attr.value in ("append", "extend", "add", "update"):
            text = dotted(func.value)
            if text is not None:
                self._stack[-1].grown.extend((text, value) for value in values)


def _target_names(target: cst.BaseExpression) -> Iterator[str]:
    if isinstance(target, cst.Name):
        yield target.value
    elif isinstance(target, (cst.Tuple, cst.List)):
        for element in target.elements:
            yield from _target_names(element.value)
