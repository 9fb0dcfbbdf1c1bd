"""Methods that stay as they are written when compiled code calls them.

Backward and step are the host's work over all parameters and their states: loops, hooks, branches on flags. A compiler
that is let in takes them apart into hundreds of pieces, one a parameter and one a question to the device, and finds
nothing to fuse in them; what there is to fuse lies in `preamp.fused`.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, TypeVar

import torch

F = TypeVar("F", bound=Callable[..., Any])


def uncompiled(method: F) -> F:
    """`method`, which `torch.compile` leaves alone, with all that it calls: a graph break. Also a decorator.

    As `torch.compiler.disable`, which imports the compiler; here those who do not compile are spared that.
    """
    disabled: list[F] = []  # made when it is first needed

    @functools.wraps(method)
    def as_written(*args: Any, **kwargs: Any) -> Any:
        if "torch._dynamo" not in sys.modules:
            return method(*args, **kwargs)
        if not disabled:
            disabled.append(torch.compiler.disable(method))
        return disabled[0](*args, **kwargs)

    return as_written  # type: ignore[return-value]
