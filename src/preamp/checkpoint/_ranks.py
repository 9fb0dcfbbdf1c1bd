"""Work that all ranks do together to save and load; none waits for one that has failed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from ..errors import CheckpointError
from ..sharding import ranks

T = TypeVar("T")

_group: tuple[Any, Any] | None = None


def on_all_ranks(work: Callable[[], T], what: str, group: Any = None) -> list[T]:
    """Do `work` on each rank; its results by rank, when all have done it.

    An error on one rank is an error on all of them: its own there, and a `CheckpointError` that names it elsewhere.
    `what`: the sentence's beginning, as in "the checkpoint was not written".
    """
    if ranks() == 1:
        return [work()]
    failed: Exception | None = None
    result: T | None = None
    try:
        result = work()
    except Exception as error:
        failed = error
    answers: list[Any] = [None] * dist.get_world_size(group)
    mine = None if failed is None else f"{type(failed).__name__}: {failed}".splitlines()[0][:300]
    dist.all_gather_object(answers, (result, mine), group)
    if failed is not None:
        raise failed
    for number, (_, theirs) in enumerate(answers):
        if theirs is not None:
            raise CheckpointError(f"{what}: rank {number} failed ({theirs})")
    return [result for result, _ in answers]


def own_group() -> Any:
    """A group of all ranks, over gloo, for threads whose exchanges must not mix with those of training.

    All ranks ask for it together; made once for each default group.
    """
    global _group
    if _group is None or _group[0] is not dist.group.WORLD:
        _group = (dist.group.WORLD, dist.new_group(backend="gloo"))
    return _group[1]
