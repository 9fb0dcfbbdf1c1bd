"""The doctor inside the process of the script: begins when the script imports torch.

Of a comparison: a script that asks for 16 bits is run in float32, as every known way to request them is answered with
float32, and its random seeds are shifted.
"""

from __future__ import annotations

import atexit
import gc
import json
import os
import random
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ... import session
from ...formats import LOW_DTYPES
from ..follow.watch import Watch
from ..hooks import Patches
from ..records import JsonLines, Recorder
from . import VARIABLE


def begin() -> None:
    """Watch this process until it ends."""
    options = json.loads(os.environ[VARIABLE])
    rank = int(os.environ.get("RANK", "0") or 0)
    path = Path(options["folder"]) / f"rank{rank}-{os.getpid()}.jsonl"
    recorder = Recorder(JsonLines(path), rank=rank)
    patches = Patches()
    if options.get("offset"):
        shift_seeds(patches, options["offset"])
    if options.get("full"):
        run_in_full(patches)
    watch = Watch(recorder, Path(options["base"]), options["every"], options["steps"], options["replay"])
    watch.start()
    atexit.register(watch.end)
    gc.freeze()  # the models are looked for among what is made from here on: torch alone is 300,000 objects


def shift_seeds(patches: Patches, offset: int) -> None:
    """Add `offset` to every whole seed that the script gives to Python, numpy or torch, and to torch's first one.

    Generators that the script makes for itself (`torch.Generator`, `random.Random`, `RandomState`) keep theirs.
    """
    inside = False  # torch.manual_seed seeds the devices by functions that are wrapped too

    def shift(seed: Any) -> Any:
        is_whole = isinstance(seed, (int, np.integer)) and not isinstance(seed, bool)
        return int(seed) + offset if is_whole and not inside else seed

    def shifted(original: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal inside
        args, kwargs = tuple(map(shift, args)), {name: shift(value) for name, value in kwargs.items()}
        before, inside = inside, True
        try:
            return original(*args, **kwargs)
        finally:
            inside = before

    torch.manual_seed(torch.initial_seed() + offset)
    for owner, name in (
        (torch, "manual_seed"), (torch.random, "manual_seed"), (torch.cuda, "manual_seed"),
        (torch.cuda, "manual_seed_all"), (random, "seed"), (np.random, "seed"), (np.random, "default_rng"),
    ):  # fmt: skip
        patches.wrap(owner, name, shifted)


def run_in_full(patches: Patches) -> None:
    """Have autocast, scalers, casts, preamp and Apex do nothing to the precision from here on."""
    patches.wrap(torch.autocast, "__init__", _without(position=2))
    patches.wrap(torch.amp.grad_scaler.GradScaler, "__init__", _without(position=5))
    mode = _InFull()
    mode.__enter__()
    patches.on_close(lambda: mode.__exit__(None, None, None))
    patches.wrap(torch, "set_default_dtype", lambda original, dtype: original(_full(dtype)))
    for owner in (session, sys.modules[session.__name__.rpartition(".")[0]]):
        patches.wrap(owner, "prepare", _prepare)
    patches.wrap(import_module("preamp.compat.apex.amp.frontend"), "initialize", _initialize)  # it lies above us


def _without(position: int) -> Callable[..., None]:
    """The constructor with `enabled=False`; `position`: of that argument after self."""

    def made(original: Any, made: Any, *args: Any, **kwargs: Any) -> None:
        if len(args) > position:
            args = (*args[:position], False, *args[position + 1 :])
        else:
            kwargs["enabled"] = False
        original(made, *args, **kwargs)

    return made


class _InFull(TorchFunctionMode):
    """Gives float32 where torch is asked for 16 bits: by casts, of whole modules too, and by `dtype=`."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name == "view":  # which reads the same bits otherwise
            return func(*args, **(kwargs or {}))
        func = Tensor.float if name in ("half", "bfloat16") else func
        return func(*map(_full, args), **{key: _full(value) for key, value in (kwargs or {}).items()})


def _full(value: Any) -> Any:
    if isinstance(value, str) and value.endswith(("HalfTensor", "BFloat16Tensor")):
        return value.replace("BFloat16", "Float").replace("Half", "Float")
    dtype = getattr(value, "dtype", None) if isinstance(value, type) else value  # torch.HalfTensor is a class
    return torch.float32 if isinstance(dtype, torch.dtype) and dtype in LOW_DTYPES else value


def _prepare(original: Any, model: Any, optimizer: Any, **kwargs: Any) -> Any:
    kept = {name: kwargs[name] for name in ("losses", "skip") if name in kwargs}
    return original(model, optimizer, level="O0", **kept)


def _initialize(original: Any, models: Any, optimizers: Any = None, *args: Any, **kwargs: Any) -> Any:
    enabled = kwargs.get("enabled", args[0] if args else True)
    kept = {name: kwargs[name] for name in ("num_losses", "verbosity") if name in kwargs}
    return original(models, optimizers, enabled=enabled, opt_level="O0", **kept)
