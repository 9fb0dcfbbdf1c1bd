"""Which expressions hand on weights: models, parts and parameters of them, optimizers, objects that have them."""

from __future__ import annotations

from collections.abc import Iterator

import libcst as cst

from ._names import Names, dotted
from ._scopes import Scope

_GIVES = ("parameters", "named_parameters", "param_groups")
_PLAIN = ("config", "training", "device", "dtype", "name", "hparams", "args", "cfg", "num_classes", "default_cfg")
_LISTS = ("list", "tuple", "set", "iter", "filter", "sorted", "enumerate", "dict", "zip", "chain", "vars", "reversed")


def knows(scope: Scope, text: str) -> bool:
    """Whether a name stands for a model, its inner module, or an optimizer of a session."""
    bare = text.removesuffix(".module")
    return bare in scope.models or text in scope.optimizers or text.partition("[")[0] in scope.optimizers


def called(call: cst.Call) -> str:
    """The last name of what is called."""
    func = call.func
    return func.attr.value if isinstance(func, cst.Attribute) else func.value if isinstance(func, cst.Name) else ""


class Weights:
    """Tells what holds weights, by what a file's names were given."""

    def __init__(self, names: Names) -> None:
        self._names = names
        self._asking: set[tuple[Scope, str]] = set()

    def holds(self, node: cst.BaseExpression, scope: Scope, holding: frozenset[str]) -> bool:
        """Whether an expression hands on weights; `holding`: parameters of the function around that do."""
        if isinstance(node, cst.Call):
            if called(node) in _GIVES or self._names.apex(node.func) == "amp.master_params":
                return True
            return called(node) in _LISTS and any(self.holds(arg.value, scope, holding) for arg in node.args)
        if isinstance(node, (cst.ListComp, cst.GeneratorExp, cst.SetComp, cst.DictComp)):
            return self.holds(node.for_in.iter, scope, holding)
        if isinstance(node, (cst.List, cst.Tuple, cst.Set, cst.Dict)):
            return any(
                isinstance(each, (cst.Element, cst.StarredElement, cst.DictElement, cst.StarredDictElement))
                and self.holds(each.value, scope, holding)
                for each in node.elements
            )
        if isinstance(node, cst.IfExp):
            return self.holds(node.body, scope, holding) or self.holds(node.orelse, scope, holding)
        if isinstance(node, cst.Subscript):
            index = node.slice[0].slice
            by_text = isinstance(index, cst.Index) and isinstance(index.value, cst.SimpleString)  # group["lr"]
            inside = not by_text or self._names.code(index) in ("'params'", '"params"')
            return knows(scope, self._names.code(node)) or (inside and self.holds(node.value, scope, holding))
        text = dotted(node) or ""
        return bool(text) and self._name(text, scope, holding)

    def _name(self, text: str, scope: Scope, holding: frozenset[str]) -> bool:
        if knows(scope, text) or text in holding or text.rpartition(".")[2] in _GIVES:
            return True
        known = scope.models | scope.optimizers
        method = scope.method()
        if text in (method.parameters()[:1] if method is not None else ()):
            return any(name.startswith(f"{text}.") for name in known)
        if any(name.startswith(f"{text}[") for name in known):
            return True
        for model in scope.models:
            if text.startswith(f"{model}."):
                return text[len(model) + 1 :].partition(".")[0] not in _PLAIN
        if (scope, text) in self._asking:
            return False
        self._asking.add((scope, text))
        try:
            return any(self.holds(value, each, holding) for each, value in self._values(scope, text))
        finally:
            self._asking.discard((scope, text))

    def _values(self, scope: Scope, text: str) -> Iterator[tuple[Scope, cst.BaseExpression]]:
        """What a name was given, where it was given any, and what was put into it, or loops run over."""
        for each in scope.outward():
            found = [value for name, value in (*each.assigns, *each.grown, *each.loops) if name == text]
            yield from ((each, value) for value in found)
            if found:
                return
