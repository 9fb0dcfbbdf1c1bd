"""Which session's region goes around which statements."""

from __future__ import annotations

import libcst as cst

from ._edits import Edits
from ._forward import Block, Forward, block_around
from ._names import Names
from ._scopes import Scope, Scopes
from ._sessions import Access, Sessions


class Regions:
    """Plans the regions of losses."""

    def __init__(self, names: Names, scopes: Scopes, sessions: Sessions, edits: Edits) -> None:
        self._names, self._scopes, self._sessions, self._edits = names, scopes, sessions, edits

    def around(self, scope: Scope, access: Access, loss: cst.BaseExpression, block: cst.With) -> bool:
        """A region around what makes the loss that `block` is about; False if that cannot be seen."""
        forward = Forward(self._names, scope, scope.models)
        found = forward.ranges(loss, block)
        made = self._made_elsewhere(scope, forward.needed, set())
        if found is None and made:
            found = Forward(self._names, scope, scope.models | made).ranges(loss, block)
        self._add(found, access)
        around = self._names.parent(block)
        while isinstance(around, (cst.IndentedBlock, cst.If, cst.Else)):
            if isinstance(around, cst.If):
                self._edits.conditions.add(around)
            around = self._names.parent(around)
        return found is not None or bool(made)

    def _add(self, found: dict[Block, list[tuple[int, int]]] | None, access: Access) -> None:
        for where, ranges in (found or {}).items():
            self._edits.regions.setdefault(where, []).extend((start, end, access.text) for start, end in ranges)

    def _made_elsewhere(self, scope: Scope, needed: set[str], seen: set[str]) -> set[str]:
        """Attributes such as `self.fake` that other methods make with the model; regions go around that."""
        own = scope.own_class()
        made: set[str] = set()
        for text in sorted(t for t in needed if t.startswith("self.") and t not in seen and t not in scope.models):
            seen.add(text)
            for other in self._scopes.all:
                if own is None or other.own_class() is not own or other.method() is scope.method():
                    continue
                for target, value in other.assigns:
                    if target == text and self._made_here(other, text, value, seen):
                        made.add(text)
        return made

    def _made_here(self, scope: Scope, text: str, value: cst.BaseExpression, seen: set[str]) -> bool:
        place, access = block_around(self._names, value), self._sessions.visible(scope)
        if place is None or access is None:
            return False
        after = (place[0], place[1] + 1)
        forward = Forward(self._names, scope, scope.models)
        found = forward.ranges_at({text}, after)
        inner = self._made_elsewhere(scope, forward.needed, seen)
        if found is None and inner:
            found = Forward(self._names, scope, scope.models | inner).ranges_at({text}, after)
        self._add(found, access)
        return found is not None
