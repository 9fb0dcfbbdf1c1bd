"""What in a file makes it unsure that a translation trains as before; then its sessions stay with Apex."""

from __future__ import annotations

import re

import libcst as cst

from ._calls import literal
from ._edits import Edits
from ._effects import METHODS, Weights, is_harmless, knows, names_gradients
from ._flow import Flow, State
from ._names import Names, dotted, root
from ._scopes import Callees, Scope, Scopes, bases, family
from ._sessions import Plan, Sessions

_NOT_OPTIMIZERS = re.compile(
    r"sched|lr|warm|anneal|plateau|prof|env|timer|bar$|progress|meter|ema|swa|logger|writer|wandb|tracker|game|world|"
    r"simulat|curriculum|annealer|monitor|beta|temperature",
    re.I,
)
_INSIDE = re.compile(r"Optim(izer)?$|SGD$|Adam\w*$|LAMB$|Lamb$|Scheduler$|_LRScheduler$|Function$")
"""Classes whose own methods a session calls, or that are functions with a backward pass of their own."""
_TORCH_AMP = re.compile(r"^torch\.(cuda\.amp\.|cpu\.amp\.|amp\.|)(autocast_mode\.)?(autocast|GradScaler)$")
_CLEARED = ("zero_", "detach_")


class Doubts:
    """Looks a planned file through; what is found goes into `edits.doubts`."""

    def __init__(self, names: Names, scopes: Scopes, sessions: Sessions, edits: Edits) -> None:
        self._names, self._scopes, self._sessions, self._edits = names, scopes, sessions, edits
        self._callees, self._weights = Callees(scopes), Weights(names)
        self._single = len(sessions.plans) == 1 and not sessions.plans[0].several
        self._perhaps: list[tuple[cst.Call, Scope | None]] = []
        """Strangers in functions that nobody in this file calls; gradients wait there if a step follows."""

    def look(self) -> None:
        """Everything that speaks against a translation."""
        if not self._sessions.plans:
            return
        for scope in self._scopes.all:
            for call in scope.calls:
                self._call(scope, call)
        for node in self._names.nodes:
            if isinstance(node, cst.Attribute):
                self._attribute(node)
            if isinstance(node, (cst.Name, cst.Attribute)):
                self._torch_amp(node)
        for plan in self._sessions.plans:
            self._bound_anew(plan)
        Flow(self._scopes, self._callees, self._watch, self._weights.holds).walk()
        missing = {"step", "backward"} - {*self._edits.acts.values()}
        if len(missing) == 1 and not self._edits.doubts:
            what = missing.pop()
            self._doubt(
                self._sessions.plans[0].call, f"no {what} of the session is in sight, but its other half",
                f"session.{what}() where it is, and hand it the session",
            )  # fmt: skip

    # -- wherever it stands

    def _call(self, scope: Scope, call: cst.Call) -> None:
        if call in self._edits.acts or self._names.apex(call.func) is not None:
            return None
        func, name = call.func, self._names.code(call.func)
        if isinstance(func, cst.Attribute) and not self._inside(scope) and self._callees.of(scope, call) is None:
            receiver = self._names.code(func.value)
            if func.attr.value == "backward":
                return self._doubt(call, f"{name}() is a backward pass of its own", "session.backward(loss)")
            if func.attr.value == "step" and not self._is_other(scope, receiver):
                return self._doubt(call, f"{name}() is a step of its own", "session.step()")
            own = knows(scope, receiver) and receiver.removesuffix(".module") not in scope.models
            if own and func.attr.value not in METHODS:
                return self._doubt(
                    call, f"what {name}() does to gradients and weights is not known",
                    "session.unscale_() before it where it works on gradients, and session.step() for a step",
                )  # fmt: skip
        if name == "getattr" and any(literal(arg.value, None) == "grad" for arg in call.args[1:2]):
            return self._doubt(call, f"{self._names.code(call)} is read", "session.unscale_() before it")
        stranger = self._callees.of(scope, call) is None
        if stranger and any(q.rpartition(".")[2].startswith("clip_grad") for q in {name, *self._names.qualified(func)}):
            return self._doubt(
                call, f"{name}() clips gradients of what is not in sight", "session.clip_grad_norm_(max_norm)"
            )
        optimizers = [a for a in call.args if (dotted(a.value) or "") in scope.optimizers]
        if optimizers and stranger and not is_harmless(self._names, call):
            self._doubt(
                call, f"{name}() is given the optimizer, and may step it, or wrap its step",
                "the loop with session.backward(loss) and session.step(), and hand it the session",
            )  # fmt: skip
        return None

    def _is_other(self, scope: Scope, receiver: str) -> bool:
        """Whether a thing with a `step` is a scheduler, a profiler or an environment, and no optimizer."""
        if _NOT_OPTIMIZERS.search(receiver.rpartition(".")[2]) is not None:
            return True
        return any(
            target == receiver and isinstance(value, cst.Call)
            and _NOT_OPTIMIZERS.search((dotted(value.func) or "").rpartition(".")[2]) is not None
            for each in self._scopes.all for target, value in each.assigns
            if each in scope.outward() or "." in receiver
        )  # fmt: skip

    def _inside(self, scope: Scope) -> bool:
        """Whether this is in an optimizer, a scheduler or an autograd function, whose methods others call."""
        for each in scope.outward():
            if isinstance(each.node, cst.ClassDef):
                made_from = set().union(
                    *(bases(c.node) for c in family(self._scopes, each) if isinstance(c.node, cst.ClassDef))
                )
                return any(_INSIDE.search(base) is not None for base in made_from)
        return False

    def _attribute(self, node: cst.Attribute) -> None:
        scope, parent, what = self._scopes.of[node], self._names.parent(node), node.attr.value
        called = isinstance(parent, cst.Call) and parent.func is node
        if what == "grad" and not called and not self._inside(scope) and not self._is_cleared(node, parent):
            self._doubt(
                node, f"{self._names.code(node)} is read or changed",
                "session.unscale_() before it, if it is between backward and step: until then gradients are scaled",
            )  # fmt: skip
        elif what in ("step", "backward") and not called and isinstance(parent, (cst.Arg, cst.Assign, cst.Return)):
            receiver = self._names.code(node.value)
            if what == "backward" or (knows(scope, receiver) and receiver not in scope.models):
                self._doubt(
                    node, f"{self._names.code(node)} is handed over, to be called elsewhere",
                    f"session.{what}" if what == "step" else "session.backward, which takes the loss",
                )  # fmt: skip

    def _is_cleared(self, node: cst.Attribute, parent: cst.CSTNode | None) -> bool:
        """Whether a gradient is only compared with None, made None, or zeroed; or it is no tensor's gradient."""
        if isinstance(parent, cst.Attribute) and parent.attr.value == "data":
            parent = self._names.parent(parent)
        if isinstance(parent, cst.Attribute):
            return parent.attr.value in _CLEARED
        if isinstance(parent, cst.AssignTarget):
            assign = self._names.parent(parent)
            return isinstance(assign, cst.Assign) and dotted(assign.value) == "None"
        if isinstance(parent, cst.Comparison):
            return all(isinstance(c.operator, (cst.Is, cst.IsNot)) for c in parent.comparisons)
        return any(q.endswith("autograd.grad") for q in self._names.qualified(node))

    def _torch_amp(self, node: cst.Name | cst.Attribute) -> None:
        parent = self._names.parent(node)
        if isinstance(parent, (cst.ImportAlias, cst.ImportFrom)) or dotted(node) is None:
            return
        foreign = isinstance(node, cst.Attribute) and node.attr.value == "autocast"
        if foreign or any(_TORCH_AMP.match(q) for q in self._names.qualified(node)):
            if isinstance(parent, cst.Attribute) and parent.value is not node:
                return
            self._doubt(
                node, f"{self._names.code(node)} is another mixed precision beside Apex's: in a session's region it "
                "changes the dtype of what runs there, and a session does not unscale what it scaled",
                "only the session's own, `with session.autocast():` and session.backward(loss), or only this one",
            )  # fmt: skip

    def _bound_anew(self, plan: Plan) -> None:
        """A model or optimizer that gets another value after `amp.initialize`: the session keeps the first."""
        begin = self._names.line(plan.statement)
        last = max((self._names.line(node) for node in self._edits.acts), default=0)
        for scope in self._scopes.all:
            for target, value in scope.assigns:
                line = self._names.line(value)
                if value is plan.call or not isinstance(value, cst.Call) or self._names.apex(value.func) is not None:
                    continue
                own = {root(dotted(arg.value) or "") for arg in value.args} | {root(self._names.code(value.func))}
                later = scope is not plan.scope or begin < line < last
                if target in scope.optimizers and later and own & {root(o) for o in scope.optimizers}:
                    self._doubt(
                        value, f"{target} is wrapped after amp.initialize", f"a session for what wraps {target}"
                    )
                elif scope is plan.scope and begin < line < last and self._is_replaced(plan, target, own):
                    self._doubt(
                        value, f"{target} is made anew after amp.initialize, which knows the old one only",
                        "preamp.prepare(...) again behind it",
                    )  # fmt: skip

    def _is_replaced(self, plan: Plan, target: str, own: set[str]) -> bool:
        return target in (*plan.models, *plan.optimizers) and root(target) not in own

    # -- between backward and step

    def _watch(self, call: cst.Call, scope: Scope, state: State, holding: frozenset[str]) -> State:
        act = self._edits.acts.get(call)
        name = call.func.attr.value if isinstance(call.func, cst.Attribute) else ""
        if act == "backward" or (act is None and name == "backward" and self._callees.of(scope, call) is None):
            if "true" in state:
                self._doubt(
                    call, "gradients are accumulated over a clipping of some of them",
                    "session.clip_grad_norm_(max_norm) for all of them, or clip once, before the step",
                )  # fmt: skip
            return frozenset({"open"})
        if act == "unscale":
            return frozenset({"true"})
        if act == "step":
            self._stepped(call, scope, state)
            return frozenset({"done"}) if self._single else state
        if act == "zero" or (act is None and name == "zero_grad"):
            kept = state & {"none", "unknown"}
            return (kept | {"done"} if state - kept else kept) if self._single else state
        if act is None and state & {"open", "unknown"} and self._is_stranger(call, scope, holding):
            if "open" in state:
                self._stranger(call)
            else:
                self._perhaps.append((call, scope.outermost()))
        return state

    def _stepped(self, call: cst.Call, scope: Scope, state: State) -> None:
        if state == {"none"} or (state == {"done"} and self._single):
            self._doubt(
                call, f"{self._names.code(call.func)}() comes before a backward pass",
                "session.step() only where session.backward(loss) has run before: it raises without gradients",
            )  # fmt: skip
        if "unknown" in state:
            for each, where in self._perhaps:
                if where is scope.outermost():
                    self._stranger(each)

    def _is_stranger(self, call: cst.Call, scope: Scope, holding: frozenset[str]) -> bool:
        """Whether a call may read or change gradients, out of sight."""
        if self._names.apex(call.func) is not None or self._callees.of(scope, call) is not None:
            return False
        if knows(scope, self._names.code(call.func)) or is_harmless(self._names, call):
            return False  # a forward pass; a function that is known
        given = [arg.value for arg in call.args]
        if isinstance(call.func, cst.Attribute) and self._is_inherited(scope, call.func):
            given.append(call.func.value)
        return names_gradients(call) or any(self._weights.holds(each, scope, holding) for each in given)

    def _is_inherited(self, scope: Scope, method: cst.Attribute) -> bool:
        """Whether it is a method of the object itself that is none of this file's."""
        text, around = self._names.code(method), scope.method()
        if around is None or dotted(method.value) not in around.parameters()[:1]:
            return False
        return not any(target == text for scope in self._scopes.all for target, _ in scope.assigns)

    def _stranger(self, call: cst.Call) -> None:
        self._doubt(
            call, f"{self._names.code(call.func)}() runs between backward and step, and may work on gradients, which "
            "are scaled there",
            "session.unscale_() before it, or session.clip_grad_norm_(max_norm) if clipping is all it does",
        )  # fmt: skip

    def _doubt(self, node: cst.CSTNode, seen: str, write: str) -> None:
        self._edits.doubt(node, seen, f"write {write}")
