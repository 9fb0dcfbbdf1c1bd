"""Whether a session is made before it is used, whatever the script's options."""

from __future__ import annotations

from collections.abc import Sequence

import libcst as cst

from ._calls import bound
from ._edits import Edits
from ._names import Names, root, walk
from ._regions import binds, block_around
from ._scopes import Callees, Scope, Scopes
from ._sessions import Plan, elements

_CONDITIONS = (cst.If, cst.IfExp, cst.BooleanOperation, cst.ExceptHandler, cst.Match, cst.While)


class Made:
    """Finds sessions that a mode of the script may do without making."""

    def __init__(self, names: Names, scopes: Scopes, edits: Edits) -> None:
        self._names, self._scopes, self._edits = names, scopes, edits
        self._callees = Callees(scopes)

    def look(self, plan: Plan, plain: Sequence[cst.Call]) -> None:
        """`plain`: what modes without amp do with the session."""
        outer = plan.scope.outermost()
        if self._is_made_again(plan, outer):
            self._edits.doubt(
                plan.call, f"{plan.text} is made again for models that have one",
                f"close the one before, `{plan.text}.close()`, or make it once",
            )  # fmt: skip
        if outer is None or (plan.owner is None and plan.home is plan.scope):
            return  # the module's own, or a function's own
        found = self._condition(outer, set())
        every = 'make it in every mode, with level="O0" in those without amp'
        if found is not None:
            self._edits.doubt(
                plan.call, f"{plan.text} is made in {outer.name}(), which line {found} calls under a condition",
                f"where it does not hold, there is no session for what is done in any mode: {every}",
            )  # fmt: skip
        elif plain and outer.name != "__init__" and not self._calls(outer):
            self._edits.doubt(
                plan.call, f"{plan.text} is made in {outer.name}(), which nothing in this file calls",
                f"line {self._names.line(plain[0])} would need it in every mode: {every}",
            )  # fmt: skip

    def _is_made_again(self, plan: Plan, outer: Scope | None) -> bool:
        if is_repeated(self._names, plan.scope, plan.statement, plan.models, plan.call):
            return True
        if outer is None or outer.name == "__init__":
            return False
        given = [root(self._names.code(node)) for node in elements(plan.options.models)]
        made_here = {root(target) for target, value in plan.scope.assigns if value is not plan.call}
        if made_here & {*given, *map(root, plan.models)}:
            return False
        seen: set[tuple[str, ...]] = set()
        for scope, call in self._calls(outer):
            texts = tuple(self._given(outer, call, name) for name in given)
            if texts in seen or is_repeated(self._names, scope, call, texts, plan.call):
                return True
            seen.add(texts)
        return False

    def _given(self, outer: Scope, call: cst.Call, name: str) -> str:
        """What a call gives a parameter; a name that is none stays."""
        names = [each for each in outer.parameters() if each not in ("self", "cls")]
        return next((self._names.code(arg.value) for each, arg in bound(call, names) if each == name), name)

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
        for around in self._names.around(node):
            if isinstance(around, cst.FunctionDef):
                return False
            if isinstance(around, _CONDITIONS) and not (isinstance(around, cst.If) and _is_main(self._names, around)):
                return True
        return False


def is_repeated(names: Names, scope: Scope, node: cst.CSTNode, models: Sequence[str], own: cst.Call) -> bool:
    """Whether a statement stands in a loop that goes over the same models again and again."""
    for around in (node, *names.around(node)):
        if isinstance(around, cst.FunctionDef):
            break
        if isinstance(around, (cst.For, cst.While)):
            start, end = names.span(around)
            made = {root(t) for t, value in scope.assigns if start <= names.line(value) <= end and value is not own}
            made |= {target for target, over in scope.loops if start <= names.line(over) <= end}
            if not {root(text) for text in models} <= made:
                return True
    return False


def is_bound_before(names: Names, scopes: Scopes, plan: Plan, whole: cst.If) -> bool:
    """Whether models and optimizers exist before a condition is asked, whatever came before."""
    for text in (*plan.models, *plan.optimizers):
        name = text if text.startswith("self.") else root(text)
        assigned = any(target == name for target, value in plan.scope.assigns if value is not plan.call)
        if name in ("self", "cls") or (name.startswith("self.") and not assigned):
            continue  # another method's
        if not any(name in scope.parameters() for scope in plan.scope.outward()) and not (
            _bound_at(names, whole, name) or (not assigned and _surely(scopes.module.node.children, name))
        ):
            return False
    return True


def _bound_at(names: Names, node: cst.CSTNode, name: str) -> bool:
    """Whether statements before a node, in its block or one around it, bind a name on every path."""
    place = block_around(names, node)
    while place is not None:
        block, index = place
        if _surely(block.body[:index], name):
            return True
        owner = names.parent(block)
        if isinstance(owner, (cst.For, cst.With)) and name in binds(owner.with_changes(body=cst.IndentedBlock([]))):
            return True
        place = None if owner is None or isinstance(owner, cst.FunctionDef) else block_around(names, owner)
    return False


def _surely(statements: Sequence[cst.CSTNode], name: str) -> bool:
    return any(_binds_surely(statement, name) for statement in statements)


def _binds_surely(node: cst.CSTNode | None, name: str) -> bool:
    if isinstance(node, cst.If):
        return _binds_surely(node.body, name) and _binds_surely(node.orelse, name)
    if isinstance(node, (cst.IndentedBlock, cst.SimpleStatementSuite)):
        return _surely(node.body, name) or any(isinstance(s, cst.Raise) for s in _small(node))
    if isinstance(node, (cst.With, cst.Else)):
        return _binds_surely(node.body, name)
    if isinstance(node, cst.Try):
        return _binds_surely(node.body, name)
    if node is None or isinstance(node, (cst.For, cst.While, cst.Match)):
        return False
    if isinstance(node, (cst.FunctionDef, cst.ClassDef)):
        return node.name.value == name
    if isinstance(node, cst.SimpleStatementLine) and any(
        isinstance(s, (cst.Import, cst.ImportFrom)) for s in node.body
    ):
        return any(isinstance(each, cst.Name) and each.value == name for each in walk(node))
    return name in binds(node)


def _small(block: cst.IndentedBlock | cst.SimpleStatementSuite) -> list[cst.CSTNode]:
    lines = [s.body if isinstance(s, cst.SimpleStatementLine) else [s] for s in block.body]
    return [small for line in lines for small in line]


def _is_main(names: Names, node: cst.If) -> bool:
    return "__main__" in names.code(node.test)
