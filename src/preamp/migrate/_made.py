"""Whether a session is made before it is used, whatever the script's options."""

from __future__ import annotations

from collections.abc import Sequence

import libcst as cst

from ._callees import Callees
from ._edits import Edits
from ._names import Names, root
from ._notes import Note
from ._scopes import Scope, Scopes
from ._sessions import Plan

_CONDITIONS = (cst.If, cst.IfExp, cst.BooleanOperation, cst.ExceptHandler, cst.Match, cst.While)


class Made:
    """Finds sessions that a mode of the script may do without making."""

    def __init__(self, names: Names, scopes: Scopes, edits: Edits) -> None:
        self._names, self._scopes, self._edits = names, scopes, edits
        self._callees = Callees(scopes)

    def look(self, plan: Plan, plain: Sequence[cst.Call]) -> None:
        """`plain`: what modes without amp do with the session."""
        outer = plan.scope.outermost()
        if outer is None or (plan.owner is None and plan.home is plan.scope):
            return  # the module's own, or a function's own
        found = self._condition(outer, set())
        if found is not None:
            self._doubt(
                plan, f"{plan.text} is made in {outer.name}(), which line {found} calls under a condition",
                "where it does not hold, there is no session for what is done in any mode",
            )  # fmt: skip
        elif plain and outer.name != "__init__" and not self._calls(outer):
            self._doubt(
                plan, f"{plan.text} is made in {outer.name}(), which nothing in this file calls",
                f"line {self._names.line(plain[0])} would need it in every mode",
            )  # fmt: skip

    def _calls(self, function: Scope) -> list[tuple[Scope, cst.Call]]:
        found = []
        for scope in self._scopes.all:
            for call in scope.calls:
                target = self._callees.of(scope, call)
                if target is not None and target[0] is function:
                    found.append((scope, call))
        return found

    def _condition(self, function: Scope, seen: set[Scope]) -> int | None:
        """The line of a call under a condition, where all calls of a function, or of its callers, stand under one."""
        seen.add(function)
        lines: list[int | None] = []
        for scope, call in self._calls(function):
            outer = scope.outermost()
            line = self._names.line(call) if self._is_conditional(call) else None
            if line is None and outer is not None and outer not in seen:
                line = self._condition(outer, seen)
            lines.append(line)
        return None if None in lines else next(iter(lines), None)

    def _is_conditional(self, node: cst.CSTNode) -> bool:
        around = self._names.parent(node)
        while around is not None and not isinstance(around, (cst.FunctionDef, cst.Module)):
            if isinstance(around, _CONDITIONS) and not (isinstance(around, cst.If) and _is_main(self._names, around)):
                return True
            around = self._names.parent(around)
        return False

    def _doubt(self, plan: Plan, seen: str, why: str) -> None:
        self._edits.doubts.append(Note(
            self._names.line(plan.call), seen,
            f"{why}; make it in every mode, with level=\"O0\" in those without amp",
        ))  # fmt: skip


def is_repeated(names: Names, plan: Plan, whole: cst.If) -> bool:
    """Whether a condition is asked in a loop that goes over the same models again and again."""
    around: cst.CSTNode | None = whole
    while around is not None and not isinstance(around, (cst.FunctionDef, cst.Module)):
        if isinstance(around, (cst.For, cst.While)):
            start, end = names.span(around)
            made = {
                root(target)
                for target, value in plan.scope.assigns
                if start <= names.line(value) <= end and value is not plan.call
            }
            if not {root(text) for text in plan.models} <= made:
                return True
        around = names.parent(around)
    return False


def _is_main(names: Names, node: cst.If) -> bool:
    return "__main__" in names.code(node.test)
