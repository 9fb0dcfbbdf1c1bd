"""The functions and classes of a file: what is called and assigned in each, and which of them a call runs."""

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
        self._stack = [self.module]
        names.module.visit(self)

    def on_visit(self, node: cst.CSTNode) -> bool:
        """Enter a node."""
        scope = self._stack[-1]
        self.of[node] = scope
        if isinstance(node, (cst.FunctionDef, cst.ClassDef)):
            scope.bound.add(node.name.value)
            inner = Scope(node, scope)
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


class Callees:
    """Finds the functions and methods of a file behind its calls."""

    def __init__(self, scopes: Scopes) -> None:
        self._scopes = scopes
        self._inside: dict[tuple[Scope, str], Scope] = {}
        for each in scopes.all:
            if each.parent is not None:
                self._inside[each.parent, each.name] = each

    def of(self, scope: Scope, call: cst.Call) -> tuple[Scope, int] | None:
        """(function, how many of its first parameters are given by the object); None for what is not in this file."""
        func = call.func
        if isinstance(func, cst.Name):
            found = self._named(scope, func.value)
            if found is None or found.is_function:
                return None if found is None else (found, 0)
            made = self._inside.get((found, "__init__"))
            return None if made is None else (made, 1)
        if not isinstance(func, cst.Attribute):
            return None
        for own in self._classes(scope, func.value):
            method = self._inside.get((own, func.attr.value))
            if method is not None and method.is_function:
                return method, 1
        return None

    def _named(self, scope: Scope, name: str) -> Scope | None:
        for each in scope.outward():
            found = self._inside.get((each, name)) if each.is_function or each is self._scopes.module else None
            if found is not None:
                return found
        return None

    def _classes(self, scope: Scope, receiver: cst.BaseExpression) -> Iterator[Scope]:
        """The classes of this file that an object may be of."""
        own, method = scope.own_class(), scope.method()
        if isinstance(receiver, cst.Call):
            if dotted(receiver.func) == "super" and own is not None:
                yield from (each for each in family(self._scopes, own) if each is not own)
            return
        text = dotted(receiver)
        if text is None:
            return
        if own is not None and method is not None and text in method.parameters()[:1]:
            yield from family(self._scopes, own)
            return
        places = [each for each in self._scopes.all if own is not None and each.own_class() is own]
        for each in [*scope.outward(), *(places if "." in text else ())]:
            for target, value in each.assigns:
                if target == text and isinstance(value, cst.Call) and isinstance(value.func, cst.Name):
                    found = self._named(scope, value.func.value)
                    if found is not None and not found.is_function:
                        yield from family(self._scopes, found)


def family(scopes: Scopes, own: Scope) -> Iterator[Scope]:
    """A class, its bases and the classes made from it, as far as they are in this file."""
    yield own
    for other in scopes.all:
        if other is own or not isinstance(other.node, cst.ClassDef) or not isinstance(own.node, cst.ClassDef):
            continue
        if other.name in bases(own.node) or own.name in bases(other.node):
            yield other


def bases(node: cst.ClassDef) -> set[str]:
    """What a class is made from, as it is spelt."""
    return {text for text in (dotted(base.value) for base in node.bases) if text is not None}
