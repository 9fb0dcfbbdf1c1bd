"""Low copies of float32 weights, kept from one micro-batch to the next.

autocast casts a weight at its first use in a region and forgets the copy when the region ends. With gradients
accumulated over micro-batches that is one cast a micro-batch of weights that have not changed. Here a session's
region leaves the copies in torch's cache; a step, a write to a weight, or a backward pass that no other is to follow
drops them.

Activation checkpointing enters regions of its own during backward, and torch clears the cache when those end. There
nothing is to be gained by keeping, and something to lose: a forward pass that finds a copy and a recomputation that
makes one differ by a cast, which selective checkpointing, pairing results by their order, takes for another. So the
first step keeps nothing and looks on, and a session that has seen its cache cleared in a backward pass never keeps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from ..autocast import autocast
from ..rules import OpRules

_VERSION = attrgetter("_version")


class CacheProbe:
    """Tells whether torch's cache of casts, which cannot be read, was cleared: by a cast that is asked for again."""

    def __init__(self) -> None:
        self._weight = torch.zeros(1, dtype=torch.float32, device="cpu", requires_grad=True)  # whatever the defaults
        self._planted: Any = None
        self.in_cache = False
        """Whether the cache may hold this object's cast."""

    def plant(self) -> None:
        """Put a cast into the cache."""
        self._planted = self._cast()

    def cleared(self) -> bool:
        """Whether the cast that was planted, if one was, is gone."""
        planted, self._planted = self._planted, None
        return planted is not None and self._cast() is not planted

    def _cast(self) -> Any:
        """The cached cast's node in the graph. A cast of the CPU's, which accelerators and their graphs do not see."""
        self.in_cache = True
        torch.autocast_increment_nesting()  # so that leaving this region does not clear the cache
        try:
            with torch.inference_mode(False), torch.enable_grad(), torch.autocast("cpu", torch.bfloat16):
                product = torch.matmul(self._weight, self._weight)
        finally:
            torch.autocast_decrement_nesting()
        assert product.grad_fn is not None
        return product.grad_fn.next_functions[0][0]


class KeptCasts:
    """Whether torch's cache holds casts of a session's weights outside a region, and whether they are still right."""

    def __init__(self, weights: Callable[[], Iterable[Tensor]], refresh: Callable[[], None]) -> None:
        self._weights, self._refresh = weights, refresh
        self._list: list[Tensor] = []
        self._versions: list[int] | None = None
        self._passes = 0
        self._accumulates = self._stepped = self._recomputes = False
        self._probe = CacheProbe()

    @property
    def keeps(self) -> bool:
        """Whether casts may be kept: from the second step on, unless a backward pass cleared the cache."""
        return self._stepped and not self._recomputes

    def entering(self) -> None:
        """A region begins: copies of weights that were written since must not be used in it."""
        self._look()
        self._refresh()
        if self._versions is not None and self._versions != list(map(_VERSION, self._list)):
            self.drop()

    def left(self) -> None:
        """A region has ended without clearing the cache."""
        self._list = list(self._weights())
        self._versions = list(map(_VERSION, self._list))

    def before_backward(self, more_follow: bool) -> None:
        """Keep casts for another micro-batch, if one follows or this loop is one that accumulates; else free them."""
        self._look()
        self._passes += 1
        kept = self.keeps and (more_follow or self._accumulates)
        if not kept:
            self.drop()
        if kept or not self._stepped:
            self._probe.plant()

    def stepped(self) -> None:
        """Weights have changed. Whoever made several backward passes before this step will do so before the next."""
        self._look()
        self._stepped = True
        self._accumulates, self._passes = self._passes > 1, 0
        self.drop()

    def _look(self) -> None:
        if self._probe.cleared():
            self._recomputes = True
            self.drop()

    def drop(self) -> None:
        """Free what is kept."""
        if self._versions is not None or self._probe.in_cache:
            self._versions, self._list = None, []
            self._probe.in_cache = False
            torch.clear_autocast_cache()


class KeepingRegion(autocast):
    """A region that leaves its casts in the cache; in compiled code and without gradients it is one as any other."""

    def __init__(
        self, device_type: str, dtype: torch.dtype | None, casts: KeptCasts, *, rules: OpRules | None = None
    ) -> None:
        super().__init__(device_type, dtype, rules=rules)
        self._casts = casts

    def __enter__(self) -> KeepingRegion:
        if not torch.compiler.is_compiling():
            self._casts.entering()
        super().__enter__()
        return self

    def __exit__(self, exc_type: Any, exc_val: Any, exc_tb: Any) -> None:
        if torch.compiler.is_compiling() or exc_type is not None or not (torch.is_grad_enabled() and self._casts.keeps):
            super().__exit__(exc_type, exc_val, exc_tb)
            return
        torch.autocast_increment_nesting()  # so that leaving the outermost region does not clear the cache
        try:
            super().__exit__(exc_type, exc_val, exc_tb)
        finally:
            if torch.autocast_decrement_nesting() == 0:
                self._casts.left()
