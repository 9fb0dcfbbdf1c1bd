"""`preamp plan`: the plan of a number of parameters, or of a model that a function of the user's makes."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..errors import PreampError, kind_of
from ..plan import MemoryPlan, plan
from ..report.files import write_json


def make_plan(params: str | None, model: str | None, json_file: Path | None, **asked: Any) -> MemoryPlan:
    """Plan for `params` (7B) or `model` (module:function), one of them; write it as JSON where that is asked for."""
    if (params is None) == (model is None):
        raise PreampError("preamp plan wants to know how large the model is: write --params 7B or --model module:name")
    given: Any = params if model is None else model_from(model)
    made = plan(given, **asked)
    if json_file is not None:
        write_json(json_file, made.to_json())
    return made


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
