"""PA204 between two steps: a running average, or another copy of the weights, that 16 bits do not let move."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes, _get_current_dispatch_mode

from ..formats import LOW_DTYPES, name_of
from ..report import Finding
from ._places import written_by
from ._stack import Line, users_line
from ._updates import LOST

_MOVES = frozenset({"mul", "add", "sub", "lerp", "addcmul", "addcdiv"})
LEAST = 16
"""Tensors of fewer values are counters and the like."""


class Between(TorchDispatchMode):
    """Looks at in-place operators on 16-bit tensors, from an attempt to step to the next model call."""

    def __init__(self) -> None:
        super().__init__()
        self._lines: dict[Line, tuple[int, int, str, str]] = {}

    def stop(self) -> None:
        """Look no more, unless somebody else's mode lies on top."""
        if _get_current_dispatch_mode() is self:
            self.__exit__(None, None, None)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        base = func._schema.name.partition("::")[2].removeprefix("_foreach_").rstrip("_")
        moved = [t for t in written_by(func, args, kwargs) if t.dtype in LOW_DTYPES and t.numel() >= LEAST]
        if base not in _MOVES or not moved:
            return func(*args, **kwargs)
        with _disable_current_modes(), torch.no_grad():
            before = [t.detach().clone() for t in moved]
        out = func(*args, **kwargs)
        with _disable_current_modes(), torch.no_grad():
            line = users_line()
            same, total, *_ = self._lines.get(line, (0, 0))
            for old, new in zip(before, moved, strict=True):
                some = old != 0
                same += int(((new == old) & some).sum())
                total += int(some.sum())
            self._lines[line] = same, total, base, name_of(moved[0].dtype)
        return out

    def findings(self) -> Iterator[Finding]:
        """One for each line that leaves most numbers as they were. A line that multiplies by 1 would be one too."""
        for (file, line), (same, total, op, dtype) in self._lines.items():
            if file is None or not total or same / total < LOST:
                continue
            yield Finding(
                "PA204", "warning",
                f"{same / total:.0%} of {total} {dtype} numbers are the same after {op}_: the change is less than half "
                f"of what {dtype} can tell apart there, so a running average stands still",
                op=op, file=file, line=line, evidence={"unchanged": round(same / total, 3), "dtype": dtype},
                fix="shadow = copy.deepcopy(model).float()  # averages and copies of weights in float32",
            )  # fmt: skip
