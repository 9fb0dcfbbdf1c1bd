"""Which tensors an optimizer steps together: worked out once, and again only when something has changed.

torch's optimizers collect parameters, gradients and states anew at every step, which for small tensors takes longer
than stepping them. Here the lists stay, as long as nothing has changed that they were made from: which parameters have
gradients, what tensors their states hold, where all these lie and how they are shaped. That is asked before each step.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from operator import is_, itemgetter
from typing import Any

from torch import Tensor
from torch.nn import Parameter

from ..multi_tensor import TensorList
from ..parallel import ShardReduction
from ..sharding import held_here, is_sharded, placed_as
from ._flat import PIECE, Flat, Look, Lying, lying_of, order, padded
from ._steps import Steps, ages
from ._watch import Lie, States, counting, overlapping


@dataclass(slots=True)
class Bucket:
    """Parameters of one group, device, dtype, age and kinds of state, with their states in the same order."""

    group: dict[str, Any]
    params: list[Parameter]
    names: tuple[str, ...]
    """Of the states that have tensors."""
    mastered: bool
    """Whether they are 16-bit, with float32 masters beside them."""
    states: dict[str, list[Tensor]] = field(default_factory=dict)
    steps: Steps | None = None
    """Steps taken, one count for all, which this bucket alone counts up."""
    contiguous: bool = False
    """Whether parameters and states are contiguous, so that a step need not look at their strides."""
    sharded: bool = False
    """Whether parameters and gradients are DTensors, of which the part is stepped that lies here, like `states`."""
    reduction: ShardReduction | None = None
    """What makes numbers of shards those of whole parameters, where a kind of optimizer has asked for it."""
    flat: Flat | None = None
    """Where parameters and states lie side by side, if they do; `states` are then one tensor each."""
    lie: Lie | None = None
    """How parameters and states lie in memory, if they do not."""
    beside: list[Parameter] = field(default_factory=list)
    """Other parameters that share memory with these."""

    number: int = 0
    """Which of the optimizer's groups it is of."""
    pick: Callable[[list[Tensor]], Sequence[Tensor]] = list
    """Takes the gradients of its parameters out of those of their group."""

    @property
    def step(self) -> Tensor | None:
        """0-d float32 on the device, which a step counts up."""
        return None if self.steps is None else self.steps.one

    def picked(self, gradients: list[Tensor]) -> TensorList | None:
        """The gradients of its parameters, of those of the group's parameters that have any.

        None where parameters, counts or states do not lie as they did, or gradients have other shapes.
        """
        if self.steps is not None and not self.steps.intact:
            return None
        picked = TensorList(self.pick(gradients))
        if self.flat is not None:  # which looks at shapes as it lays the gradients
            return picked if self.flat.holds() else None
        assert self.lie is not None
        if not self.lie.holds() or not self.lie.takes(picked):
            return None
        if self.sharded:
            return TensorList(held_here(placed_as(g, p)) for g, p in zip(picked, self.params, strict=True))
        return picked

    def laid(self, gradients: list[Tensor], look: Look | None = None) -> list[Tensor]:
        """Gradients as a step takes them: one tensor if they are to lie side by side. `gradients`: as `picked`.

        `look`: gets them as they come, every entry once.
        """
        if self.flat is not None:
            return [self.flat.gathered(gradients, look)]
        if look is not None:
            look(gradients)
        return gradients

    def parts(self, tensors: list[Tensor]) -> list[Tensor]:
        """What of tensors like the parameters lies here."""
        return list(map(held_here, tensors)) if self.sharded else tensors

    def tensors(self) -> list[Tensor]:
        """What is stepped."""
        if self.flat is not None:
            return [self.flat.param]
        assert self.lie is not None
        return self.lie.params


class Plan:
    """The buckets of an optimizer for the parameters that had gradients when it was made."""

    def __init__(self, optimizer: Any, present: Sequence[list[Parameter]]) -> None:
        self._groups = list(optimizer.param_groups)
        self._names = list(map(optimizer.state_names, self._groups))
        self._present = list(map(list, present))
        self.buckets: list[Bucket] = []
        every = [param for params in present for param in params]
        shared = overlapping(every)
        for number, (group, params) in enumerate(zip(optimizer.param_groups, present, strict=True)):
            place = {param: i for i, param in enumerate(params)}
            alike: dict[tuple[Any, ...], list[Parameter]] = defaultdict(list)
            flat, movable = optimizer.lays_flat, optimizer.may_move
            for param in params:
                names, lent = optimizer.names_for(group, param), optimizer.may_swap(param)
                lying: Lying = "apart" if param in shared else lying_of(param, flat, movable=movable, lent=lent)
                turn = shared[param][param] if param in shared else 0
                alike[lying, param.device, param.dtype, names, is_sharded(param), lent, turn].append(param)
            if sum(len(own) for (lying, *_), own in alike.items() if lying != "apart") == 1:
                for key in list(alike):
                    together = ("apart", *key[1:])
                    if key != together:
                        alike[together] += alike.pop(key)
            for (lying, *_), own in alike.items():
                for bucket in _buckets_of(optimizer, group, own, lying):
                    bucket.number, bucket.pick = number, _picker([place[param] for param in bucket.params])
                    beside = {other for param in bucket.params for other in shared.get(param, ())}
                    bucket.beside = list(beside.difference(bucket.params))
                    self.buckets.append(bucket)
        places = {param.device.type for param in every}
        self.side_by_side = any(b.flat for b in self.buckets) and places == {"cpu"}
        """Whether some gradients are copied beside others, and none is on an accelerator."""
        self.at_hand = self.side_by_side or (places == {"cuda"} and not any(b.sharded for b in self.buckets))
        """Whether gradients may be read in the lists in which they are stepped."""
        counts = ("step",) if optimizer.counts_steps else ()
        self._states = States(optimizer, [(bucket.params, (*bucket.names, *counts)) for bucket in self.buckets])

    def picked(
        self, optimizer: Any, present: Sequence[list[Parameter]], gradients: Sequence[list[Tensor]]
    ) -> list[tuple[Bucket, list[Tensor]]] | None:
        """The buckets, each with its gradients. `present`, `gradients`: of each group, those that are there.

        None where the plan does not hold any more: other groups, parameters with gradients or states, or elsewhere.
        """
        groups = optimizer.param_groups
        if not _same(self._groups, groups) or self._names != list(map(optimizer.state_names, groups)):
            return None
        if not all(map(_same, self._present, present)) or not self._states.hold(optimizer):
            return None
        found: list[tuple[Bucket, list[Tensor]]] = []
        for bucket in self.buckets:
            picked = bucket.picked(gradients[bucket.number])
            if picked is None:
                return None
            found.append((bucket, picked))
        return found


def _picker(places: list[int]) -> Callable[[list[Tensor]], Sequence[Tensor]]:
    """What takes the items at `places` out of a list."""
    begin, end = places[0], places[0] + len(places)
    return itemgetter(slice(begin, end)) if places == list(range(begin, end)) else itemgetter(*places)


def _same(those: Sequence[Any], these: Sequence[Any]) -> bool:
    return len(those) == len(these) and all(map(is_, those, these))


def _buckets_of(optimizer: Any, group: dict[str, Any], params: list[Parameter], lying: Lying) -> list[Bucket]:
    """Buckets of like parameters, split by how many steps they have seen; states are made where there are none."""
    state: dict[Parameter, dict[str, Any]] = optimizer.state
    mastered, names = optimizer.is_mastered(params[0]), optimizer.names_for(group, params[0])
    age = ages(params, state, optimizer.counts) if optimizer.counts_steps else (lambda _: 0.0)
    by_age: dict[tuple[Steps | float, bool], list[Parameter]] = defaultdict(list)
    for param in params:
        own = state[param] if names or optimizer.counts_steps else {}
        for name in names:
            if own.get(name) is None:
                own[name] = optimizer.new_state(name, group, param, optimizer.state_dtype(name, param))
            optimizer.check_state(name, own[name], param)
        by_age[(age(param), param in optimizer.unstarted)].append(param)
    chunks = [
        (when, *chunk) for (when, _), alike in by_age.items() for chunk in _chunks(optimizer, group, alike, lying)
    ]
    largest = max((padded(sum(p.numel() for p in chunk)) for _, chunk, beside in chunks if beside), default=0)
    scratch = held_here(params[0]).detach().new_zeros(0 if lying == "laid" else largest)
    buckets = []
    for when, alike, side_by_side in chunks:
        bucket = Bucket(group, alike, names, mastered, sharded=is_sharded(alike[0]))
        if optimizer.counts_steps:
            bucket.steps = optimizer.counted(alike, when)
        if side_by_side:
            rows = [state.get(param, {}) for param in alike]
            bucket.flat = Flat(alike, rows, names, lying, counting(state, alike), scratch=scratch)
            bucket.states, bucket.contiguous = bucket.flat.states, True
        else:
            bucket.lie = Lie(alike, [[state[param][name] for param in alike] for name in names], counting(state, alike))
            bucket.states = dict(zip(names, bucket.lie.states, strict=True))
            bucket.contiguous = bucket.lie.dense
        buckets.append(bucket)
    return buckets


def _chunks(
    optimizer: Any, group: dict[str, Any], alike: list[Parameter], lying: Lying
) -> Iterator[tuple[list[Parameter], bool]]:
    """The parameters of each bucket, and whether they are laid side by side there.

    Those that are copied in and out are so in pieces that stay in the cache from one copy to the other.
    """
    plain = optimizer.names_for(group, alike[0]) == optimizer.state_names(group)
    if not plain or lying == "apart":
        yield alike, False
        return
    alike = sorted(alike, key=order)
    if lying == "laid":
        yield alike, True
        return
    begin = total = 0
    for end, param in enumerate(alike):
        if total + param.numel() > PIECE:
            yield alike[begin:end], True
            begin, total = end, 0
        total += param.numel()
    yield alike[begin:], True
