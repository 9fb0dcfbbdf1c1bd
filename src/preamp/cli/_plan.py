"""What `preamp plan` is given as text: a model to import, and an optimizer with its arguments."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.nn import Parameter
from torch.optim import Optimizer

from .. import optim
from ..errors import PreampError, kind_of


def optimizer_from(text: str) -> Callable[[Iterable[Parameter]], Optimizer]:
    """What makes the optimizer that a text describes: "adamw,master=split", "torch.sgd,momentum=0.9"."""
    name, *arguments = (part.strip() for part in text.split(","))
    where, short = (torch.optim, name[6:]) if name.lower().startswith("torch.") else (optim, name)
    found = {each.lower(): each for each, kind in vars(where).items() if _is_optimizer(kind)}
    if short.lower() not in found:
        raise PreampError(f"--optimizer {text}: there is no {name}; write {', '.join(sorted(found))}")
    options = dict(argument.partition("=")[::2] for argument in arguments)
    make: Any = getattr(where, found[short.lower()])

    def made(parameters: Iterable[Parameter]) -> Optimizer:
        try:
            optimizer: Optimizer = make(parameters, lr=1e-3, **{key: _value(each) for key, each in options.items()})
        except TypeError as error:
            raise PreampError(f"--optimizer {text}: {error}") from error
        return optimizer

    return made


def _is_optimizer(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, Optimizer) and kind not in (Optimizer, optim.FusedOptimizer)


def _value(text: str) -> Any:
    """A word, a number, or none, true and false."""
    words = {"none": None, "true": True, "false": False}
    if text.lower() in words:
        return words[text.lower()]
    try:
        return float(text)
    except ValueError:
        return text


def model_from(spec: str) -> nn.Module:
    """What the function or class `module:name` returns, made on the meta device, where it costs no memory.

    Modules are looked for in the working directory too.
    """
    where, colon, name = spec.partition(":")
    if not colon or not where or not name:
        raise PreampError(f"--model {spec!r}: write module:name of a function that returns a model, as in net:build")
    sys.path.insert(0, "")
    try:
        found = importlib.import_module(where)
        for part in name.split("."):
            found = getattr(found, part)
        with torch.device("meta"):
            model = found() if callable(found) else found
    except Exception as error:  # whatever the user's own code raises
        raise PreampError(f"--model {spec}: {type(error).__name__}: {error}") from error
    finally:
        sys.path.remove("")
    if not isinstance(model, nn.Module):
        raise PreampError(f"--model {spec}: it gave {kind_of(model)}, and a plan is made of an nn.Module")
    return model
