"""Which function of the file a call runs."""

from __future__ import annotations

from collections.abc import Iterator

import libcst as cst

from ._names import dotted
from ._scopes import Scope, Scopes


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
