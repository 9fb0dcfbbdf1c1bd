"""Regions of a session: of the forward pass, of full precision, without synchronisation."""

from __future__ import annotations

import functools
import itertools
import re
import threading
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import Optimizer

from ..autocast import PRODUCTS, REGISTRY, VMAPPED, RegionNodes, autocast, decorated, nodes_behind
from ..compiling import traced_by_callers, uncompiled
from ..errors import PreampWarning
from ..formats import LOW_DTYPES, name_of
from ..ledger import Gradients, Masters, dtype_of_gradient, parameters_of, rebuild_reducers, wrappers_of
from ..modules import Conversion, Exports
from ..policy import Policy
from ..sharding import sharded_parts
from ._checks import check_hooks

F = TypeVar("F", bound=Callable[..., Any])


class SessionRegion(autocast):
    """A region whose rules end when the session is closed.

    `kept`: whether torch keeps casts of weights, each with a reference to its weight. `entering`: called as it begins,
    but not in compiled code. `another`: makes a region like this one. `opened`: the outermost open region of the
    session in each thread. Closing the session leaves it, for Ctrl-C within a region's enter or exit leaves it open.
    """

    _lingers = False

    @traced_by_callers
    def __init__(
        self, device_type: str, dtype: torch.dtype | None, enabled: bool, kept: bool | None,
        entering: Callable[[], None], another: Callable[[], SessionRegion], opened: dict[int, SessionRegion],
    ) -> None:  # fmt: skip
        super().__init__(device_type, dtype, enabled, kept)
        self._entering, self._another, self._opened = entering, another, opened

    @uncompiled
    def _enter(self, number: int) -> None:
        self._entering()
        self._opened.setdefault(threading.get_ident(), self)
        super()._enter(number)

    @uncompiled
    def _exit(self) -> None:
        outermost = self._opened.get(threading.get_ident())
        if outermost is not None:  # else the session was closed inside
            super()._exit()
            if outermost is self and not self._outer:
                del self._opened[threading.get_ident()]

    def leave(self) -> None:
        """Leave it in this thread, and all that was entered inside; nothing if it was left."""
        self._unwind()

    def __call__(self, func: F) -> F:
        """`func` run inside such a region; each call enters a region of its own, so recursion and threads are safe."""
        return decorated(func, self._another)


def held_kernels(policy: Policy, device_type: str) -> Callable[[], None]:
    """Have the dispatcher hold the kernels that a session needs; returns what releases them."""
    if policy.has_regions:
        assert policy.ops is not None
        return functools.partial(REGISTRY.release, REGISTRY.hold_rules(policy.ops, device_type))
    needed = [PRODUCTS, VMAPPED] if device_type == "cpu" else [VMAPPED]
    holder = object()
    for kernels in needed if policy.params in LOW_DTYPES else ():
        kernels.hold(holder)

    def release() -> None:
        for kernels in needed:
            kernels.release(holder)

    return release


_PRODUCT = re.compile(r"(Add|B|Badd)?[Mm]m|Convolution|Linear|ScaledDot")
_NATIVE = re.compile(r"\w+Backward\d+|torch::autograd::\w+")


def dtypes_of_products(loss: Tensor) -> set[torch.dtype]:
    """The dtypes in which matrix products that led to `loss` were computed.

    Empty where something cannot be looked into: compiled code, checkpoints, functions of one's own.
    """
    found = set()
    for node in nodes_behind(loss):
        name = node.name()
        if not _NATIVE.fullmatch(name):
            return set()
        if _PRODUCT.match(name):
            found.add(node._input_metadata[0].dtype)
    return found


def warn_outside(loss: Tensor, policy: Policy, full: FullPrecision) -> None:
    """Warn if the first loss of a session, before any of its regions, was computed in another dtype than they have.

    Not if it was made in full precision on purpose.
    """
    inside = loss.grad_fn is not None and full.nodes.has(loss.grad_fn)
    if not policy.has_regions or policy.params is not torch.float32 or inside:
        return  # a 16-bit model tells of another region as it is called
    found = dtypes_of_products(loss)
    others = found & LOW_DTYPES - {policy.compute}
    if others or found == {torch.float32}:
        where = "another region, as torch.autocast makes them" if others else "no region"
        warnings.warn(
            f"the session computes in {name_of(policy.compute)} inside of session.autocast(), and this loss was "
            f"computed in {' and '.join(map(name_of, others or found))}, in {where}. Write `with session.autocast():` "
            "around the forward pass and the loss, in place of any other",
            PreampWarning,
            stacklevel=4,
        )


class FullPrecision:
    """Runs models with their masters and float32 buffers, without casts.

    Gradients are put aside meanwhile. New ones are dropped at the end, unless the session's own backward pass made
    them: then they are added to those from before. Ctrl-C may come at any line; the next `leave` undoes
    what was done until then.
    """

    def __init__(
        self, models: Iterable[nn.Module], optimizers: Sequence[Optimizer], masters: Masters,
        conversions: Sequence[Conversion],
    ) -> None:  # fmt: skip
        self._models, self._optimizers = list(models), optimizers
        self._masters, self._conversions = masters, conversions
        self._aside: dict[Parameter, Tensor] = {}
        self._inside: dict[Parameter, Tensor | None] = {}
        self._low: dict[Parameter, Tensor | None] = {}
        self._exports: Exports | None = None
        self.depth = 0
        """How many are inside now."""
        self.begun = False
        """Whether `leave` has anything to undo."""
        self.counts = self.waiting = self.closed_over = False
        """Whether a backward pass of the session has run inside, gradients were put aside that no step has used, and
        an optimizer has stepped by itself with a closure."""
        self.nodes, self._first_node = RegionNodes(), 0

    def _parameters(self) -> Iterator[Parameter]:
        """Those of the models, and those that optimizers have besides."""
        of_models = (model.parameters() for model in self._models)
        return itertools.chain(*of_models, *map(parameters_of, self._optimizers))

    def leave(self) -> None:
        """Undo the beginning, as far as it came."""
        if not self.begun:
            return
        if self._exports is not None:
            self._exports.end(self._models)
        for conversion in self._conversions:
            conversion.to_low()
        every = dict.fromkeys(self._parameters())
        self._inside = self._inside or {p: p.grad for p in every}
        self._masters.low()
        for conversion in self._conversions:
            conversion.resume()
        # 16-bit parameters are back, with the gradients they had and those that have come to them meanwhile
        self._low = self._low or {p: p.grad for p in every if p.grad is not self._inside[p]}
        for parameter, inside in self._inside.items():
            before = self._aside.get(parameter)
            gradients = [self._low.get(parameter, before), inside] if self.counts else [before]
            present = [each.to(dtype_of_gradient(parameter)) for each in gradients if each is not None]
            parameter.grad = present[0] + present[1] if len(present) == 2 else (present[0] if present else None)
        self.begun, self.counts, self.closed_over, self._exports = False, False, False, None
        self._aside, self._inside, self._low = {}, {}, {}

    def __enter__(self) -> None:
        """Turn models to float32; `SessionError` if masters cannot be swapped in."""
        self.depth += 1
        self._first_node = self.nodes.now()
        try:
            self._aside = {p: p.grad for p in self._parameters() if p.grad is not None}
            self.begun, self.waiting = True, self.waiting and bool(self._aside)
            self._exports = Exports()
            self._masters.full()
            for parameter in self._aside:
                parameter.grad = None
            for conversion in self._conversions:
                conversion.bypass()
                conversion.to_float()
        except BaseException:
            self.__exit__()
            raise

    def runs(self, does: bool) -> None:
        """Have the model all in float32 if it `does` run inside."""
        for conversion in self._conversions if does else ():
            conversion.rest_to_float()

    def __exit__(self, *_: object) -> None:
        self.depth = 0
        self.nodes.add(self._first_node)
        self.leave()


class Joining:
    """Brings parameters under the policy that were frozen or in no optimizer before, and are stepped from now on.

    Also refuses communication hooks, added to a DistributedDataParallel since, with which backward would never return.
    """

    def __init__(
        self, optimizers: Sequence[Optimizer], models: Mapping[str, nn.Module], conversions: Sequence[Conversion],
        gradients: Gradients,
    ) -> None:  # fmt: skip
        self._optimizers, self._models, self._conversions, self._gradients = optimizers, models, conversions, gradients
        self._seen = (0, 0)  # before the first region
        self._wrappers: list[weakref.ref[Any]] | None = None  # looked for once, which takes long
        self.thread: int | None = None
        """That of the last backward pass."""

    def check(self) -> None:
        """Refuse such hooks."""
        if self._wrappers is None:
            every = {p for model in self._models.values() for p in model.parameters()}
            self._wrappers = list(map(weakref.ref, wrappers_of(every)))
        for wrapper in self._wrappers:
            if (alive := wrapper()) is not None:
                check_hooks(alive)

    def __call__(self) -> None:
        self.check()
        groups = [group["params"] for optimizer in self._optimizers for group in optimizer.param_groups]
        seen = sum([each.learning for each in self._conversions]), sum(map(len, groups))
        if seen != self._seen:
            self._seen, stepped = seen, set(itertools.chain.from_iterable(groups))
            rebuild_reducers({p for conversion in self._conversions for p in conversion.join(stepped)})
            self._gradients.others_have_masters()


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
