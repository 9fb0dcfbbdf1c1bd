"""Losses of `with amp.scale_loss(...)`: the regions around what makes them, and what comes of the block's body."""

from __future__ import annotations

import re

import libcst as cst

from ._edits import Edits
from ._forward import Block, Forward, block_around
from ._names import Names, dotted, mentions
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
        for branch in self._names.around(block):
            if not isinstance(branch, (cst.IndentedBlock, cst.If, cst.Else)):
                break
            if isinstance(branch, cst.If):
                self._edits.conditions.add(branch)
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


_LINEAR = (cst.Multiply, cst.Divide)


def method(call: cst.Call) -> str | None:
    """The name of the method that is called."""
    return call.func.attr.value if isinstance(call.func, cst.Attribute) else None


def is_plain(node: cst.ListComp | cst.GeneratorExp) -> bool:
    """Whether a comprehension gives what it runs over, all of it."""
    loop = node.for_in
    return loop.inner_for_in is None and not loop.ifs and dotted(node.elt) == dotted(loop.target)


def is_linear(node: cst.BaseExpression, scaled: str) -> bool:
    """Whether an expression is the scaled loss, or its mean, sum, or a multiple of it."""
    if isinstance(node, cst.Name):
        return node.value == scaled
    if isinstance(node, cst.Call) and isinstance(node.func, cst.Attribute):
        return node.func.attr.value in ("mean", "sum") and not node.args and is_linear(node.func.value, scaled)
    if isinstance(node, cst.BinaryOperation) and isinstance(node.operator, _LINEAR):
        left = mentions(node.left, {scaled})
        if left == mentions(node.right, {scaled}) or (not left and isinstance(node.operator, cst.Divide)):
            return False
        return is_linear(node.left if left else node.right, scaled)
    return False


def substituted(names: Names, node: cst.BaseExpression, scaled: str, loss: str) -> str:
    """The text of an expression with the loss in place of the scaled loss."""
    if isinstance(node, cst.Name):
        return loss
    simple = re.fullmatch(r"[\w.]+", loss) is not None
    bare = node.with_changes(lpar=(), rpar=())
    return re.sub(rf"\b{scaled}\b", loss if simple else f"({loss})", names.code(bare))
