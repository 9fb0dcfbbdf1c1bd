"""What calls may do to gradients and weights: by what they are given, and by what functions elsewhere are called."""

from __future__ import annotations

import builtins
import re
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


_GRADIENTS = re.compile(
    r"grad(?!ual|io|uat|ient_?(checkpoint|accum|penalty))|clip|scaler|backward|reduce|synchroni|optimi[sz]e(?!r)|unscale|"
    r"(^|_)norm$"
)
_NO_GRADIENTS = re.compile(r"requires_?grad|toggle_?grad|no_?grad|enable_?grad|grad_?enabled|zero_?grad")
_HOOKS = re.compile(
    r"(^|_)(on|after|before|pre|post)_\w*(backward|step|optim)|(call|run|fire|trigger|emit|invoke|exec)\w*(hook|callback|event)"
)
_TRAINS = re.compile(
    r"train(?!able)|fit(?!ness)|(^|_)step$|optimizer_?step|step_?(optim|param|model)|updater|closure|solver|learner|runner|engine"
)
_KNOWN = re.compile(
    r"sched|lr(?![a-z])|(?<![a-z])lr|learning_?rate|warm|anneal|decay|plateau|cycl|cosine|poly|save|load|check_?point|"
    r"ckpt|resume|restore|snapshot|export|(?<!l)log|print|write|report|watch|monitor|summar|describe|info|debug|"
    r"state|broadcast|ema|swa|teacher|eval|valid|test|predict|infer|sampl|generat|visual|plot|draw|count|histogram|scalar|image|"
    r"size|param|config|freez|loss|criterion|forward|compute|logit|regulari|penalty|momentum|rate|to_?device|"
    r"distributed|parallel|data|sync_?batch|compile"
)
_WRAPS = re.compile(r"^[A-Z]\w*(Optim|Optimizer|Opt|Wrapper)$")
_TORCH = ("torch.", "numpy.", "math.", "os.", "logging.", "time.", "copy.", "pickle.", "json.")
_COLLECTS = ("append", "extend", "insert", "setdefault")
_SAYS_NOTHING = ("update", "apply", "register", "add", "attach")
"""Methods whose object's name says more: `ema.update(model)`."""
METHODS = (
    "zero_grad", "step", "state_dict", "load_state_dict", "add_param_group", "train", "eval", "append", "extend",
    "items", "keys", "values", "index", "copy", "get", "register_step_pre_hook", "register_step_post_hook",
    "register_state_dict_pre_hook", "register_state_dict_post_hook", "register_load_state_dict_pre_hook",
    "register_load_state_dict_post_hook",
)  # fmt: skip
"""Methods of optimizers, and of lists of them, of which it is clear what they do."""


def names_gradients(call: cst.Call) -> bool:
    """Whether a function's own name speaks of gradients, or of what runs before a step: it needs not be given any."""
    name = _snake(called(call))
    return _HOOKS.search(name) is not None or (
        _GRADIENTS.search(name) is not None and "grad" in name and _NO_GRADIENTS.search(name) is None
    )


def is_harmless(names: Names, call: cst.Call) -> bool:
    """Whether a function that is given weights is known, by origin or name, to leave gradients and steps alone."""
    name = called(call)
    if any(q.startswith(_TORCH) for q in names.qualified(call.func)):
        return "clip_grad" not in name and name != "backward"
    if isinstance(call.func, cst.Name) and hasattr(builtins, name) and not names.qualified(call.func):
        return True
    if name in _COLLECTS and isinstance(call.func, cst.Attribute):
        return True
    word = _snake(name)
    works = _GRADIENTS.search(word) is not None and _NO_GRADIENTS.search(word) is None
    if works or _HOOKS.search(word) is not None or _TRAINS.search(word) is not None or _WRAPS.match(name) is not None:
        return False
    if name in _SAYS_NOTHING and isinstance(call.func, cst.Attribute):
        word = _snake((dotted(call.func.value) or "").rpartition(".")[2])
    return _NO_GRADIENTS.search(word) is not None or _KNOWN.search(word) is not None


def _snake(name: str) -> str:
    """CamelCase as camel_case, so that words can be told apart."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()
