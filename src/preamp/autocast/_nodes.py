"""Records which nodes of autograd's graph were made in preamp's regions.

Code that runs in backward under autocast (an activation checkpoint that recomputes its block, the backward of a custom
function) is set up by torch, which knows of a region only its dtype. Whose rules hold there depends on where the node
that is being run was made. Torch numbers nodes as they are made, so a region is an interval of such numbers.
"""

from __future__ import annotations

import threading
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

KEPT = 2**16
"""The number of intervals kept: as many regions may come between a forward pass and its backward."""

_engine: Any = torch.autograd.Variable._execution_engine


@dataclass(slots=True)
class _Pass:
    """A backward pass of a thread."""

    within: bool
    """Whether a node made in a region has started it: a checkpoint, which runs backward through what it recomputed."""
    holds: bool = False
    """Whether preamp's rules applied at the last check."""


class _Here(threading.local):
    def __init__(self) -> None:
        self.passes: dict[int, _Pass] = {}
        """Those of this thread that have not ended, by the number of their task; the innermost is the last."""
        self.seen = 0
        """The number of the next node when it was last known what kind of region this thread is in."""
        self.compiled = False
        """Whether that was one of preamp's in compiled code, which enters and leaves it without a call."""


class RegionNodes:
    """Intervals of sequence numbers, disjoint and in order; one list for all threads, as no node records its own."""

    now: Callable[[], int] = staticmethod(torch._C._autograd._get_sequence_nr)
    """The number that the next node of this thread gets."""

    def __init__(self) -> None:
        self._begins: list[int] = []
        self._ends: list[int] = []
        self._lock = threading.Lock()
        self._here = _Here()

    def add(self, begin: int) -> None:
        """Nodes from number `begin` until now were made in a region."""
        if self._here.passes and torch._C._current_graph_task_id() == -1:
            self._here.passes.clear()  # of a backward pass that failed
        end = self._here.seen = self.now()
        self._here.compiled = False
        if begin >= end:
            return
        with self._lock:
            first, last = bisect_left(self._ends, begin), bisect_right(self._begins, end)
            if first < last:  # they overlap or touch
                begin, end = min(begin, self._begins[first]), max(end, self._ends[last - 1])
            self._begins[first:last], self._ends[first:last] = [begin], [end]
            if len(self._ends) > KEPT:
                del self._begins[0], self._ends[0]

    def clear(self) -> None:
        """Forget all: nothing rules them any more, and another thread's nodes may have the same numbers."""
        with self._lock:
            self._begins.clear()
            self._ends.clear()

    def note(self, compiled: bool) -> None:
        """A ruled operator is called in a region of preamp's in compiled code, or in one of torch's.

        Nodes since the last such call are of this one's region, or are none for which that makes a difference: those
        that recompute have ruled operators around them.
        """
        if compiled:
            self.add(self._here.seen)
        self._here.seen, self._here.compiled = self.now(), compiled

    def is_running(self) -> bool:
        """Whether the node that this thread's backward pass is running was made in a region. Asked in backward only."""
        task, passes = torch._C._current_graph_task_id(), self._here.passes
        if task not in passes:
            if self._here.compiled:  # what came after the last ruled operator
                self.add(self._here.seen)
            within = bool(passes) and passes[next(reversed(passes))].holds
            passes[task] = _Pass(within)
            _engine.queue_callback(lambda: passes.pop(task, None))
        this, node = passes[task], torch._C._current_autograd_node()
        this.holds = this.within or (node is not None and self.has(node))
        return this.holds

    def has(self, node: Any) -> bool:
        """Whether a node was made in one of the intervals."""
        number = node._sequence_nr()
        with self._lock:
            place = bisect_right(self._ends, number)
            return place < len(self._begins) and self._begins[place] <= number


def nodes_behind(tensor: torch.Tensor) -> Iterator[Any]:
    """Every node of the graph that a tensor was computed by, each once, the nearest first."""
    seen: set[Any] = {None}
    left: deque[Any] = deque([tensor.grad_fn])
    while left:
        node = left.popleft()
        if node not in seen:
            seen.add(node)
            yield node
            left.extend(each for each, _ in node.next_functions)


NODES = RegionNodes()
