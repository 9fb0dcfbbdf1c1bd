"""`amp.initialize` as `preamp.prepare`, also where it stands under a condition, and rules that were registered."""

from __future__ import annotations

import re

import libcst as cst

from ..errors import PolicyError
from ..rules import OpRules
from ._calls import argument, bound, broken, literal, recall, renamed
from ._edits import Edits, with_lead
from ._made import is_bound_before, is_repeated
from ._names import Names, Statement, root, walk
from ._options import POSITIONS
from ._regions import block_around
from ._scopes import Scopes
from ._sessions import Plan, Sessions

_KEPT = {"models": "model", "optimizers": "optimizer", "opt_level": "level"}
_RULES = {
    "amp.register_float_function": ("with_full", "float_function"),
    "amp.register_half_function": ("with_low", "half_function"),
    "amp.register_bfloat16_function": ("with_low", "half_function"),
    "amp.register_promote_function": ("with_promote", "promote_function"),
}
_TORCH = ("torch", "torch.nn.functional", "torch.Tensor")


class Starts:
    """Plans the changes where sessions are made."""

    def __init__(self, names: Names, scopes: Scopes, sessions: Sessions, edits: Edits) -> None:
        self._names, self._scopes, self._sessions, self._edits = names, scopes, sessions, edits
        self._rules: list[str] = []

    def plan(self) -> None:
        """Everything about making sessions."""
        for scope in self._scopes.all:
            for call in scope.calls:
                if self._names.apex(call.func) in _RULES:
                    self._register(call)
        for plan in self._sessions.plans:
            self._edits.handled.add(plan.call.func)
            for seen, write, by_hand in plan.options.remarks:
                self._edits.say(plan.call, seen, write, by_hand)
            self._edits.statements[plan.statement] = lambda new, plan=plan: self._prepared(plan, new)  # type: ignore[misc]
            self._share_global(plan)
        for plan in self._sessions.plans:
            self._complete(plan)

    # -- prepare

    def _prepared(self, plan: Plan, new: Statement) -> list[Statement]:
        assert isinstance(new, cst.SimpleStatementLine)
        small = new.body[0]
        assert isinstance(small, (cst.Assign, cst.Expr)) and isinstance(small.value, cst.Call)
        call, options = small.value, plan.options
        args: list[cst.Arg] = []
        given: list[str] = []
        pairs = list(bound(call, POSITIONS))
        for name, arg in pairs:
            if name not in _KEPT:
                continue
            if name != "opt_level":
                given.append(self._names.code(arg.value))
            if name in ("models", "optimizers") and plan.first is not None:
                value = options.models if name == "models" else options.optimizers
                arg = arg if value is None else arg.with_changes(value=value.deep_clone())
            if name == "opt_level":
                arg = renamed(arg.with_changes(value=cst.parse_expression(options.level)), "level")
            elif arg.keyword is not None:
                arg = renamed(arg, _KEPT[name])
            args.append(arg)
        names = {name for name, _ in pairs}
        if "optimizers" not in names:
            keyword = args[0].keyword
            args.insert(1, argument("None", None if keyword is None else "optimizer"))
        if "opt_level" not in names:
            args.append(argument(options.level, "level"))
        for word, text in self._extra(plan):
            args.append(argument(text, None if word == "**" else word, word))
        prepared = _assignment(plan.text, broken(recall(call, "preamp.prepare", args)))
        found: list[Statement] = [new.with_changes(body=[prepared])]
        if plan.first is not None:
            left = plan.first.partition(" = ")[0]
            line = self._names.statement(f"{left} = {', '.join(given)}")
            found.insert(0, line)
        return with_lead(new, found)

    def _extra(self, plan: Plan) -> list[tuple[str, str]]:
        extra = [*self._losses(plan), *plan.options.extra]
        if self._rules and plan.options.level.strip("'\"") not in ("O0", "O2", "O3", "O5"):
            extra.append(("ops", "preamp.OpRules()" + "".join(self._rules)))
        return extra

    def _losses(self, plan: Plan) -> list[tuple[str, str]]:
        count = plan.options.losses
        if count is None:
            return []
        if plan.loss_names:
            return [("losses", f"({', '.join(repr(n).replace(chr(39), chr(34)) for n in plan.loss_names.values())})")]
        return [("losses", f'[f"loss{{i}}" for i in range({count})]')]

    def _share_global(self, plan: Plan) -> None:
        if plan.home is not plan.scope and plan.owner is None:
            for node in shared_globals(plan)[:1]:
                self._edits.expressions[node] = lambda new: _with_name(new, plan.name)

    # -- under a condition

    def _complete(self, plan: Plan) -> None:
        """Where a session is made under a condition and used elsewhere, the other branches make one of level O0."""
        node: cst.CSTNode = plan.statement
        while True:
            branch = self._names.parent(node)
            owner = self._names.parent(branch) if branch is not None else None
            if not isinstance(owner, (cst.If, cst.Else)) or not isinstance(branch, cst.IndentedBlock):
                return
            place = block_around(self._names, owner)
            if place is None:
                return
            whole = place[0].body[place[1]]
            if not isinstance(whole, cst.If) or not self._used_outside(whole):
                return
            repeated = is_repeated(self._names, plan.scope, whole, plan.models, plan.call)
            if repeated or not is_bound_before(self._names, self._scopes, plan, whole):
                self._edits.doubt(
                    plan.call, f"amp.initialize under a condition{' in a loop' if repeated else ''}",
                    f"write `{plan.text} = preamp.prepare(model, optimizer, level='O0')` where it does not hold, "
                    "so that there is a session whatever the condition",
                )  # fmt: skip
                return
            before = self._edits.statements.get(whole)
            if before is None:
                self._edits.statements[whole] = lambda new, plan=plan: [self._completed(plan, new)]  # type: ignore[misc]
            node = whole

    def _used_outside(self, whole: cst.If) -> bool:
        start, end = self._names.span(whole)
        edits = self._edits
        plans = {plan.statement for plan in self._sessions.plans}
        nodes = [*edits.expressions, *(s for s in edits.statements if s not in plans), *edits.arguments]
        return any(not start <= self._names.line(node) <= end for node in nodes if not isinstance(node, cst.If))

    def _completed(self, plan: Plan, new: Statement) -> Statement:
        assert isinstance(new, cst.If)
        given = [self._names.code(plan.options.models)]
        given.append("None" if plan.options.optimizers is None else self._names.code(plan.options.optimizers))
        extra = "".join(f", {keyword}={text}" for keyword, text in self._losses(plan))
        line = self._names.statement(f'{plan.text} = preamp.prepare({", ".join(given)}, level="O0"{extra})\n')
        return self._filled(new, plan.text, line)

    def _filled(self, node: cst.If, text: str, line: Statement) -> cst.If:
        node = node.with_changes(body=self._with_line(node.body, text, line))
        if node.orelse is None:
            return node.with_changes(orelse=cst.Else(cst.IndentedBlock([line])))
        if isinstance(node.orelse, cst.If):
            return node.with_changes(orelse=self._filled(node.orelse, text, line))
        return node.with_changes(orelse=node.orelse.with_changes(body=self._with_line(node.orelse.body, text, line)))

    def _with_line(self, body: cst.BaseSuite, text: str, line: Statement) -> cst.BaseSuite:
        made = re.search(rf"(?m)^\s*{re.escape(text)} = preamp\.prepare\(", self._names.code(body))
        if made is not None or not isinstance(body, cst.IndentedBlock) or _ends(self._names.code(body)):
            return body
        return body.with_changes(body=[*body.body, line.deep_clone()])

    # -- registered functions

    def _register(self, call: cst.Call) -> None:
        names = self._names
        what = names.apex(call.func)
        assert what is not None
        method, decorator = _RULES[what]
        small = names.parent(call)
        statement = names.parent(small) if small is not None else None
        if (
            len(call.args) != 2 or not isinstance(small, cst.Expr)
            or not isinstance(statement, cst.SimpleStatementLine) or len(statement.body) != 1
        ):  # fmt: skip
            return
        owner, name = call.args[0].value, literal(call.args[1].value, None)
        if not isinstance(name, str) or not name.isidentifier():
            return
        self._edits.handled.add(call.func)
        if not names.is_any(owner, _TORCH):
            text = f"{names.code(owner)}.{name}"
            self._edits.expressions[call] = lambda _: cst.parse_expression(f"preamp.{decorator}({text})")
            self._edits.statements[statement] = lambda new: [_assigned(new, text)]
            return
        rule = f'.{method}("{name}")'
        try:
            getattr(OpRules(), method)(name)
        except PolicyError:
            self._edits.say(
                call, f"{what}(..., {name!r})",
                f"preamp's rules know no operator of this name: see `preamp rules`, or wrap the function of yours that "
                f"calls it with preamp.{decorator}",
            )  # fmt: skip
            return
        if not self._sessions.plans:
            write = f"write `ops=preamp.OpRules(){rule}` in the call of preamp.prepare"
            self._edits.say(call, f"{what}(..., {name!r})", write)
            return
        if rule not in self._rules:
            self._rules.append(rule)
        self._edits.statements[statement] = lambda _: []


def _assignment(target: str, value: cst.BaseExpression) -> cst.Assign:
    """`target = value`."""
    return cst.Assign([cst.AssignTarget(cst.parse_expression(target))], value)  # type: ignore[arg-type]


def _assigned(statement: Statement, text: str) -> Statement:
    assert isinstance(statement, cst.SimpleStatementLine)
    small = statement.body[0]
    assert isinstance(small, cst.Expr)
    return statement.with_changes(body=[_assignment(text, small.value)])


def _with_name(node: cst.CSTNode, name: str) -> cst.CSTNode:
    assert isinstance(node, cst.Global)
    names = [item.with_changes(comma=cst.MaybeSentinel.DEFAULT) for item in node.names]
    return node.with_changes(names=[*names, cst.NameItem(cst.Name(name))])


def _ends(code: str) -> bool:
    last = code.strip().rpartition("\n")[2].strip()
    return re.match(r"(return|raise|continue|break|sys\.exit|exit\()", last) is not None


def shared_globals(plan: Plan) -> list[cst.Global]:
    """The statements by which a function assigns its model or optimizer to the module's names."""
    roots = {root(text) for text in (*plan.models, *plan.optimizers)}
    inside = (node for node in walk(plan.scope.node) if isinstance(node, cst.Global))
    return [node for node in inside if plan.scope.is_function and roots & {item.name.value for item in node.names}]
