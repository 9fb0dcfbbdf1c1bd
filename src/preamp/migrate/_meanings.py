"""Which names stand for models and optimizers of sessions: by scope, by alias, by argument."""

from __future__ import annotations

import libcst as cst

from ._calls import bound
from ._names import Names, dotted, root
from ._scopes import Callees, Scope, Scopes
from ._sessions import Plan, elements

_WRAPPERS = {"DistributedDataParallel", "DataParallel", "compile", "convert_syncbn_model", "convert_sync_batchnorm"}


def spread_meanings(names: Names, scopes: Scopes, plans: list[Plan]) -> None:
    """Find out which names stand for models and optimizers of sessions: by scope, by alias, by argument."""
    for plan in plans:
        for scope in {plan.scope, plan.home}:
            scope.models.update(plan.models)
            scope.optimizers.update(plan.optimizers)
    for scope in scopes.all:
        for call in scope.calls:
            if names.apex(call.func) in ("amp.scale_loss", "amp.master_params"):
                position = 1 if names.apex(call.func) == "amp.scale_loss" else 0
                if len(call.args) > position:
                    found = elements(call.args[position].value)
                    scope.optimizers.update(t for t in map(dotted, found) if t is not None)
    for scope in scopes.all:
        _same_names(names, scope, plans)
    callees = Callees(scopes)
    for _ in range(8):  # as far as names are handed on in a chain; each round reaches one further
        before = sum(len(s.models) + len(s.optimizers) for s in scopes.all)
        for scope in scopes.all:
            _inherit(scope)
            _aliases(names, scope)
            for call in scope.calls:
                _arguments(callees, scope, call)
        if before == sum(len(s.models) + len(s.optimizers) for s in scopes.all):
            return


def _inherit(scope: Scope) -> None:
    parent = scope.parent
    if parent is None:
        return
    for own, around in ((scope.models, parent.models), (scope.optimizers, parent.optimizers)):
        if isinstance(scope.node, cst.ClassDef):
            own |= {text for text in around if "." not in text}
            continue
        own |= {text for text in around if root(text) not in scope.bound or text.startswith("self.")}
        if isinstance(parent.node, cst.ClassDef):
            around |= {text for text in own if text.startswith("self.")}


def _aliases(names: Names, scope: Scope) -> None:
    for target, value in scope.assigns:
        text = dotted(value)
        if isinstance(value, cst.Call) and value.args:
            function = (dotted(value.func) or "").rpartition(".")[2]
            meaning = {q.rpartition(".")[2] for q in names.qualified(value.func)} | {function}
            if meaning & _WRAPPERS:
                text = dotted(value.args[0].value)
        if text is not None and text.removesuffix(".module") in scope.models:
            scope.models.add(target)
        if text in scope.optimizers:
            scope.optimizers.add(target)
    for target, over in scope.loops:
        if dotted(over) in scope.optimizers or (
            isinstance(over, (cst.List, cst.Tuple)) and all(dotted(e.value) in scope.optimizers for e in over.elements)
        ):
            scope.optimizers.add(target)


def _arguments(callees: Callees, scope: Scope, call: cst.Call) -> None:
    """What is a model here is one inside the function that it is given to."""
    found = callees.of(scope, call)
    if found is None:
        return
    target, skip = found
    for name, arg in bound(call, target.parameters()[skip:]):
        given = None if arg.star else dotted(arg.value)
        if given in scope.models:
            target.models.add(name)
        if given in scope.optimizers:
            target.optimizers.add(name)


def _same_names(names: Names, scope: Scope, plans: list[Plan]) -> None:
    """A parameter called as a session's model or optimizer is one, but not where something else is trained."""
    parameters = set(scope.parameters())
    scaled = any(names.apex(call.func) == "amp.scale_loss" for call in scope.calls)
    plain = any((dotted(call.func) or "").endswith(".backward") for call in scope.calls)
    for plan in plans:
        scope.models |= parameters & set(plan.models)
        if scaled or not plain:
            scope.optimizers |= parameters & set(plan.optimizers)
