"""The line of the user's that asked for something, from Python's stack."""

from __future__ import annotations

import inspect
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
from torch import nn

_TORCH = str(Path(torch.__file__).parent) + "/"
_PREAMP = str(Path(__file__).parents[1]) + "/"
_ZOO = _PREAMP + "zoo/"  # models, like a user's own
_PASSED_THROUGH = ("contextlib.py", "functools.py")  # decorators of the standard library: the line inside is meant
_LIBRARY = ("site-packages", "dist-packages", "/lib/python")
_FRAMEWORKS = tuple(
    f"-packages/{name}" for name in (
        "accelerate/", "lightning/", "pytorch_lightning/", "lightning_fabric/", "ignite/", "transformers/trainer",
    )
)  # fmt: skip
"""Libraries that run a model and have none: a line of theirs tells nothing."""
_GENERATED = (
    "<string>", "<frozen", "<unknown>", "<attrs", "<decorator-gen", "<__array_function__", "<eval_with_key>",
    "<torch_package", "<lambdifygenerated", "<makefun", "<boltons",
)  # fmt: skip
"""Of dataclasses and namedtuples, importlib, attrs, decorator, numpy, torch.fx, ..."""
_CHECKPOINT = _TORCH + "utils/checkpoint.py"
_FUNCTION = _TORCH + "autograd/function.py"
_ENGINE = "_engine_run_backward"
_CALL = nn.Module._call_impl.__code__

Line = tuple[str | None, int | None]
"""File and line number; None for both where nobody of the user's asked."""


@dataclass(frozen=True, slots=True)
class Frames:
    """What a walk up the Python stack tells."""

    source: Line  # innermost frame of the user's
    own: tuple[str, int] | None  # the same, but called by the autograd engine
    applied: Line  # who applies the autograd.Function whose forward this is in
    recomputed: bool  # activation checkpointing is running the forward again


def walk(stop: CodeType) -> Frames:
    """Look at the frames of the caller's caller and above it, up to the function whose code is `stop`."""
    nowhere: Line = (None, None)
    source = applied = nowhere
    own: tuple[str, int] | None = None
    inner: tuple[str, int] | None = None  # the source, once found
    function = recomputed = False
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code is not stop:
        file = frame.f_code.co_filename
        if file == _CHECKPOINT:
            recomputed = True
        elif frame.f_code.co_name == _ENGINE and file.startswith(_TORCH):
            own = inner  # what lies between the engine and the operator is a backward or a hook in Python
            break
        elif inner is not None and file == _FUNCTION:
            function = True
        elif is_users(file) and (inner is None or applied is nowhere):
            here = (file, frame.f_lineno)
            if inner is None:
                source = inner = here
            elif function:
                applied = here
            function = function or _is_function(frame.f_code)
        frame = frame.f_back
    if frame is None and torch._C._current_graph_task_id() != -1:
        own = inner  # in the engine's own thread for a GPU, below which Python has no frames
    return Frames(source, own, applied, recomputed)


@cache
def _is_function(code: CodeType) -> bool:
    """Whether it is the forward of an autograd.Function, which torch 2.15 calls with no frame of its own between."""
    classes = [torch.autograd.Function]
    for each in classes:
        forward: Any = each.__dict__.get("forward")
        if getattr(inspect.unwrap(getattr(forward, "__func__", forward)), "__code__", None) is code:
            return True
        classes.extend(each.__subclasses__())
    return False


def line_and_modules() -> tuple[Line, tuple[nn.Module, ...]]:
    """The innermost frame that is neither torch's nor ours, and the modules whose calls these are, innermost first."""
    line: Line = (None, None)
    modules: list[nn.Module] = []
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        code = frame.f_code
        if code is _CALL:
            modules.append(frame.f_locals["self"])
        elif line[0] is None and is_users(code.co_filename):
            line = code.co_filename, frame.f_lineno
        frame = frame.f_back
    return line, tuple(modules)


def users_line() -> Line:
    """The innermost frame of the user's own; of any library but torch where there is none such."""
    first: Line = (None, None)
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if is_users(file):
            if not in_library(file):
                return file, frame.f_lineno
            if first[0] is None and "site-packages" in file:
                first = (file, frame.f_lineno)
        frame = frame.f_back
    return first


@cache
def is_users(file: str) -> bool:
    """Whether a file is neither torch's, nor ours, nor the name under which a library has generated code.

    A notebook's cell is the user's (<ipython-input-3>, <cell 3>), and so is what he calls his own exec'd code.
    """
    if file.startswith(_GENERATED):
        return False
    if file.startswith(_PREAMP):
        return file.startswith(_ZOO)
    if any(part in file for part in _FRAMEWORKS):
        return False
    return not file.startswith(_TORCH) and not file.endswith(_PASSED_THROUGH)


@cache
def in_library(file: str) -> bool:
    """Whether a file belongs to something installed."""
    return any(part in file for part in _LIBRARY)
