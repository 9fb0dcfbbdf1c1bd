"""Functions of other files: whether a call hands them weights, and what their names say that they do."""

from __future__ import annotations

import builtins
import re

import libcst as cst

from ._names import Names, dotted
from ._scopes import Scope

_GRADIENTS = re.compile(
    r"grad(?!ual|io|uat|ient_?(checkpoint|accum|penalty))|clip|scaler|backward|reduce|synchroni|optimi[sz]e(?!r)|unscale|"
    r"(^|_)norm$"
)
_NO_GRADIENTS = re.compile(r"requires_?grad|toggle_?grad|no_?grad|enable_?grad|grad_?enabled|zero_?grad")
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
_GIVES = ("parameters", "named_parameters", "param_groups")
_PLAIN = ("config", "training", "device", "dtype", "name", "hparams", "args", "cfg", "num_classes", "default_cfg")
_LISTS = ("list", "tuple", "set", "iter", "filter", "sorted", "enumerate", "dict", "zip", "chain", "vars")
_SAYS_NOTHING = ("update", "apply", "register", "add", "attach")
"""Methods whose object's name says more: `ema.update(model)`."""
_METHODS = (
    "zero_grad", "step", "state_dict", "load_state_dict", "add_param_group", "train", "eval", "append", "extend",
    "items", "keys", "values", "index", "copy", "get", "register_step_pre_hook", "register_step_post_hook",
    "register_state_dict_pre_hook", "register_state_dict_post_hook", "register_load_state_dict_pre_hook",
    "register_load_state_dict_post_hook",
)  # fmt: skip


def knows(scope: Scope, text: str) -> bool:
    """Whether a name stands for a model, its inner module, or an optimizer of a session."""
    bare = text.removesuffix(".module")
    return bare in scope.models or text in scope.optimizers or text.partition("[")[0] in scope.optimizers


def holds(names: Names, node: cst.BaseExpression, scope: Scope, holding: frozenset[str]) -> bool:
    """Whether an expression hands on weights: a model, parts or parameters of it, an optimizer, an object with them.

    `holding`: parameters of the function around of which that is known.
    """
    if isinstance(node, cst.Call):
        last = _last(node)
        if last in _GIVES or names.apex(node.func) == "amp.master_params":
            return True
        return last in _LISTS and any(holds(names, arg.value, scope, holding) for arg in node.args)
    if isinstance(node, (cst.ListComp, cst.GeneratorExp, cst.SetComp, cst.DictComp)):
        return holds(names, node.for_in.iter, scope, holding)
    if isinstance(node, (cst.List, cst.Tuple, cst.Set, cst.Dict)):
        return any(
            isinstance(each, (cst.Element, cst.StarredElement, cst.DictElement, cst.StarredDictElement))
            and holds(names, each.value, scope, holding)
            for each in node.elements
        )
    if isinstance(node, cst.IfExp):
        return holds(names, node.body, scope, holding) or holds(names, node.orelse, scope, holding)
    if isinstance(node, cst.Subscript):
        key = names.code(node).rpartition("[")[2].strip("]'\" ")
        return (key.isdecimal() or key == "params" or not key) and holds(names, node.value, scope, holding)
    text = dotted(node)
    return text is not None and _holds_name(names, text, scope, holding)


def _holds_name(names: Names, text: str, scope: Scope, holding: frozenset[str]) -> bool:
    if knows(scope, text) or text in holding or text.rpartition(".")[2] in _GIVES:
        return True
    method = scope.method()
    me = method.parameters()[:1] if method is not None else []
    if text in me:
        return any(name.startswith(f"{text}.") for name in scope.models | scope.optimizers)
    for model in scope.models:
        if text.startswith(f"{model}."):
            return text[len(model) + 1 :].partition(".")[0] not in _PLAIN
    for each in scope.outward():
        for target, value in each.assigns:
            if target == text and not isinstance(value, (cst.Name, cst.Attribute)) and not _is(value, text):
                return isinstance(value, (cst.Call, cst.ListComp)) and _gives_list(names, value, each, holding)
    return False


def _gives_list(names: Names, value: cst.BaseExpression, scope: Scope, holding: frozenset[str]) -> bool:
    """Whether a name's value is a list of weights; what a stranger makes of weights is his."""
    if isinstance(value, cst.Call) and _last(value) not in (*_GIVES, *_LISTS, "master_params"):
        return False
    return holds(names, value, scope, holding)


def _is(value: cst.BaseExpression, text: str) -> bool:
    """Whether a name is among what its own new value is made of."""
    return isinstance(value, cst.Call) and any(dotted(arg.value) == text for arg in value.args)


def names_gradients(call: cst.Call) -> bool:
    """Whether a function's own name speaks of gradients: it needs not be given any."""
    name = _snake(_last(call))
    return _GRADIENTS.search(name) is not None and "grad" in name and _NO_GRADIENTS.search(name) is None


def is_harmless(names: Names, call: cst.Call) -> bool:
    """Whether a function that is given weights is known, by origin or name, to leave gradients and steps alone."""
    name = _last(call)
    if any(q.startswith(_TORCH) for q in names.qualified(call.func)):
        return "clip_grad" not in name and name != "backward"
    if isinstance(call.func, cst.Name) and hasattr(builtins, name) and not names.qualified(call.func):
        return True
    word = _snake(name)
    works = _GRADIENTS.search(word) is not None and _NO_GRADIENTS.search(word) is None
    if works or _TRAINS.search(word) is not None or _WRAPS.match(name) is not None:
        return False
    if name in _SAYS_NOTHING and isinstance(call.func, cst.Attribute):
        word = _snake((dotted(call.func.value) or "").rpartition(".")[2])
    return _NO_GRADIENTS.search(word) is not None or _KNOWN.search(word) is not None


def is_optimizer_method(name: str) -> bool:
    """Whether it is clear what a method of an optimizer, or of a list of them, does."""
    return name in _METHODS


def _last(call: cst.Call) -> str:
    func = call.func
    return func.attr.value if isinstance(func, cst.Attribute) else func.value if isinstance(func, cst.Name) else ""


def _snake(name: str) -> str:
    """CamelCase as camel_case, so that words can be told apart."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()
