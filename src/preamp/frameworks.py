"""Models and optimizers behind what frameworks hand out in their place.

Lightning and Accelerate give a training loop objects of their own, which look like a module and an optimizer and are
neither: with attributes of the real ones, copied or passed on. A session needs the real ones, and so does a scaler that
leaves an optimizer a flag as an attribute.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

from torch import nn

_FRAMEWORKS = ("lightning", "pytorch_lightning", "lightning_fabric", "accelerate")


def unwrap(given: Any) -> Any:
    """The optimizer that a framework's optimizer steps, the module or wrapper that its module calls; else `given`."""
    while (inner := _inner(given)) is not None:
        given = inner
    return given


def _inner(given: Any) -> Any:
    """What a framework's object stands for; None for a LightningModule, say, which is a model."""
    held = vars(given) if _is_framework(type(given)) else {}  # type: ignore[arg-type]
    if isinstance(given, nn.Module):
        return held.get("_modules", {}).get("_forward_module")
    return held.get("_optimizer", held.get("optimizer"))


@lru_cache
def _is_framework(kind: type) -> bool:
    """Whether a class is a framework's or made from one; asked at every step of a scaler."""
    return any(each.__module__.partition(".")[0] in _FRAMEWORKS for each in kind.__mro__)


def unwrap_imitation(given: Any) -> Any:
    """The optimizer behind one that passes for it (Lightning's are of its class); any other as it is."""
    inner = unwrap(given)
    return inner if isinstance(given, type(inner)) else given


@contextmanager
def replaced(owner: Any, name: str, method: Any) -> Iterator[None]:
    """Inside, an instance has another method; then what was there before, unless somebody has replaced it since."""
    before = {key: value for key, value in vars(owner).items() if key == name}
    setattr(owner, name, method)
    try:
        yield
    finally:
        if vars(owner).get(name) is method:
            delattr(owner, name)
            vars(owner).update(before)


@contextmanager
def framework_hooks(given: Any) -> Iterator[None]:
    """Around a step of the optimizer behind `given`: has Lightning count it, and Fabric tell its callbacks.

    A Trainer's `global_step`, and with it `max_steps` and the times of checkpoints, come from nothing else.
    """
    held = {} if given is None or unwrap(given) is given else vars(given)
    if "_on_before_step" in held:
        held["_on_before_step"]()
    yield
    if "_on_after_step" in held:
        held["_on_after_step"]()
    for callback in held.get("_callbacks", ()):
        hook = getattr(callback, "on_after_optimizer_step", None)
        if callable(hook):
            hook(strategy=held["_strategy"], optimizer=unwrap(given))


def tell_skipped(given: Any, skipped: Callable[[], Any]) -> None:
    """Let Accelerate's optimizer know whether a step was skipped, for its schedulers to stand still.

    `skipped` gives a bool, or a flag that turns into one when it is asked for.
    """
    while (inner := _inner(given)) is not None:
        if "_is_overflow" in vars(given):
            given._is_overflow = skipped()
        given = inner


WRAPPERS = frozenset({
    "DistributedDataParallel", "DataParallel", "FullyShardedDataParallel", "OptimizedModule", "_ForwardRedirection",
    "_FabricModule", "_LightningModuleWrapperBase",
})  # fmt: skip
"""Classes that hold a user's model and are no part of it."""


def unwrapped(model: nn.Module, *, any_wrapper: bool = False) -> nn.Module:
    """The user's model inside wrappers for parallel training and compilation, whose parameters are the same objects.

    `any_wrapper`: also inside those that have parameters of their own, or change its call.
    """
    while True:
        inner: Any = getattr(model, "_orig_mod", None)  # of torch.compile
        if isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
            inner = model.module
        elif any_wrapper and type(model).__name__ in WRAPPERS and len(parts := list(model.children())) == 1:
            inner = parts[0]
        if not isinstance(inner, nn.Module):
            return model
        model = inner
