"""Scaled backward passes, clipping, steps and states: what a session's methods take the place of."""

from __future__ import annotations

import re
from collections.abc import Sequence

import libcst as cst

from ._calls import literal, named_arguments
from ._edits import Edits, unindented
from ._names import Names, Statement, calls, chains, dotted, mentions, walk
from ._regions import Regions, block_around
from ._scopes import Scope, Scopes
from ._sessions import POSITIONS_OF_SCALE_LOSS, Access, Sessions, elements, name_losses

_CLIPS = {
    f"torch.nn.utils{part}.{name}": name.rstrip("_") + "_"
    for part in ("", ".clip_grad")
    for name in ("clip_grad_norm_", "clip_grad_norm", "clip_grad_value_")
}
_CLIP_POSITIONS = ("parameters", "max_norm", "norm_type", "error_if_nonfinite", "foreach")
_LINEAR = (cst.Multiply, cst.Divide)
_IN_BODY = re.compile(r"\.step\(|clip_grad|master_params|\.grad\b|\.zero_grad\(")


class Uses:
    """Plans the changes around sessions that exist."""

    def __init__(self, names: Names, scopes: Scopes, sessions: Sessions, edits: Edits) -> None:
        self._names, self._scopes, self._sessions, self._edits = names, scopes, sessions, edits
        self._regions = Regions(names, scopes, sessions, edits)
        self._left: set[cst.CSTNode] = set()
        """Everything in blocks that are left as they are."""
        self._losses: dict[Scope, dict[str, str]] = {}
        """In a function, losses that have a scaled backward pass, with the words that follow the loss in it."""
        self.plain: list[cst.Call] = []
        """Backward passes of modes without amp that became the session's."""

    def needy(self) -> list[Scope]:
        """Scopes in which something of a session is used."""
        names = ("amp.scale_loss", "amp.master_params", "amp.state_dict", "amp.load_state_dict")
        return [
            scope for scope in self._scopes.all
            if any(self._names.apex(call.func) in names or self._steps(scope, call) for call in scope.calls)
        ]  # fmt: skip

    def plan(self) -> None:
        """Everything that a session's methods take the place of."""
        scaled = [
            (scope, call)
            for scope in self._scopes.all
            for call in scope.calls
            if self._names.apex(call.func) == "amp.scale_loss"
        ]
        for plan in self._sessions.plans:
            uses = [named_arguments(call, POSITIONS_OF_SCALE_LOSS) or {} for _, call in scaled]
            name_losses(plan, [(u["loss"], u.get("loss_id")) for u in uses if "loss" in u])
        for scope, call in scaled:
            self._scale_loss(scope, call)
        for scope in self._scopes.all:
            for call in scope.calls:
                if call not in self._left:
                    self._call(scope, call)

    # -- scale_loss

    def _scale_loss(self, scope: Scope, call: cst.Call) -> None:
        names = self._names
        item = names.parent(call)
        block = names.parent(item) if item is not None else None
        given = named_arguments(call, POSITIONS_OF_SCALE_LOSS)
        if (
            not isinstance(item, cst.WithItem)
            or not isinstance(block, cst.With)
            or given is None
            or "loss" not in given
        ):
            return
        optimizers = elements(given.get("optimizers"))
        access = self._sessions.reach(scope, dotted(optimizers[0]) if optimizers else None)
        if access is None:
            return
        self._edits.handled.add(call.func)
        scaled = item.asname.name if item.asname is not None else None
        loss = given["loss"]
        named = self._loss_name(access, given.get("loss_id"))
        name = scaled.value if isinstance(scaled, cst.Name) else ""
        passes = [each for each in calls(block.body) if _method(each) == "backward" and mentions(each.func, {name})]
        trouble = self._trouble(block, name, passes) if name else "it has no `as`"
        if trouble is not None:
            self._left.update(walk(block))
            self._edits.handled.update(walk(block))
            self._regions.around(scope, access, loss, block)
            self._edits.doubt(
                call, f"with amp.scale_loss(...): {trouble}",
                f"put `{access.text}.backward({names.code(loss)}{named})` in its place, and what works on "
                f"gradients after it, behind `{access.text}.unscale_()`",
            )  # fmt: skip
            return
        if "delay_overflow_check" in given and literal(given["delay_overflow_check"], None) is not False:
            self._edits.say(
                call, "delay_overflow_check", "left out: a session looks at the gradients once, in step()", False
            )
        text = names.code(loss)
        if (
            any("." not in (dotted(c.func) or "") or mentions(c, scope.models) for c in calls(loss))
            and len(block.items) == 1
        ):
            text = self._hoisted(scope, access, block, loss)
        elif not self._regions.around(scope, access, loss, block):
            self._edits.say(
                call, f"the statements that make {text!r} from the model are not in sight",
                f"put the forward pass and the loss inside `with {access.text}.autocast():`",
            )  # fmt: skip
        self._losses.setdefault(scope, {})[text] = named
        for inner in passes:
            assert isinstance(inner.func, cst.Attribute)
            self._backward(inner, access, _substituted(names, inner.func.value, name, text), named)
        self._edits.statements[block] = lambda new: self._without_item(new, block.items.index(item))

    def _trouble(self, block: cst.With, scaled: str, passes: Sequence[cst.Call]) -> str | None:
        """Why a body with these backward passes cannot be taken out of its `with`; None if it can."""
        for each in passes:
            if not isinstance(self._names.parent(each), cst.Expr) or any(arg.keyword is None for arg in each.args):
                return "what backward() is given, or gives, is not understood"
            if not isinstance(each.func, cst.Attribute) or not _is_linear(each.func.value, scaled):
                return "backward() runs from something made of the scaled loss"
        if not passes or sum(text == scaled for _, text in chains(block.body)) != len(passes):
            return "the scaled loss is used otherwise than by .backward()"
        if _IN_BODY.search(self._names.code(block.body)):
            return "its body works on gradients that Apex has not unscaled yet"
        return None

    def _backward(self, call: cst.Call, access: Access, loss: str, named: str) -> None:
        rest = "".join(f", {self._names.code(arg).rstrip(', ')}" for arg in call.args)
        text = f"{access.text}.backward({loss}{named}{rest})"
        self._edits.acts[call] = "backward"
        self._edits.expressions[call] = lambda _: cst.parse_expression(text)

    def _hoisted(self, scope: Scope, access: Access, block: cst.With, loss: cst.BaseExpression) -> str:
        """A loss that is computed in the call itself gets a name, and its region."""
        name = "loss" if "loss" not in self._names.identifiers else "loss_of_session"
        text = self._names.code(loss)
        text = f"({text})" if "\n" in text else text
        self._edits.before.setdefault(block, []).append(f"with {access.text}.autocast():\n    {name} = {text}")
        if not mentions(loss, scope.models):
            self._regions.around(scope, access, loss, block)
        return name

    def _loss_name(self, access: Access, number: cst.BaseExpression | None) -> str:
        count = access.plan.options.losses
        if count is None:
            return ""
        index = literal(number, 0)
        if isinstance(index, int):
            return f', name="{access.plan.loss_names.get(index, f"loss{index}")}"'
        assert number is not None
        return f', name=f"loss{{{self._names.code(number)}}}"'

    def _without_item(self, new: Statement, index: int) -> list[Statement]:
        assert isinstance(new, cst.With)
        if len(new.items) > 1:
            items = [item for i, item in enumerate(new.items) if i != index]
            items[-1] = items[-1].with_changes(comma=cst.MaybeSentinel.DEFAULT)
            return [new.with_changes(items=items)]
        return unindented(new)

    # -- everything else

    def _call(self, scope: Scope, call: cst.Call) -> None:
        names = self._names
        what = names.apex(call.func)
        if what in ("amp.state_dict", "amp.load_state_dict", "amp.disable_casts"):
            self._state(scope, call, what)
            return
        clip = next((_CLIPS[q] for q in names.qualified(call.func) if q in _CLIPS), None)
        if clip is not None:
            self._clip(scope, call, clip)
            return
        step = self._steps(scope, call)
        if step is not None:
            optimizer, method = step
            access = self._sessions.reach(scope, optimizer)
            if access is None:
                return
            if method == "step" and call.args:
                self._edits.doubt(
                    call, f"{optimizer}.step with a closure",
                    f"a session's step takes none: run forward and {access.text}.backward(loss), then "
                    f"{access.text}.step()",
                )  # fmt: skip
                return
            args = [names.code(arg).rstrip(", ") for arg in call.args]
            if access.plan.several:
                args.append(optimizer if method == "step" else f"optimizer={optimizer}")
            self._edits.acts[call] = "step" if method == "step" else "zero"
            self._replace(call, f"{access.text}.{method}({', '.join(args)})")
            self._fold_around(call)
            return
        if isinstance(call.func, cst.Attribute) and call.func.attr.value == "backward":
            loss = names.code(call.func.value.with_changes(lpar=(), rpar=()))
            named = self._losses.get(scope, {}).get(loss)
            access = self._sessions.visible(scope)
            plain = call not in self._edits.expressions and all(arg.keyword is not None for arg in call.args)
            if named is not None and access is not None and plain:
                self._backward(call, access, loss, named)
                self.plain.append(call)

    def _steps(self, scope: Scope, call: cst.Call) -> tuple[str, str] | None:
        """(optimizer, "step" or "zero_grad") if that is what a call does to an optimizer of a session."""
        if not isinstance(call.func, cst.Attribute) or call.func.attr.value not in ("step", "zero_grad"):
            return None
        text = self._names.code(call.func.value)
        bare = text.partition("[")[0]
        if text in scope.optimizers or (bare != text and bare in scope.optimizers):
            return text, call.func.attr.value
        return None

    def _state(self, scope: Scope, call: cst.Call, what: str) -> None:
        casts = what == "amp.disable_casts"  # often in a model, which exists before its session and cannot be given it
        access = self._sessions.visible(scope) if casts else self._sessions.reach(scope)
        if access is None:
            return
        args = ", ".join(self._names.code(arg).rstrip(", ") for arg in call.args)
        if what == "amp.disable_casts":
            self._replace(call, f"{access.text}.autocast(enabled=False)")
        elif what == "amp.state_dict" and not args:
            self._replace(call, f"{access.text}.state_dict()")
        elif what == "amp.load_state_dict":
            self._replace(call, f"{access.text}.load_state_dict({args})")
            self._edits.say(
                call, "amp.load_state_dict", "translated; a session's state has masters and counters too, and one that "
                "Apex saved is taken over by preamp.checkpoint.adopt_scale(session, state), beside model and optimizer",
                False,
            )  # fmt: skip
        else:
            return
        self._edits.handled.add(call.func)

    def _clip(self, scope: Scope, call: cst.Call, method: str) -> None:
        names = self._names
        given = named_arguments(call, _CLIP_POSITIONS)
        given = {("max_norm" if k == "clip_value" else k): v for k, v in given.items()} if given is not None else None
        if given is None or "parameters" not in given or "max_norm" not in given:
            return
        inner = self._inner_call(given["parameters"])
        masters = inner is not None and names.apex(inner.func) == "amp.master_params" and len(inner.args) == 1
        optimizer: str | None = None
        if masters and inner is not None:
            optimizer = names.code(inner.args[0].value)
        elif scope not in self._losses and not any(self._steps(scope, c) for c in scope.calls):
            return  # a function that trains something else
        access = self._sessions.reach(scope, optimizer)
        if access is None:
            return
        if not masters:
            whole = (
                inner is not None and isinstance(inner.func, cst.Attribute) and inner.func.attr.value == "parameters"
            )
            model = names.code(inner.func.value) if whole and isinstance(inner.func, cst.Attribute) else ""  # type: ignore[union-attr]
            if access.plan.several or model.removesuffix(".module") not in scope.models:
                self._true_first(call, access)
                return
        args = [names.code(given["max_norm"])]
        if "norm_type" in given and method == "clip_grad_norm_":
            args.append(f"norm_type={names.code(given['norm_type'])}")
        if access.plan.several and optimizer is not None:
            args.append(f"optimizer={optimizer}")
        if inner is not None:
            self._edits.handled.add(inner.func)
        self._edits.acts[call] = "clip"
        self._replace(call, f"{access.text}.{method}({', '.join(args)})")
        self._fold_around(call)

    def _inner_call(self, node: cst.BaseExpression) -> cst.Call | None:
        """`f(...)` of `f(...)`, `list(f(...))`, `[p for p in f(...)]`, or `f(...) if amp else model.parameters()`."""
        if isinstance(node, cst.Call) and dotted(node.func) in ("list", "tuple") and len(node.args) == 1:
            node = node.args[0].value
        if isinstance(node, (cst.ListComp, cst.GeneratorExp)) and _is_plain(node):
            node = node.for_in.iter
        if isinstance(node, cst.IfExp):  # the masters with amp, the model's without: one session has both
            found = [each for each in (node.body, node.orelse) if isinstance(each, cst.Call)]
            masters = [each for each in found if self._names.apex(each.func) == "amp.master_params"]
            whole = [each for each in found if _method(each) == "parameters"]
            return masters[0] if masters and whole else None
        return node if isinstance(node, cst.Call) else None

    def _true_first(self, node: cst.CSTNode, access: Access) -> None:
        place = block_around(self._names, node)
        if place is None:
            return  # `Doubts` finds a clipping that nothing was done about
        block, index = place
        line = f"{access.text}.unscale_()"
        lines = self._edits.before.setdefault(block.body[index], [])
        if line not in lines:
            lines.append(line)
        self._edits.acts[node] = "unscale"

    def _fold_around(self, node: cst.CSTNode) -> None:
        for around in self._names.around(node):
            if isinstance(around, (cst.FunctionDef, cst.For, cst.While)):
                return
            if isinstance(around, cst.If):
                self._edits.conditions.add(around)

    def _replace(self, call: cst.Call, text: str) -> None:
        def new(updated: cst.CSTNode) -> cst.CSTNode:
            assert isinstance(updated, cst.Call)
            parsed = cst.parse_expression(text)
            assert isinstance(parsed, cst.Call)
            return parsed.with_changes(lpar=updated.lpar, rpar=updated.rpar)

        self._edits.expressions[call] = new


def _method(call: cst.Call) -> str | None:
    """The name of the method that is called."""
    return call.func.attr.value if isinstance(call.func, cst.Attribute) else None


def _is_plain(node: cst.ListComp | cst.GeneratorExp) -> bool:
    """Whether a comprehension gives what it runs over, all of it."""
    loop = node.for_in
    return loop.inner_for_in is None and not loop.ifs and dotted(node.elt) == dotted(loop.target)


def _is_linear(node: cst.BaseExpression, scaled: str) -> bool:
    """Whether an expression is the scaled loss, or its mean, sum, or a multiple of it."""
    if isinstance(node, cst.Name):
        return node.value == scaled
    if isinstance(node, cst.Call) and isinstance(node.func, cst.Attribute):
        return node.func.attr.value in ("mean", "sum") and not node.args and _is_linear(node.func.value, scaled)
    if isinstance(node, cst.BinaryOperation) and isinstance(node.operator, _LINEAR):
        left = mentions(node.left, {scaled})
        if left == mentions(node.right, {scaled}) or (not left and isinstance(node.operator, cst.Divide)):
            return False
        return _is_linear(node.left if left else node.right, scaled)
    return False


def _substituted(names: Names, node: cst.BaseExpression, scaled: str, loss: str) -> str:
    """The text of an expression with the loss in place of the scaled loss."""
    if isinstance(node, cst.Name):
        return loss
    simple = re.fullmatch(r"[\w.]+", loss) is not None
    bare = node.with_changes(lpar=(), rpar=())
    return re.sub(rf"\b{scaled}\b", loss if simple else f"({loss})", names.code(bare))
