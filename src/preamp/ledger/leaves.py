"""One record a parameter: its name, what is stored beside it, and when the two last agreed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import attrgetter, is_, itemgetter
from sys import getrefcount
from typing import Any
from weakref import getweakrefcount

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import Optimizer

from ..kernels import TensorList

_VERSION, _STORED, _PARAMS = attrgetter("_version"), attrgetter("stored"), itemgetter("params")

_IN_A_LIST = next(map(getrefcount, [object()]))
"""References to what nothing holds but the list that is looked through."""


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


def gradients_of(optimizer: Optimizer) -> list[Tensor]:
    """The gradients that an optimizer's parameters have now."""
    return [p.grad for p in parameters_of(optimizer) if p.grad is not None]


@dataclass(slots=True)
class Leaf:
    """What is known of one parameter and of what is stored beside it."""

    name: str
    stored: Tensor
    """Of the parameter's shape: its float32 master, which it is while swapped in; or the lower half of that, int16."""
    low: Tensor
    """The 16-bit data that the model computes with."""
    number: int
    """By which `Agreed` knows it."""
    other: Parameter | None = None
    """What the parameter is else, with its 16-bit gradient and its hooks, while the master is in its place."""
    shown: Tensor | None = None
    """The float32 gradient that stands for the 16-bit one meanwhile; None where that is only put aside."""
    shown_version: int = 0

    def take_back(self, parameter: Parameter, scale: Tensor | None, changed: bool) -> None:
        """Let the 16-bit gradient be what became of the float32 one, times `scale`: of one that is gone nothing."""
        assert self.other is not None
        shown, now, low = self.shown, parameter.grad, self.other.grad
        if shown is None or (now is shown and now._version == self.shown_version and not changed):
            return
        if now is None:
            self.other.grad = None
            return
        wide = now if scale is None else now * scale.to(now.device)
        if low is None or low.layout is not torch.strided:
            self.other.grad = wide.to(self.low.dtype)
        else:
            low.copy_(wide)  # in place: a communication bucket may hold it


class Agreed:
    """What parameters and their masters last agreed on, by the number of a leaf, in lists that C code walks.

    The hash of a parameter is a Python function, and each leaf lies somewhere else in memory: to ask a thousand of
    them takes longer than to step them.
    """

    def __init__(self) -> None:
        self.versions: list[int] = []
        """The parameters' version counters."""
        self.addresses: list[int] = []
        """Where they lay."""
        self.exchanges = 0
        """How often a master was another tensor than before."""
        self.asked = 0
        """How often somebody may have got hold of a master."""

    def add(self, parameter: Parameter) -> int:
        """One more; its number."""
        self.versions.append(parameter._version)
        self.addresses.append(parameter.data_ptr())
        return len(self.versions) - 1

    def note(self, number: int, parameter: Parameter) -> None:
        """A parameter agrees with its master now, as it is."""
        self.versions[number], self.addresses[number] = parameter._version, parameter.data_ptr()

    def holds(self, number: int, parameter: Parameter) -> bool:
        """Whether it was not written since, and lies where it did."""
        return self.versions[number] == parameter._version and self.addresses[number] == parameter.data_ptr()


class Leaves:
    """Some parameters, those of them that have a leaf, and these: what is asked about together."""

    def __init__(self, parameters: Sequence[Parameter], known: Mapping[Parameter, Leaf], agreed: Agreed) -> None:
        self._all, self.made_of = list(parameters), parameters
        """`made_of`: the list that it was last asked about, which its owner may have changed since."""
        self.parameters = [parameter for parameter in parameters if parameter in known]
        self.others = [parameter for parameter in parameters if parameter not in known]
        self.leaves = [known[parameter] for parameter in self.parameters]
        self._agreed, self._numbers = agreed, [leaf.number for leaf in self.leaves]
        begin = self._numbers[0] if self._numbers else 0
        run = slice(begin, begin + len(self._numbers))
        self._run = run if self._numbers == list(range(run.start, run.stop)) else None
        self._pick = itemgetter(run) if self._run else itemgetter(*self._numbers)
        self._stored, self._exchanges = TensorList(), -1
        self._shown = Shown((), None, others=1)

    def is_of(self, parameters: Sequence[Parameter]) -> bool:
        """Whether these are the parameters, in this order."""
        return len(parameters) == len(self._all) and all(map(is_, parameters, self._all))

    def was_made_of(self, parameters: Sequence[Parameter]) -> bool:
        """Whether this is the list that was asked about last: to be asked within a step, where nobody changes it."""
        return parameters is self.made_of and len(parameters) == len(self._all)

    def agree(self, addresses: Sequence[int] | None = None) -> bool:
        """Whether nothing was written, and nothing lies elsewhere, since masters and parameters last agreed.

        `addresses`: where all these parameters lie, if that is known.
        """
        if list(map(_VERSION, self.parameters)) != list(self._pick(self._agreed.versions)):
            return False
        if addresses is None or self.others:
            addresses = list(map(Tensor.data_ptr, self.parameters))
        return list(addresses) == list(self._pick(self._agreed.addresses))

    def note(self) -> None:
        """They agree now, where they lie."""
        versions = list(map(_VERSION, self.parameters))
        if self._run is not None:
            self._agreed.versions[self._run] = versions
            return
        for number, version in zip(self._numbers, versions, strict=True):
            self._agreed.versions[number] = version

    def stored(self) -> TensorList:
        """What is stored beside `parameters`, for one step; writes are not counted, as nobody computes with these."""
        other = self._exchanges != self._agreed.exchanges
        if other:
            self._stored, self._exchanges = TensorList(map(_STORED, self.leaves)), self._agreed.exchanges
        if other or not self._shown.are_where_they_were(self._stored):
            self._stored.ask_anew(owners=())
            self._shown = Shown(self._stored, self._agreed, others=1)  # those of the leaves
        return self._stored


class Shown:
    """Tensors that somebody shows to everybody, and where they lie.

    Who has one of them can give it other memory, which leaves no trace. So their addresses are compared before a step,
    unless nobody can have one: their owner was not asked for any since they were last found in nobody else's hands.
    `owner`: counts in `asked` how often that was; None if nobody counts. `others`: references to each that its owner
    and the caller have, besides that of the list in which they are given.
    """

    def __init__(self, tensors: Sequence[Tensor], owner: Any, others: int) -> None:
        self._addresses = list(map(Tensor.data_ptr, tensors))
        self._alone = {_IN_A_LIST + others}
        self._turnable = [i for i, tensor in enumerate(tensors) if turnable(tensor)]
        self._as_they_lay = [tensors[i].is_contiguous() for i in self._turnable]
        self._owner = owner
        self._asked = -1

    def are_where_they_were(self, tensors: Sequence[Tensor]) -> bool:
        """Whether the same tensors lie as they did."""
        if self._owner is not None and self._owner.asked == self._asked:
            return True
        if list(map(Tensor.data_ptr, tensors)) != self._addresses:
            return False
        if [tensors[i].is_contiguous() for i in self._turnable] != self._as_they_lay:
            return False
        alone = self._owner is not None and set(map(getrefcount, tensors)) == self._alone
        if alone and not any(map(getweakrefcount, tensors)):
            self._asked = self._owner.asked
        return True


def turnable(tensor: Tensor) -> bool:
    """Whether a tensor can be transposed in place without a change of shape."""
    sizes = [size for size in tensor.shape if size > 1]
    return len(set(sizes)) < len(sizes)
