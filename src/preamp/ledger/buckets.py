"""Which tensors an optimizer steps together: computed once, and again only when something has changed.

torch's optimizers collect parameters, gradients and states at every step, which for small tensors takes longer than
stepping them. Here the lists are kept while nothing has changed that they were made from: which parameters have
gradients, which tensors their states hold, and the addresses and shapes of all of these. Each step checks that first.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from operator import is_, itemgetter
from typing import Any

from torch import Tensor
from torch.nn import Parameter

from ..kernels import ShardSum, Storage, TensorList, count_writes, present_in
from ..sharding import held_here, is_sharded, placed_as
from .layout import Entries, Layout, overlapping
from .leaves import Leaves, parameters_of
from .masters import Masters
from .state import Steps, ages


@dataclass(slots=True)
class Bucket:
    """Parameters of one group, device, dtype, step count and kinds of state, which one call steps."""

    group: dict[str, Any]
    params: list[Parameter]
    leaves: Leaves | None
    """What is stored for them: masters, or the low bits of split ones; None: nothing."""
    names: tuple[str, ...]
    """The names of the states that have tensors, in the order of `storage.states`."""
    storage: Storage
    steps: Steps | None
    """Steps taken, one count for all, which only this bucket increments."""
    layout: Layout
    """Where parameters and states are."""
    sharded: bool = False
    """Whether parameters and gradients are DTensors, of which this process steps its shard."""
    shard_sum: ShardSum | None = None
    """Combines numbers of shards into those of whole parameters, for optimizers that need it."""
    aliases: list[Parameter] = field(default_factory=list)
    """Other parameters that share memory with these."""
    number: int = 0
    """The index of its parameter group."""
    first: int = 0
    """The place of its first parameter among all of the optimizer."""
    pick: Callable[[list[Tensor]], Sequence[Tensor]] = list
    """Selects the gradients of its parameters from those of their group."""

    def collect(self, gradients: list[Tensor]) -> list[Tensor] | None:
        """The gradients of its parameters as a step takes them. `gradients`: of the group's parameters that have any.

        None if parameters, counts or states have moved or changed, or gradients have other shapes.
        """
        if (self.steps is not None and not self.steps.intact) or not self.layout.holds():
            return None
        own = TensorList(self.pick(gradients))
        if not self.layout.takes(own):
            return None
        if self.sharded:
            return TensorList(held_here(placed_as(g, p)) for g, p in zip(own, self.params, strict=True))
        return own

    def begin_step(self, masters: Masters) -> None:
        """Update what is stepped from parameters that were written from outside."""
        if self.leaves is not None:
            if not masters.split:
                masters.refresh(self.leaves, None if self.sharded else self.layout.params.addresses)
            stored: list[Tensor] = self.leaves.stored()
            if self.sharded:
                stored = list(map(held_here, stored))
            masters.place(self.storage, stored, self.layout.params)

    def end_step(self, masters: Masters) -> None:
        """Record what the step has written."""
        if self.leaves is not None and not masters.split:
            self.leaves.note()
        if self.steps is not None:
            self.steps.counted()
        if self.aliases:  # so that their masters follow
            count_writes(self.aliases)


Collected = list[tuple[Bucket, list[Tensor]]]
"""Buckets, each with the gradients of its step."""


class Buckets:
    """The buckets of an optimizer for the parameters that had gradients when they were made.

    `present`: these, by group. Unless these are `whole`, other parameters are not looked at.
    """

    def __init__(
        self, optimizer: Any, present: Sequence[list[Parameter]], masters: Masters, *, whole: bool = True
    ) -> None:
        self._whole, self._groups = whole, list(optimizer.param_groups)
        self._names = list(map(optimizer.state_names, self._groups))
        self._present = list(map(list, present))
        self.all: list[Bucket] = []
        every = [param for params in present for param in params]
        shared, order = overlapping(every), {param: i for i, param in enumerate(parameters_of(optimizer))}
        for number, (group, params) in enumerate(zip(optimizer.param_groups, present, strict=True)):
            place = {param: i for i, param in enumerate(params)}
            for own in _alike(optimizer, group, params, shared):
                for bucket in _buckets_of(optimizer, group, own, masters):
                    bucket.number, bucket.pick = number, _picker([place[param] for param in bucket.params])
                    bucket.first = order[bucket.params[0]]
                    aliases = {other for param in bucket.params for other in shared.get(param, ())}
                    bucket.aliases = list(aliases.difference(bucket.params))
                    self.all.append(bucket)
        places = {param.device.type for param in every}
        alike = places == {"cuda"} or (places == {"cpu"} and len(self.all) == 1)  # of several the norm has other bits
        self.readable = alike and not any(bucket.sharded for bucket in self.all)
        """Whether gradients may be read in the lists of the step."""
        counts = ("step",) if optimizer.counts_steps else ()
        self._entries = Entries(optimizer, [(bucket.params, (*bucket.names, *counts)) for bucket in self.all])

    def collect(self, optimizer: Any) -> Collected | None:
        """The buckets, each with its gradients.

        None if these buckets are out of date: other groups, parameters with gradients, states or addresses.
        """
        groups = optimizer.param_groups
        if not _same(self._groups, groups) or self._names != list(map(optimizer.state_names, groups)):
            return None
        looked_at = [group["params"] for group in groups] if self._whole else self._present
        present, gradients = zip(*map(present_in, looked_at), strict=True)
        if not all(map(_same, self._present, present)) or not self._entries.hold(optimizer):
            return None
        found: Collected = []
        for bucket in self.all:
            own = bucket.collect(gradients[bucket.number])
            if own is None:
                return None
            found.append((bucket, own))
        return found


def _alike(
    optimizer: Any, group: dict[str, Any], params: list[Parameter], shared: dict[Parameter, dict[Parameter, int]]
) -> Iterator[list[Parameter]]:
    """Parameters that may be in one bucket."""
    alike: dict[tuple[Any, ...], list[Parameter]] = defaultdict(list)
    for param in params:
        names, mastered = optimizer.names_for(group, param), optimizer.is_mastered(param)
        turn = shared[param][param] if param in shared else 0
        alike[param.device, param.dtype, names, is_sharded(param), mastered, turn].append(param)
    yield from alike.values()


def _picker(places: list[int]) -> Callable[[list[Tensor]], Sequence[Tensor]]:
    """A function that selects the items at `places` from a list."""
    begin, end = places[0], places[0] + len(places)
    return itemgetter(slice(begin, end)) if places == list(range(begin, end)) else itemgetter(*places)


def _same(those: Sequence[Any], these: Sequence[Any]) -> bool:
    return len(those) == len(these) and all(map(is_, those, these))


def _buckets_of(optimizer: Any, group: dict[str, Any], params: list[Parameter], masters: Masters) -> list[Bucket]:
    """Buckets of like parameters, split by step count; missing states are made."""
    state: dict[Parameter, dict[str, Any]] = optimizer.state
    names = optimizer.names_for(group, params[0])
    age = ages(params, state, optimizer.counts) if optimizer.counts_steps else (lambda _: 0.0)
    by_age: dict[tuple[Steps | float, bool], list[Parameter]] = defaultdict(list)
    for param in params:
        own = state[param] if names or optimizer.counts_steps else {}
        for name in names:
            if own.get(name) is None:
                own[name] = optimizer.new_state(name, group, param, optimizer.state_dtype(name, param))
            optimizer.check_state(name, own[name], param)
        by_age[(age(param), param in optimizer.unstarted)].append(param)
    buckets = []
    for (when, _), alike in by_age.items():
        steps = optimizer.counted(alike, when) if optimizer.counts_steps else None
        layout = Layout(alike, [[state[param][name] for param in alike] for name in names])
        storage = Storage(layout.params, layout.states)
        storage.step = None if steps is None else steps.one
        leaves = masters.leaves_of(alike) if optimizer.is_mastered(params[0]) else None
        buckets.append(Bucket(group, alike, leaves, names, storage, steps, layout, is_sharded(alike[0])))
    return buckets
