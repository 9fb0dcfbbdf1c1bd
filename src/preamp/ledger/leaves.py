"""One record a parameter: its name, its master and the form in which that is saved, and when the two last agreed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import attrgetter, is_, itemgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import Optimizer

from ..errors import StateError
from ..kernels import TensorList, join
from ..sharding import is_sharded
from .layout import Snapshot

_VERSION, _STORED, _PARAMS = attrgetter("_version"), attrgetter("stored"), itemgetter("params")


def parameters_of(optimizer: Optimizer) -> Iterator[Parameter]:
    """Every parameter in an optimizer's groups."""
    return chain.from_iterable(map(_PARAMS, optimizer.param_groups))


def parameters_in(root: nn.Module) -> list[Parameter]:
    """Every parameter of a model, in half the time of `root.parameters()`, which passes each through two generators."""
    found: list[Parameter | None] = []
    seen: set[nn.Module] = set()
    left: list[nn.Module | None] = [root]
    while left:
        module = left.pop()
        if module is not None and module not in seen:
            seen.add(module)
            found += module._parameters.values()
            left += module._modules.values()
    return [parameter for parameter in found if parameter is not None]


def clear_gradients(model: nn.Module, set_to_none: bool) -> None:
    """`model.zero_grad`, the model's own if its class has one, and else in half the time."""
    if not set_to_none or type(model).zero_grad is not nn.Module.zero_grad:
        model.zero_grad(set_to_none)
        return
    for parameter in parameters_in(model):
        parameter.grad = None


def gradients_of(optimizer: Optimizer) -> list[Tensor]:
    """The gradients that an optimizer's parameters have now."""
    return [p.grad for p in parameters_of(optimizer) if p.grad is not None]


def summed(parameter: Tensor) -> Tensor:
    """A parameter's gradient; of a sparse one the values of equal indices are added up, which may overflow."""
    grad: Any = parameter.grad
    if grad.layout is torch.sparse_coo:
        grad = parameter.grad = grad.coalesce()
    return grad  # type: ignore[no-any-return]


def dtype_of_gradient(parameter: Parameter) -> torch.dtype:
    """The dtype of a parameter's gradient; since torch 2.10 it may differ from the parameter's."""
    return getattr(parameter, "grad_dtype", None) or parameter.dtype


@dataclass(slots=True)
class Leaf:
    """The record of one parameter and of its master."""

    name: str
    stored: Tensor
    """In the parameter's shape: its float32 master, which takes its place while swapped in, or the low bits of one."""
    low: Tensor  # the 16-bit data that the model computes with
    number: int  # in `Agreed`
    other: Parameter | None = None  # the 16-bit parameter, with gradient and hooks, while its master is in its place
    shown: Tensor | None = None  # the float32 gradient shown in place of the 16-bit one; None if that is only put aside
    shown_version: int = 0
    aside: Tensor | None = None
    """The gradient that the 16-bit parameter had before. What it gets meanwhile comes from an earlier forward pass."""

    def fit(self, parameter: Parameter, data: Tensor) -> None:
        """Make room for data of another shape that its user gave a parameter, as where an embedding is resized."""
        if data.shape != self.low.shape:
            self.stored = torch.zeros_like(data, dtype=self.stored.dtype)
            self.low = parameter.data = data.to(parameter.dtype)

    def take_back(self, parameter: Parameter, scale: Tensor | None, changed: bool) -> None:
        """Set the 16-bit gradient to the present float32 one times `scale`; if that was cleared, clear it."""
        assert self.other is not None
        late, aside, self.aside = self.other.grad, self.aside, None
        self.other.grad = None if aside is None else aside.to(dtype_of_gradient(self.other))  # cast since, perhaps
        self._take_shown(parameter, scale, changed)
        if late is not None:
            late = late if scale is None else (late * scale.to(late.device)).to(late.dtype)
            self.other.grad = late if self.other.grad is None else self.other.grad + late

    def _take_shown(self, parameter: Parameter, scale: Tensor | None, changed: bool) -> None:
        assert self.other is not None
        shown, now, low = self.shown, parameter.grad, self.other.grad
        if shown is None or (now is shown and now._version == self.shown_version and not changed):
            return
        if now is None:
            self.other.grad = None
            return
        wide = now if scale is None else now * scale.to(now.device)
        if low is None or low.layout is not torch.strided:
            self.other.grad = wide.to(dtype_of_gradient(self.other))
        else:
            low.copy_(wide)  # in place: a communication bucket may hold it


class Agreed:
    """Versions and addresses of parameters when they last agreed with their masters, in lists that C code walks.

    The hash of a parameter is a Python function, and the leaves are scattered in memory: checking a thousand of them
    takes longer than stepping them.
    """

    def __init__(self) -> None:
        self.versions: list[int] = []
        self.addresses: list[int] = []
        self.in_graphs = False
        """Whether a graph may hold masters, because a forward pass ran while they were in their parameters' places."""

    def add(self, parameter: Parameter) -> int:
        """Add a parameter; returns its number."""
        self.versions.append(parameter._version)
        self.addresses.append(parameter.data_ptr())
        return len(self.versions) - 1

    def note(self, number: int, parameter: Parameter) -> None:
        """Record that a parameter agrees with its master now."""
        self.versions[number], self.addresses[number] = parameter._version, parameter.data_ptr()

    def holds(self, number: int, parameter: Parameter) -> bool:
        """Whether the parameter was neither written nor moved since then."""
        return self.versions[number] == parameter._version and self.addresses[number] == parameter.data_ptr()


class Leaves:
    """Some parameters, those of them that have a leaf, and the leaves, which are checked together."""

    def __init__(self, parameters: Sequence[Parameter], known: Mapping[Parameter, Leaf], agreed: Agreed) -> None:
        self._all = list(parameters)
        self.parameters = [parameter for parameter in parameters if parameter in known]
        self.others = [parameter for parameter in parameters if parameter not in known]
        self.leaves = [known[parameter] for parameter in self.parameters]
        self._agreed, self._numbers = agreed, [leaf.number for leaf in self.leaves]
        begin = self._numbers[0] if self._numbers else 0
        run = slice(begin, begin + len(self._numbers))
        self._run = run if self._numbers == list(range(run.start, run.stop)) else None
        self._pick = itemgetter(run) if self._run else itemgetter(*self._numbers)
        self._stored, self._snapshot = TensorList(), Snapshot(())

    def is_of(self, parameters: Sequence[Parameter]) -> bool:
        """Whether these are the parameters, in this order."""
        return len(parameters) == len(self._all) and all(map(is_, parameters, self._all))

    def agree(self, addresses: Sequence[int] | None = None) -> bool:
        """Whether nothing was written or moved since parameters and what is stored for them last agreed.

        `addresses`: of all these parameters, if known.
        """
        if list(map(_VERSION, self.parameters)) != list(self._pick(self._agreed.versions)):
            return False
        if addresses is None or self.others:
            addresses = list(map(Tensor.data_ptr, self.parameters))
        return list(addresses) == list(self._pick(self._agreed.addresses))

    def note(self) -> None:
        """Record that all of them agree now."""
        versions = list(map(_VERSION, self.parameters))
        if self._run is not None:
            self._agreed.versions[self._run] = versions
            return
        for number, version in zip(self._numbers, versions, strict=True):
            self._agreed.versions[number] = version

    def stored(self) -> TensorList:
        """The masters or low bits of `parameters`, for one step; writes are counted where autograd may use these."""
        now = list(map(_STORED, self.leaves))
        if not all(map(is_, now, self._stored)) or not self._snapshot.holds(now):
            self._stored, self._snapshot = TensorList(now), Snapshot(now)
            self._stored.owners = None if self._agreed.in_graphs else ()
        return self._stored


KEPT = {"split": torch.int16, "split24": torch.int8}
"""The dtype of the bits, for each `master=` of an optimizer with split masters."""

Kept = Tensor | tuple[Tensor, Tensor]
"""A master: a float32 tensor, or a bfloat16 weight and the bits that it lacks."""


def whole(name: str, kept: Any) -> Tensor:
    """A master in float32, in new memory if it was split. `StateError` for what is none."""
    shape_of(name, kept)
    return kept.to(torch.float32) if isinstance(kept, Tensor) else join(*kept)


def shape_of(name: str, kept: Any) -> tuple[int, ...]:
    """The shape of a master; `StateError` for what is none."""
    parts = list(kept) if isinstance(kept, (tuple, list)) and len(kept) == 2 else [kept]
    if all(isinstance(p, Tensor) and p.layout is torch.strided and p.device.type != "meta" for p in parts):
        dtypes = [p.dtype for p in parts]
        split = dtypes in [[torch.bfloat16, bits] for bits in KEPT.values()] and parts[0].shape == parts[1].shape
        if split or (len(parts) == 1 and parts[0].is_floating_point()):
            return tuple(parts[0].shape)
    seen = " and ".join(f"{p.dtype} {list(p.shape)}" if isinstance(p, Tensor) else f"{p!r:.60}" for p in parts)
    raise StateError(
        f"the master {name!r} is {seen} in the state: a dense floating tensor is wanted, or a bfloat16 weight and its "
        "bits, int16 or int8, of the same shape"
    )


def check_masters(state: Mapping[str, Any], leaves: Mapping[Parameter, Leaf], left: Mapping[str, Parameter]) -> None:
    """`StateError` unless saved masters are those of `leaves`, and of parameters that have none now (`left`)."""
    named = {**left, **{leaf.name: parameter for parameter, leaf in leaves.items()}}
    missing, foreign = sorted(named.keys() - state.keys()), sorted(state.keys() - named.keys())
    if missing or foreign:
        raise StateError(f"masters do not fit this model: missing {missing[:5]}, unexpected {foreign[:5]}")
    for name, parameter in named.items():
        kept, shape = state[name], tuple(parameter.shape)
        if (seen := shape_of(name, kept)) != shape:
            raise StateError(f"the master {name!r} has shape {seen} in the state and {shape} here")
        if is_sharded(parameter) and not is_sharded(kept if isinstance(kept, Tensor) else kept[0]):
            raise StateError(
                f"the master {name!r} is whole in the state and sharded here: load what save_sharded wrote, or give it "
                "as a DTensor"
            )
