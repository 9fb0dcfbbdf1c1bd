"""What `torch.compile` may do with functions of preamp.

Backward and step are the host's work over all parameters and their states: loops, hooks, branches on flags. A compiler
that is let in takes them apart into hundreds of pieces, one a parameter and one a question to the device, and finds
nothing to fuse in them; what there is to fuse lies in `preamp.kernels`.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, TypeVar

import torch

F = TypeVar("F", bound=Callable[..., Any])


def uncompiled(function: F) -> F:
    """`function`, which `torch.compile` leaves alone, with all that it calls: a graph break. Also a decorator.

    As `torch.compiler.disable`, which imports the compiler, and adds three calls to each.
    """
    if hasattr(torch._C._dynamo.eval_frame, "set_code_exec_strategy"):
        marked: Any = function
        marked._torchdynamo_disable, marked._torchdynamo_disable_msg = True, None
        return traced_by_callers(function)
    disabled: list[F] = []  # before torch 2.8; made when it is first needed

    @functools.wraps(function)
    def as_written(*args: Any, **kwargs: Any) -> Any:
        if "torch._dynamo" not in sys.modules:
            return function(*args, **kwargs)
        if not disabled:
            disabled.append(torch.compiler.disable(function))
        return disabled[0](*args, **kwargs)

    return as_written  # type: ignore[return-value]


def traced_by_callers(function: F) -> F:
    """Have `torch.compile` trace into this function from code that calls it, and never take its frame alone, nor those
    of what it calls. Also a decorator.

    After a graph break compiled code calls functions as Python does. Dynamo would then compile the frame of one that
    enters a region as if it were a model's forward: half of a region.
    """
    frames: Any = torch._C._dynamo.eval_frame
    if hasattr(frames, "set_code_exec_strategy"):
        skip = frames._FrameAction.SKIP
        frames.set_code_exec_strategy(function.__code__, frames._FrameExecStrategy(skip, skip))
    else:  # before torch 2.8
        frames.skip_code(function.__code__)
    return function
