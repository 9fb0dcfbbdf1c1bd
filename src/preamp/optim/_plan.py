"""Which tensors an optimizer steps together: worked out once, and again only when something has changed.

torch's optimizers collect parameters, gradients and states anew at every step, which for small tensors takes longer
than stepping them. Here the lists stay, as long as the same parameters have gradients.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from operator import is_, itemgetter
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from ..parallel import ShardReduction
from ..sharding import held_here, is_sharded, placed_as
from ._flat import PIECE, Flat, Look, Lying, lying_of, order, padded


@dataclass(slots=True)
class Bucket:
    """Parameters of one group, device, dtype, age and kinds of state, with their states in the same order."""

    group: dict[str, Any]
    params: list[Parameter]
    mastered: bool
    """Whether they are 16-bit, with float32 masters beside them."""
    states: dict[str, list[Tensor]] = field(default_factory=dict)
    step: Tensor | None = None
    """0-d float32 on the device, steps taken; one for all, which this bucket alone counts up."""
    contiguous: bool = False
    """Whether parameters and states are contiguous, so that a step need not look at their strides."""
    sharded: bool = False
    """Whether parameters and gradients are DTensors, of which the part is stepped that lies here, like `states`."""
    reduction: ShardReduction | None = None
    """What makes numbers of shards those of whole parameters, where a kind of optimizer has asked for it."""
    flat: Flat | None = None
    """Where parameters and states lie side by side, if they do; `states` are then one tensor each."""

    number: int = 0
    """Which of the optimizer's groups it is of."""
    pick: Callable[[list[Tensor]], Sequence[Tensor]] = list
    """Takes the gradients of its parameters out of those of their group."""

    def picked(self, gradients: list[Tensor]) -> list[Tensor]:
        """The gradients of its parameters, of those of the group's parameters that have any."""
        gradients = list(self.pick(gradients))
        if self.sharded:
            gradients = [held_here(placed_as(g, p)) for g, p in zip(gradients, self.params, strict=True)]
        return gradients

    def laid(self, gradients: list[Tensor], look: Look | None = None) -> list[Tensor]:
        """Gradients as a step takes them: one tensor if they are to lie side by side. `gradients`: as `picked`.

        `look`: gets them as they come, every entry once.
        """
        if self.flat is not None:
            return [self.flat.gathered(gradients, look)]
        if look is not None:
            look(gradients)
        return gradients

    def parts(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """What of tensors like the parameters lies here."""
        return list(map(held_here, tensors)) if self.sharded else list(tensors)

    def tensors(self) -> list[Tensor]:
        """What is stepped."""
        if self.sharded:
            return self.parts(self.params)
        return list(self.params) if self.flat is None else [self.flat.param]


class Plan:
    """The buckets of an optimizer for the parameters that had gradients when it was made."""

    def __init__(self, optimizer: Any, present: Sequence[list[Parameter]]) -> None:
        self._state = optimizer.state
        self._present = list(map(list, present))
        self.buckets: list[Bucket] = []
        for number, (group, params) in enumerate(zip(optimizer.param_groups, present, strict=True)):
            place = {param: i for i, param in enumerate(params)}
            alike: dict[tuple[Any, ...], list[Parameter]] = defaultdict(list)
            flat, movable = optimizer.lays_flat, optimizer.may_move
            for param in params:
                names, lent = optimizer.names_for(group, param), optimizer.may_swap(param)
                lying = lying_of(param, flat, movable=movable, lent=lent)
                alike[lying, param.device, param.dtype, names, is_sharded(param), lent].append(param)
            if sum(len(own) for (lying, *_), own in alike.items() if lying != "apart") == 1:
                alike = {("apart", *key[1:]): own for key, own in alike.items()}
            for (lying, *_), own in alike.items():
                for bucket in _buckets_of(optimizer, group, own, lying):
                    bucket.number, bucket.pick = number, _picker([place[param] for param in bucket.params])
                    self.buckets.append(bucket)
        every = [param for params in present for param in params]
        self.side_by_side = any(b.flat for b in self.buckets) and {param.device.type for param in every} == {"cpu"}
        """Whether some gradients are copied beside others, and none is on an accelerator."""
        self._first = [
            (b.params[0], b.params[0].dtype, {name: optimizer.state[b.params[0]][name] for name in b.states})
            for b in self.buckets
        ]

    def picked(self, gradients: Sequence[list[Tensor]]) -> list[tuple[Bucket, list[Tensor]]]:
        """The buckets, each with its gradients. `gradients`: of each group, those that are there."""
        return [(bucket, bucket.picked(gradients[bucket.number])) for bucket in self.buckets]

    def fits(self, optimizer: Any, present: Sequence[list[Parameter]]) -> bool:
        """Whether the plan still holds: the same parameters with gradients, the same states."""
        if self._state is not optimizer.state or len(self._present) != len(present):
            return False
        if not all(map(_same, self._present, present)):
            return False
        for bucket in self.buckets:
            if bucket.flat is not None and not bucket.flat.holds():
                return False
            if bucket.flat is None and bucket.contiguous and not all(map(Tensor.is_contiguous, bucket.params)):
                return False
        # One speaks for all: states are changed by loading or clearing them, dtypes as a session swaps masters in.
        for param, dtype, states in self._first:
            now = self._state.get(param, {})
            if param.dtype is not dtype or any(now.get(name) is not tensor for name, tensor in states.items()):
                return False
        return True


def _picker(places: list[int]) -> Callable[[list[Tensor]], Sequence[Tensor]]:
    """What takes the items at `places` out of a list."""
    begin, end = places[0], places[0] + len(places)
    return itemgetter(slice(begin, end)) if places == list(range(begin, end)) else itemgetter(*places)


def _same(those: Sequence[Parameter], these: Sequence[Parameter]) -> bool:
    return len(those) == len(these) and all(map(is_, those, these))


def _buckets_of(optimizer: Any, group: dict[str, Any], params: list[Parameter], lying: Lying) -> list[Bucket]:
    """Buckets of like parameters, split by how many steps they have seen; states are made where there are none."""
    state: dict[Parameter, dict[str, Any]] = optimizer.state
    mastered, names = optimizer.is_mastered(params[0]), optimizer.names_for(group, params[0])
    started = torch.zeros((), dtype=torch.float32, device=params[0].device)
    by_age: dict[tuple[int, bool], list[Parameter]] = defaultdict(list)
    for param in params:
        own = state[param] if names or optimizer.counts_steps else {}
        if optimizer.counts_steps:
            own.setdefault("step", started)
        for name in names:
            if own.get(name) is None:
                own[name] = optimizer.new_state(name, group, param, torch.float32 if mastered else param.dtype)
        by_age[(id(own.get("step")), param in optimizer.unstarted)].append(param)
    chunks = [chunk for alike in by_age.values() for chunk in _chunks(optimizer, group, alike, lying)]
    sharing = Counter(id(own.get("step")) for own in state.values())
    largest = max((padded(sum(p.numel() for p in chunk)) for chunk, beside in chunks if beside), default=0)
    scratch = held_here(params[0]).detach().new_zeros(0 if lying == "laid" else largest)
    buckets = []
    for alike, side_by_side in chunks:
        step = state[alike[0]]["step"] if optimizer.counts_steps else None
        if step is not None and sharing[id(step)] != len(alike):  # others that do not step now count for themselves
            step = step.clone()
            for param in alike:
                state[param]["step"] = step
        sharded = is_sharded(alike[0])
        states = {name: [held_here(state[param][name]) for param in alike] for name in names}
        plain: list[Any] = [] if sharded else [alike, *states.values()]
        dense = not sharded and all(all(map(Tensor.is_contiguous, tensors)) for tensors in plain)
        bucket = Bucket(group, alike, mastered, states, step, dense, sharded)
        if side_by_side:
            own_states = [state.get(param, {}) for param in alike]
            bucket.flat = Flat(alike, own_states, names, lying, scratch=scratch)
            bucket.states, bucket.contiguous = bucket.flat.states, True
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


def share_steps(optimizer: Any) -> None:
    """Give parameters of one group that have seen equally many steps one tensor to count them, as loaded states have
    one each. Waits for the device, once.
    """
    places: dict[tuple[int, torch.device, torch.dtype], list[Parameter]] = defaultdict(list)
    for number, group in enumerate(optimizer.param_groups):
        for param in group["params"]:
            if "step" in optimizer.state.get(param, {}):
                places[(number, param.device, param.dtype)].append(param)
    for (_, device, _), params in places.items():
        steps = [torch.as_tensor(optimizer.state[p]["step"], dtype=torch.float32, device=device) for p in params]
        shared: dict[float, Tensor] = {}
        for param, value in zip(params, torch.stack([s.reshape(()) for s in steps]).tolist(), strict=True):
            if value not in shared:
                shared[value] = torch.full((), value, dtype=torch.float32, device=device)
            optimizer.state[param]["step"] = shared[value]
