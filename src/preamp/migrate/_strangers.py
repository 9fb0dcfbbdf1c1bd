"""Functions of other files: what their names say that they do to gradients and steps."""

from __future__ import annotations

import builtins
import re

import libcst as cst

from ._names import Names, dotted
from ._weights import called

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
_METHODS = (
    "zero_grad", "step", "state_dict", "load_state_dict", "add_param_group", "train", "eval", "append", "extend",
    "items", "keys", "values", "index", "copy", "get", "register_step_pre_hook", "register_step_post_hook",
    "register_state_dict_pre_hook", "register_state_dict_post_hook", "register_load_state_dict_pre_hook",
    "register_load_state_dict_post_hook",
)  # fmt: skip


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


def is_optimizer_method(name: str) -> bool:
    """Whether it is clear what a method of an optimizer, or of a list of them, does."""
    return name in _METHODS


def _snake(name: str) -> str:
    """CamelCase as camel_case, so that words can be told apart."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()
