"""Where something ran: the user's line by Python's stack, the module by hooks, forward or backward by autograd."""

from __future__ import annotations

import inspect
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from types import CodeType, FrameType, TracebackType
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from ..tree import tensors
from .hooks import is_traced, subclasses
from .records import NOWHERE, Line

_TORCH = str(Path(torch.__file__).parent) + "/"
_PREAMP = str(Path(__file__).parents[1]) + "/"
_DOCTOR = str(Path(__file__).parent) + "/"
_STEPPING = tuple(f"{_PREAMP}{room}/" for room in ("session", "optim", "ledger", "scaling", "kernels"))
"""What of preamp steps weights, in its own way; its regions and modules compute what the script asks for."""
_ZOO = _PREAMP + "zoo/"  # models, like a user's own
_PASSED_THROUGH = ("contextlib.py", "functools.py")  # decorators of the standard library: the line inside is meant
_LIBRARY = ("site-packages", "dist-packages", "/lib/python")
_FRAMEWORKS = tuple(
    f"-packages/{name}" for name in (
        "accelerate/", "lightning/", "pytorch_lightning/", "lightning_fabric/", "ignite/", "transformers/trainer",
    )
)  # fmt: skip
"""Libraries that run a model and have none: a line of theirs is of no use."""
_GENERATED = (
    "<string>", "<frozen", "<unknown>", "<attrs", "<decorator-gen", "<__array_function__", "<eval_with_key>",
    "<torch_package", "<lambdifygenerated", "<makefun", "<boltons",
)  # fmt: skip
"""Of dataclasses and namedtuples, importlib, attrs, decorator, numpy, torch.fx, ..."""
_CALLS_A_MODE = tuple(_TORCH + name for name in ("_compile.py", "_dynamo/eval_frame.py", "_ops.py"))
"""Files by which torch calls a dispatch mode, and by which that calls an operator."""
_CHECKPOINT = _TORCH + "utils/checkpoint.py"
_FUNCTION = _TORCH + "autograd/function.py"
_ENGINE = "_engine_run_backward"


@dataclass(frozen=True, slots=True)
class Frames:
    """What a walk up the Python stack finds."""

    source: Line  # innermost frame of the user's
    own: tuple[str, int] | None  # the same, but called by the autograd engine
    applied: Line  # the caller of the autograd.Function whose forward this is in
    recomputed: bool  # activation checkpointing is running the forward again
    ours: bool  # a session or an optimizer of preamp's asked for it


def walk(stop: CodeType | None) -> Frames:
    """Walk the frames of the caller's caller and above it, up to the function whose code is `stop`, if any is."""
    source = applied = NOWHERE
    own: tuple[str, int] | None = None
    inner: tuple[str, int] | None = None  # the source, once found
    function = recomputed = ours = False
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code is not stop:
        file = frame.f_code.co_filename
        if inner is None and file.startswith(_STEPPING):
            ours = True
        if file == _CHECKPOINT:
            recomputed = True
        elif frame.f_code.co_name == _ENGINE and file.startswith(_TORCH):
            own = inner  # what lies between the engine and the operator is a backward or a hook in Python
            break
        elif inner is not None and file == _FUNCTION:
            function = True
        elif is_users(file) and (inner is None or applied is NOWHERE):
            here = (file, frame.f_lineno)
            if inner is None:
                source = inner = here
            elif function:
                applied = here
            function = function or _is_function(frame.f_code)
        frame = frame.f_back
    if frame is None and torch._C._current_graph_task_id() != -1:
        own = inner  # in the engine's own thread for a GPU, below which Python has no frames
    return Frames(source, own, applied, recomputed, ours)


@cache
def _is_function(code: CodeType) -> bool:
    """Whether it is the forward of an autograd.Function, which torch 2.15 calls with no frame of its own between."""
    for each in subclasses(torch.autograd.Function):
        forward: Any = each.__dict__.get("forward")
        if getattr(inspect.unwrap(getattr(forward, "__func__", forward)), "__code__", None) is code:
            return True
    return False


def users_line(but: object = None) -> Line:
    """The innermost frame of the user's own, but for methods of this; of any library but torch if there is none."""
    first = NOWHERE
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        method: Any = getattr(type(but), frame.f_code.co_name, None)  # `f_locals` would keep what is there alive
        if is_users(file) and getattr(inspect.unwrap(method), "__code__", None) is not frame.f_code:
            if not in_library(file):
                return file, frame.f_lineno
            if first[0] is None and "site-packages" in file:
                first = (file, frame.f_lineno)
        frame = frame.f_back
    return first


def called_by_preamp() -> bool:
    """Whether preamp itself called the function of torch's that runs, and not the script."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith((_TORCH, _DOCTOR)):
        frame = frame.f_back
    return frame is not None and frame.f_code.co_filename.startswith(_PREAMP)


def raised_at(error: BaseException, trace: Any = None) -> Line:
    """The innermost line of the user's own that an error has left; the one that runs now where there is none."""
    frames = traceback.extract_tb(trace or error.__traceback__)
    own = [(one.filename, one.lineno) for one in frames if is_users(one.filename) and not in_library(one.filename)]
    return own[-1] if own else users_line()


def without_ours(error: BaseException) -> None:
    """Take the frames by which the doctor wraps functions and sees operators out of the tracebacks of an error."""
    seen: list[BaseException] = []
    left: BaseException | None = error
    while left is not None and left not in seen:
        seen.append(left)
        trace, frames = left.__traceback__, list[TracebackType]()
        while trace is not None:
            frames.append(trace)
            trace = trace.tb_next
        files = [one.tb_frame.f_code.co_filename for one in frames]
        dropped = _CALLS_A_MODE if _DOCTOR + "operators.py" in files else ()
        for one, file in reversed([*zip(frames, files, strict=True)]):
            if not file.startswith(_DOCTOR) and file not in dropped:
                trace = TracebackType(trace, one.tb_frame, one.tb_lasti, one.tb_lineno)
        left.__traceback__ = trace
        left = left.__cause__ or left.__context__


@cache
def is_users(file: str) -> bool:
    """Whether a file is neither torch's, nor preamp's, nor the name under which a library has generated code.

    A notebook's cell is the user's (<ipython-input-3>, <cell 3>), and so is a name given to exec'd code.
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


UNINITIALISED = frozenset({
    "empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided",
})  # fmt: skip
"""Operators whose results are whatever lay there."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where an operator ran; `own` is the line of a backward written in Python, None for every other."""

    module: str | None
    file: str | None
    line: int | None
    direction: Literal["forward", "backward"]
    own: tuple[str, int] | None = None
    ours: bool = False
    """Whether a session or an optimizer of preamp's asked for it."""

    @property
    def at(self) -> Line:
        """File and line."""
        return self.file, self.line

    def where(self, op: str) -> dict[str, Any]:
        """The place of an operator, as fields of a finding."""
        return {"module": self.module, "op": op, "direction": self.direction, "at": self.at}


class Places:
    """Follows modules by hooks and autograd nodes by sequence number, so that any operator has a place.

    `named`: the path of a module, or the default given with it; `stop`: code of the function at which a walk up the
    stack ends, of a step that is done again. The observation begins when this is made (sequence numbers go on counting
    from there), and `close` removes the hooks.
    """

    def __init__(
        self,
        named: Callable[[nn.Module, str | None], str | None],
        parameters: Mapping[int, str],
        stop: CodeType | None = None,
    ) -> None:
        self._named = named
        self._parameters = parameters
        self._stop = stop
        self._stack: list[tuple[nn.Module, str | None]] = []
        self._made_by: dict[int, Place] = {}
        self._seen = torch._C._autograd._get_sequence_nr()
        self._last: Place | None = None
        self._copy_slices = False
        self.forced: Place | None = None
        """Where forward operators are said to run, whatever the stack says: a replay has no line of the user's."""
        self._handles: tuple[Any, ...] = (
            nn.modules.module.register_module_forward_pre_hook(self.enter),
            nn.modules.module.register_module_forward_hook(self._leave, always_call=True),
        )

    def close(self) -> None:
        """Let go of torch's global hooks."""
        for handle in self._handles:
            handle.remove()

    @property
    def module(self) -> str | None:
        """The path of the innermost module that is running; None outside of all."""
        module, path = self._stack[-1] if self._stack else (None, None)
        return self._named(module, None) if path is None and module is not None else path  # known by now, it may be

    def enter(self, module: nn.Module, _: Any = None) -> None:
        """`module` runs from here on: called by the hook, or by code that installed it too late."""
        if not is_traced():
            # A module that is not the models' own (a wrapper made on the fly) belongs to the one that calls it.
            self._stack.append((module, self._named(module, self.module)))

    def _leave(self, module: nn.Module, _: Any, __: Any) -> None:
        # Down to this module, not just one: what an exception left behind goes too.
        for index in range(len(self._stack) - 1, -1, -1):
            if self._stack[index][0] is module:
                del self._stack[index:]
                return

    def place(self, writes_view: bool) -> Place:
        """The place of the operator about to run; `writes_view`: it changes a view in place."""
        node = torch._C._current_autograd_node()
        frames = walk(self._stop)
        place = self._resolve(node, frames)
        made = place if frames.applied[0] is None else replace(place, file=frames.applied[0], line=frames.applied[1])
        self._note_nodes(made, writes_view)
        return place

    def _resolve(self, node: Any, frames: Frames) -> Place:
        inside = self.module
        if node is None and self.forced is not None:
            return self.forced
        if node is None:
            return Place(inside, *frames.source, "forward", ours=frames.ours)
        maker = self._made_by.get(node._sequence_nr())
        module = inside if self._stack else maker.module if maker else None
        if node.name() == "torch::autograd::AccumulateGrad":
            module = self._parameters.get(id(node.variable))
        if frames.recomputed and torch.is_grad_enabled():
            return Place(module, *frames.source, "forward")
        file, line = (maker.file, maker.line) if maker else frames.own or NOWHERE
        return Place(module, file, line, "backward", frames.own)

    def _note_nodes(self, place: Place, writes_view: bool) -> None:
        """Attribute the nodes made since the last operator to the operators that made them.

        A node is made just before its operator is dispatched, so all new numbers are this operator's; only the
        CopySlices node of an in-place operator on a view comes after its operator, and is the first new number here.
        """
        now = torch._C._autograd._get_sequence_nr()
        for number in range(self._seen, now):
            late = self._copy_slices and self._last is not None and number == self._seen
            self._made_by[number] = cast(Place, self._last) if late else place
        self._copy_slices = writes_view and now > self._seen
        self._seen, self._last = max(now, self._seen), place


def written_by(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """The tensors among the arguments that the operator changes."""
    found: list[Tensor] = []
    for index, name in _written(func):
        found.extend(tensors(args[index] if index < len(args) else kwargs.get(name)))
    return found


@cache
def _written(func: Any) -> tuple[tuple[int, str], ...]:
    """Positions and names of the arguments that an operator changes."""
    return tuple(
        (index, argument.name)
        for index, argument in enumerate(func._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )


@cache
def is_view(func: Any) -> bool:
    """Whether an operator hands on numbers of its argument, in the same storage."""
    return any(each.alias_info is not None and not each.alias_info.is_write for each in func._schema.returns)
