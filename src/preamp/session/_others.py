"""Tensors that get gradients from a session's scaled backward passes and are in none of its optimizers."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from ..autocast import nodes_behind
from ..ledger import is_marked, mark, parameters_of
from ..modules import Conversion

_MARK = "_preamp_scaled"
_engine: Any = torch.autograd.Variable._execution_engine


class OtherLeaves:
    """Parameters that the session leaves alone, and other leaves of its losses.

    Another optimizer would step their gradients with the loss scale still in them. So each gradient that a scaled
    backward pass has added to gets a mark. The leaves are found by walking the loss's graph, in passes 1, 2, 4, 7, 11,
    17 ..., and in each pass once another optimizer has stepped; a walk takes less than a microsecond a node.
    """

    def __init__(self, optimizers: Sequence[Optimizer], conversions: Sequence[Conversion], separate: bool) -> None:
        self._optimizers, self._conversions, self._separate = optimizers, conversions, separate
        self._found: dict[int, weakref.ref[Tensor]] = {}
        self._passes, self._next, self.met = 0, 1, False
        """`met`: whether an optimizer that the session does not have has stepped."""

    def __iter__(self) -> Iterator[Tensor]:
        found = [leaf for known in self._found.values() if (leaf := known()) is not None] if self._found else ()
        return chain(*map(attrgetter("unstepped"), self._conversions), found)

    def unscaled(self) -> list[Parameter]:
        """Parameters to be unscaled after each pass, as losses have scales of their own: they may join an optimizer."""
        return [leaf for leaf in self if self._separate and isinstance(leaf, Parameter)]

    def find(self, loss: Tensor) -> None:
        """Look, now and then, for leaves that the scaled backward pass of a loss will reach."""
        self._passes += 1
        if self.met or self._passes == self._next:
            self._next = self._passes + 1 + self._passes // 2
            own = {id(p) for optimizer in self._optimizers for p in parameters_of(optimizer)}
            leaves = [getattr(node, "variable", None) for node in nodes_behind(loss)]
            self._found.update({id(p): weakref.ref(p) for p in leaves if p is not None and id(p) not in own})

    def mark_after_this(self, then: Callable[[], None]) -> None:
        """Call `mark`, and `then`, at the end of the scaled backward pass that is running, and has just begun."""
        _engine.queue_callback(functools.partial(self.mark, self.gradients()))
        _engine.queue_callback(then)

    def scaled(self) -> set[Tensor]:
        """Select leaves whose gradients are multiplied by the loss scale, and have not been changed since."""
        return {leaf for leaf in self if is_marked(leaf.grad, _MARK)}

    def gradients(self) -> list[tuple[Tensor, Tensor | None, int]]:
        """Each leaf with its gradient, and that one's version, before a scaled backward pass."""
        return [(leaf, leaf.grad, getattr(leaf.grad, "_version", -1)) for leaf in self if leaf.requires_grad]

    def mark(self, before: list[tuple[Tensor, Tensor | None, int]]) -> None:
        """Mark the gradients that a scaled backward pass has changed."""
        changed = [p.grad for p, g, version in before if p.grad is not g or getattr(g, "_version", -1) != version]
        mark(changed, _MARK)
