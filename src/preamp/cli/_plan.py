"""`preamp plan`: the plan of a number of parameters, or of a model that a function of the user's makes."""

from __future__ import annotations

import importlib
import inspect
import shlex
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..errors import PreampError, kind_of
from ..plan import MemoryPlan, plan, plan_report
from ..report.files import write_json

WAYS: dict[str, dict[str, str]] = {
    **{level: {"level": level} for level in ("O0", "O1", "O2", "O4", "O5")},
    "O4 with 8-bit states": {"level": "O4", "states": "8bit"},
    "O5 with split masters": {"level": "O5", "master": "split"},
    "O5 with split masters and 8-bit states": {"level": "O5", "master": "split", "states": "8bit"},
}
"""What a report sets beside a plan: the levels that keep float32 values of all weights, and what makes them smaller."""

WHERE = ("world", "shard", "optimizer", "reduce", "units", "norm_share")
"""Options of a plan that its other ways keep."""


def make_plan(
    params: str | None, model: str | None, json_file: Path | None, out: Path | None, **asked: Any
) -> MemoryPlan:
    """Plan for `params` (7B) or `model` (module:function), one of them; write JSON and a report where asked for."""
    if (params is None) == (model is None):
        raise PreampError("preamp plan wants to know how large the model is: write --params 7B or --model module:name")
    given: Any = params if model is None else model_from(model)
    made = plan(given, **asked)
    if json_file is not None:
        write_json(json_file, made.to_json())
    if out is not None:
        kept = {name: asked[name] for name in WHERE}
        others = {name: other for name, way in WAYS.items() if (other := _other(given, {**kept, **way})) is not None}
        others = {name: other for name, other in others.items() if other.asked != made.asked}
        size = ["--params", str(params)] if model is None else ["--model", model]
        typed = {name: shlex.join(["preamp", "plan", *size, *_options({**kept, **WAYS[name]})]) for name in others}
        plan_report(made, others, typed).write_html(out / "plan.html")
        write_json(out / "plan.json", made.to_json())
    return made


def _other(given: Any, asked: dict[str, Any]) -> MemoryPlan | None:
    """A plan, or None for a combination that preamp refuses."""
    try:
        return plan(given, **asked)
    except PreampError:
        return None


def _options(asked: dict[str, Any]) -> list[str]:
    """Options as they are typed, without those that have their defaults."""
    defaults = {name: each.default for name, each in inspect.signature(plan).parameters.items()}
    given = {name: value for name, value in asked.items() if value != defaults[name]}
    return [text for name, value in given.items() for text in (f"--{name.replace('_', '-')}", str(value))]


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
