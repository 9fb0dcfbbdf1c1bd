"""The statements of a file in the order in which they run, and whether gradients wait for a step there."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import libcst as cst

from ._calls import bound
from ._scopes import Callees, Scope, Scopes

State = frozenset[str]
"""What may be: "none", no backward pass so far; "open", scaled gradients wait; "true", unscaled ones do; "done"; and
"unknown", where a function begins that nobody in this file calls."""
Watch = Callable[[cst.Call, Scope, State, frozenset[str]], State]
"""What a call makes of a state; the last argument: which parameters of the function around hold weights."""
Holding = Callable[[cst.BaseExpression, Scope, frozenset[str]], bool]
"""Whether an argument hands on weights."""

_GONE: State = frozenset()
_DEPTH = 20
"""How far calls are followed into calls; Python's own stack ends not far behind."""


class Flow:
    """Walks from the module's first line, and from every function that it does not come to, into what they call."""

    def __init__(self, scopes: Scopes, callees: Callees, watch: Watch, holding: Holding) -> None:
        self._scopes, self._callees, self._watch, self._holding = scopes, callees, watch, holding
        self._known: dict[tuple[Scope, State, frozenset[str]], State] = {}
        self._ordered: dict[cst.CSTNode, list[cst.Call]] = {}
        self._running: list[tuple[Scope, frozenset[str]]] = []
        self._returns: list[State] = []
        self._loops: list[tuple[list[State], list[State]]] = []

    def walk(self) -> None:
        """All of the file."""
        self._enter(self._scopes.module, frozenset({"none"}), frozenset())
        for scope in self._scopes.all:
            reached = {known for known, _, _ in self._known}
            if scope.is_function and scope not in reached:
                self._enter(scope, frozenset({"unknown"}), frozenset())

    def _enter(self, scope: Scope, state: State, holding: frozenset[str]) -> State:
        key = (scope, state, holding)
        if key in self._known or len(self._running) > _DEPTH or any(scope is each for each, _ in self._running):
            return self._known.get(key, state)
        self._running.append((scope, holding))
        returns, loops = self._returns, self._loops
        self._returns, self._loops = [], []
        body = scope.node.body
        statements: Iterable[cst.CSTNode] = body if isinstance(scope.node, cst.Module) else [body]  # type: ignore[assignment,list-item]
        after = self._block(statements, state)
        after = after.union(*self._returns)
        self._returns, self._loops = returns, loops
        self._running.pop()
        self._known[key] = after
        return after

    def _block(self, statements: Iterable[cst.CSTNode], state: State) -> State:
        for statement in statements:
            if not state:
                break
            state = self._statement(statement, state)
        return state

    def _statement(self, node: cst.CSTNode, state: State) -> State:
        if isinstance(node, (cst.IndentedBlock, cst.SimpleStatementLine, cst.SimpleStatementSuite)):
            return self._block(node.body, state)
        if isinstance(node, cst.FunctionDef):
            return state
        if isinstance(node, cst.If):
            state = self._expression(node.test, state)
            other = state if node.orelse is None else self._statement(node.orelse, state)
            return self._block([node.body], state) | other
        if isinstance(node, (cst.For, cst.While)):
            return self._loop(node, state)
        if isinstance(node, (cst.Try, cst.TryStar)):
            return self._try(node, state)
        if isinstance(node, cst.With):
            for item in node.items:
                state = self._expression(item.item, state)
            return self._block([node.body], state)
        if isinstance(node, (cst.ClassDef, cst.Else, cst.Finally)):
            return self._block([node.body], state)
        if isinstance(node, cst.Match):
            state = self._expression(node.subject, state)
            return state.union(*(self._block([case.body], state) for case in node.cases))
        state = self._expression(node, state)
        if isinstance(node, cst.Return):
            self._returns.append(state)
        elif isinstance(node, (cst.Break, cst.Continue)) and self._loops:
            self._loops[-1][isinstance(node, cst.Continue)].append(state)
        return _GONE if isinstance(node, (cst.Return, cst.Raise, cst.Break, cst.Continue)) else state

    def _loop(self, node: cst.For | cst.While, state: State) -> State:
        state = self._expression(node.iter if isinstance(node, cst.For) else node.test, state)
        breaks: list[State] = []
        around = state
        while True:  # a round more for every state that a round adds
            self._loops.append((breaks, []))
            after = self._block([node.body], around)
            after = around.union(after, *self._loops.pop()[1])
            if after == around:
                break
            around = after
        if node.orelse is not None:
            around = self._statement(node.orelse, around)
        return around.union(*breaks)

    def _try(self, node: cst.Try | cst.TryStar, state: State) -> State:
        tried = self._block([node.body], state)
        after = tried if node.orelse is None else self._statement(node.orelse, tried)
        after = after.union(*(self._block([handler.body], state | tried) for handler in node.handlers))
        return after if node.finalbody is None else self._statement(node.finalbody, after or state)

    def _expression(self, node: cst.CSTNode, state: State) -> State:
        """Calls in the order in which they are made: arguments before what they are given to."""
        if node not in self._ordered:
            self._ordered[node] = list(_ordered(node))
        for call in self._ordered[node]:
            state = self._call(call, state)
        return state

    def _call(self, call: cst.Call, state: State) -> State:
        scope = self._scopes.of[call]
        _, holding = self._running[-1]
        state = self._watch(call, scope, state, holding)
        found = self._callees.of(scope, call)
        if found is None:
            return state
        target, skip = found
        given = bound(call, target.parameters()[skip:])
        return self._enter(
            target, state, frozenset(name for name, arg in given if self._holding(arg.value, scope, holding))
        )


def _ordered(node: cst.CSTNode) -> Iterator[cst.Call]:
    if isinstance(node, (cst.Lambda, cst.FunctionDef)):
        return
    for child in node.children:
        yield from _ordered(child)
    if isinstance(node, cst.Call):
        yield node
