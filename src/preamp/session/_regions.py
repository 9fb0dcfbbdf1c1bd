"""Regions of a session: of the forward pass, of full precision, without synchronisation."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from ..autocast import autocast, decorated
from ..compiling import traced_by_callers
from ..ledger import Masters
from ..modules import Conversion
from ..sharding import sharded_parts

F = TypeVar("F", bound=Callable[..., Any])


class SessionRegion(autocast):
    """A region whose rules end when the session is closed.

    `entering`: called as the region begins, but not in compiled code. `another`: makes a region like this one.
    """

    _lingers = False

    @traced_by_callers
    def __init__(
        self, device_type: str, dtype: torch.dtype | None, enabled: bool, entering: Callable[[], None],
        another: Callable[[], SessionRegion],
    ) -> None:  # fmt: skip
        super().__init__(device_type, dtype, enabled)
        self._entering, self._another = entering, another

    @traced_by_callers
    def __enter__(self) -> SessionRegion:
        if not torch.compiler.is_compiling():
            self._entering()
        super().__enter__()
        return self

    def __call__(self, func: F) -> F:
        """`func` run inside such a region; each call enters a region of its own, so recursion and threads are safe."""
        return decorated(func, self._another)


class FullPrecision:
    """Runs models with their masters and float32 buffers, without casts; their gradients are put aside.

    `enter` and `leave` may be interrupted at any line. `leave` then finishes what was begun, and undoes it.
    """

    def __init__(self, models: Iterable[nn.Module], masters: Masters, conversions: Sequence[Conversion]) -> None:
        self._models, self._masters, self._conversions = list(models), masters, conversions
        self._aside: dict[Parameter, Tensor] = {}
        self.depth = 0
        """How many are inside now."""
        self.begun = False
        """Whether `leave` has anything to undo."""

    def enter(self) -> None:
        """Turn models to float32. `SessionError` if masters cannot be swapped in; call `leave` then."""
        self._aside = {p: p.grad for model in self._models for p in model.parameters() if p.grad is not None}
        self.begun = True
        self._masters.full()
        for parameter in self._aside:
            parameter.grad = None
        for conversion in self._conversions:
            conversion.bypass()
            conversion.to_float()

    def leave(self) -> None:
        """Undo `enter`, as far as it came."""
        if not self.begun:
            return
        for conversion in self._conversions:
            conversion.to_low()
        self._masters.low()
        for conversion in self._conversions:
            conversion.resume()
        for parameter, gradient in self._aside.items():
            parameter.grad = gradient
        self.begun, self._aside = False, {}

    def __enter__(self) -> None:
        self.depth += 1
        try:
            self.enter()
        except BaseException:
            self.__exit__()
            raise

    def __exit__(self, *_: object) -> None:
        self.depth = 0
        self.leave()


@contextmanager
def not_synchronised(models: Iterable[nn.Module]) -> Iterator[None]:
    """Inside, DistributedDataParallel and FSDP2 models do not exchange gradients."""
    with ExitStack() as stack:
        for model in models:
            if isinstance(model, nn.parallel.DistributedDataParallel):
                stack.enter_context(model.no_sync())
            for part in sharded_parts(model):
                part.set_requires_gradient_sync(False, recurse=False)
                stack.callback(part.set_requires_gradient_sync, True, recurse=False)
        yield
