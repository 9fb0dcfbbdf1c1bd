"""Where sessions are made, what they are called, and how every place that needs one gets at it."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

import libcst as cst

from ._calls import literal
from ._names import Names, dotted
from ._options import Options, read
from ._scopes import Scope, Scopes, family


@dataclass(eq=False)
class Plan:
    """A call of `amp.initialize` that becomes a session."""

    call: cst.Call
    statement: cst.SimpleStatementLine
    scope: Scope
    options: Options
    models: list[str]
    optimizers: list[str]
    first: str | None
    """A statement that has to come before: the assignment of what the targets are called."""
    owner: str | None
    """"self" or another chain of names that the session becomes an attribute of."""
    home: Scope
    """The scope whose name the session is."""
    name: str = ""
    several: bool = False
    """Whether it may have more than one optimizer."""
    loss_names: dict[int, str] = field(default_factory=dict)

    @property
    def text(self) -> str:
        """How its own scope spells the session."""
        return f"{self.owner}.{self.name}" if self.owner else self.name


@dataclass(frozen=True)
class Access:
    """How a place spells a session."""

    text: str
    plan: Plan


def elements(node: cst.BaseExpression | None) -> list[cst.BaseExpression]:
    """What stands in a list, or the thing itself."""
    if node is None:
        return []
    if isinstance(node, (cst.List, cst.Tuple)):
        return [element.value for element in node.elements]
    return [node]


def find_plans(names: Names, scopes: Scopes) -> tuple[list[Plan], list[cst.Call]]:
    """The calls of `amp.initialize` that can be translated, and those that cannot."""
    plans: list[Plan] = []
    others: list[cst.Call] = []
    for scope in scopes.all:
        for call in scope.calls:
            if names.apex(call.func) == "amp.initialize":
                plan = _plan(names, scope, call)
                if plan is None:
                    others.append(call)
                else:
                    plans.append(plan)
    return plans, others


def _plan(names: Names, scope: Scope, call: cst.Call) -> Plan | None:
    options = read(call, names.code)
    small = names.parent(call)
    statement = names.parent(small) if small is not None else None
    if options is None or not isinstance(statement, cst.SimpleStatementLine) or len(statement.body) != 1:
        return None
    given = [options.models] if options.optimizers is None else [options.models, options.optimizers]
    if isinstance(small, cst.Assign) and len(small.targets) == 1:
        target: cst.BaseExpression = small.targets[0].target
        targets: list[cst.BaseExpression] = [target]
        if len(given) == 2:
            if not isinstance(target, (cst.Tuple, cst.List)) or len(target.elements) != 2:
                return None
            targets = [element.value for element in target.elements]
    elif isinstance(small, cst.Expr):
        targets = given
    else:
        return None
    same = [names.code(one) for one in targets] == [names.code(one) for one in given]
    first = None
    if not same:
        left = ", ".join(names.code(one) for one in targets)
        right = ", ".join(names.code(one) for one in given)
        first = f"{left} = {right}" if len(targets) > 1 or len(given) == 1 else None
    optimizers = elements(targets[1]) if len(targets) > 1 else []
    models = elements(targets[0])
    plan = Plan(
        call, statement, scope, options, [names.code(m) for m in models], [names.code(o) for o in optimizers], first,
        _owner([*models, *optimizers]), scope,
    )  # fmt: skip
    listed = len(targets) > 1 and isinstance(targets[1], (cst.List, cst.Tuple))
    plan.several = len(optimizers) > 1 or (
        not listed and any(re.search(r"(optims|optimizers|opts)$", o) for o in plan.optimizers)
    )
    if first is not None:
        plan.options.models = targets[0]
        plan.options.optimizers = targets[1] if len(targets) > 1 else None
    return plan


def _owner(targets: list[cst.BaseExpression]) -> str | None:
    for target in targets:
        while isinstance(target, cst.Subscript):
            target = target.value
        if isinstance(target, cst.Attribute):
            return dotted(target.value)
    return None


class Sessions:
    """Which session a place may use, by which name; parameters are added to functions on the way there."""

    def __init__(self, names: Names, scopes: Scopes, plans: list[Plan]) -> None:
        self.names, self.scopes, self.plans = names, scopes, plans
        self.given: dict[Scope, Access] = {}
        """Functions that get the session as a parameter, and classes whose constructor gets it and keeps it."""
        self.arguments: dict[cst.CSTNode, tuple[str, str]] = {}
        """Calls that hand the session on: the parameter, and its text there."""
        self._failed: set[Scope] = set()
        self._name_all()

    def _name_all(self) -> None:
        taken = self.names.identifiers
        base = next(n for n in ("session", "amp_session", "preamp_session", "migrated_session") if n not in taken)
        groups: dict[tuple[Scope, str | None], dict[tuple[str, ...], list[Plan]]] = {}
        for plan in self.plans:
            key = tuple(plan.optimizers or plan.models)
            home = plan.scope.own_class() if plan.owner else None
            groups.setdefault((home or plan.home, plan.owner), {}).setdefault(key, []).append(plan)
        for group in groups.values():
            for key, members in group.items():
                last = re.sub(r"\W+", "_", key[0].rpartition(".")[2]).strip("_") if key else "model"
                for plan in members:
                    plan.name = base if len(group) == 1 else f"{base}_{last.lower()}"

    def settle_owners(self, needy: list[Scope]) -> None:
        """A session made in a method becomes the object's if other methods need one."""
        for plan in self.plans:
            own, method = plan.scope.own_class(), plan.scope.method()
            if plan.owner or own is None or method is None or not method.parameters():
                continue
            others = [scope for scope in needy if scope.own_class() is own and scope.method() is not method]
            if any(self.visible(scope) is None for scope in others):
                plan.owner = method.parameters()[0]

    def reach(self, scope: Scope, optimizer: str | None = None) -> Access | None:
        """The session of a place; if need be, functions of this file hand it on as a parameter."""
        found = self.visible(scope, optimizer)
        if found is not None:
            return found
        outer = scope.outermost()
        if outer is None or not self._hand_on(outer, set()):
            return None
        return self.visible(scope, optimizer)

    # -- looking

    def visible(self, scope: Scope, optimizer: str | None = None) -> Access | None:
        """The session of a place, without adding parameters."""
        for each in scope.outward():
            if each.is_function or each is self.scopes.module:
                here = [p for p in self.plans if p.home is each and not self._of_self(p)]
                found = _choose(here, optimizer)
                if found is not None:
                    return Access(found.text, found)
                if each in self.given:
                    return self.given[each]
        own, method = scope.own_class(), scope.method()
        if own is None or method is None or not method.parameters():
            return None
        me = method.parameters()[0]
        relatives = list(family(self.scopes, own))
        found = _choose([p for p in self.plans if self._of_self(p) and p.scope.own_class() in relatives], optimizer)
        if found is not None:
            return Access(f"{me}.{found.name}", found)
        for each in relatives:
            if each in self.given:
                return Access(f"{me}.{self.given[each].text.rpartition('.')[2]}", self.given[each].plan)
        return None

    def _of_self(self, plan: Plan) -> bool:
        method = plan.scope.method()
        return method is not None and plan.owner is not None and plan.owner == (method.parameters() or [""])[0]

    # -- handing on

    def _hand_on(self, function: Scope, asked: set[Scope]) -> bool:
        """Give a function, or the class of a method, the session; False if not every caller is known and has one."""
        parent = function.parent
        assert parent is not None
        receiver = parent if isinstance(parent.node, cst.ClassDef) else function
        if receiver in self.given or receiver in asked:
            return True
        if receiver in self._failed or receiver.parent is not self.scopes.module:
            return False
        asked.add(receiver)
        found = self._callers(receiver, asked)
        plans = {access.plan.name: access.plan for access in found.values() if access is not None}
        if len(plans) != 1:
            self._failed.add(receiver)
            return False
        ((name, plan),) = plans.items()
        self.given[receiver] = Access(name, plan)
        for call, access in found.items():
            again = None if access is None else self.visible(self.scopes.of[call])
            self.arguments[call] = (name, name if again is None else again.text)
        return True

    def _callers(self, receiver: Scope, asked: set[Scope]) -> dict[cst.CSTNode, Access | None]:
        """Calls of a function or class with the session there, None in itself; empty if some caller has none."""
        assert isinstance(receiver.node, (cst.FunctionDef, cst.ClassDef))
        if isinstance(receiver.node, cst.ClassDef) and constructor(self.scopes, receiver) is None:
            return {}
        if isinstance(receiver.node, cst.FunctionDef) and receiver.node.decorators:
            return {}
        found: dict[cst.CSTNode, Access | None] = {}
        for reference in self.names.references(receiver.node):
            call = self.names.parent(reference)
            if not isinstance(call, cst.Call) or call.func is not reference:
                return {}
            around = self.scopes.of[call]
            if receiver in around.outward():
                found[call] = None
                continue
            access, outer = self.visible(around), around.outermost()
            if access is None and outer is not None and self._hand_on(outer, asked):
                access = self.visible(around)
            elif access is not None and access.plan.home is around:
                begin = self.names.line(access.plan.statement)
                access = access if self.names.line(call) >= begin else None  # it is called before there is a session
            if access is None:
                return {}
            found[call] = access
        return found


def constructor(scopes: Scopes, own: Scope) -> Scope | None:
    """The `__init__` of a class of this file."""
    return next((s for s in scopes.all if s.parent is own and s.is_function and s.name == "__init__"), None)


def _choose(plans: list[Plan], optimizer: str | None) -> Plan | None:
    """The plan with this optimizer; any, if all are one session."""
    fitting = [p for p in plans if optimizer is not None and any(_same(o, optimizer) for o in p.optimizers)]
    if fitting:
        return fitting[0]
    trained = [p for p in plans if p.optimizers] or plans
    return trained[0] if len({p.text for p in trained}) == 1 else None


def _same(known: str, given: str) -> bool:
    return known == given or (given.startswith(f"{known}[") and given.endswith("]"))


def name_losses(plan: Plan, uses: list[tuple[cst.BaseExpression, cst.BaseExpression | None]]) -> None:
    """Names for the losses of a session that has several: those of the variables, where they tell them apart."""
    if plan.options.losses is None or not plan.options.losses.isdecimal():
        return
    count = int(plan.options.losses)
    seen: dict[int, set[str]] = {}
    for loss, number in uses:
        index = literal(number, 0)
        text = dotted(loss)
        if isinstance(index, int) and text is not None:
            seen.setdefault(index, set()).add(text.rpartition(".")[2])
    told = {index: next(iter(texts)) for index, texts in seen.items() if len(texts) == 1}
    apart = len(set(told.values())) == len(told) and set(told) == set(range(count))
    plan.loss_names = {index: told[index] if apart else f"loss{index}" for index in range(count)}


POSITIONS_OF_SCALE_LOSS = ("loss", "optimizers", "loss_id", "model", "delay_unscale", "delay_overflow_check")
