"""The rows of a plan: bytes of one rank, by kind, each with the arithmetic that gave them.

Mixed precision's weights, gradients, masters and moments: Micikevicius et al. 2018 (arXiv 1710.03740). What of them can
be sharded: Rajbhandari et al. 2020 (ZeRO, arXiv 1910.02054). Bytes of collectives are those of rings (Patarasuk and
Yuan 2009): of S bytes in all, every one of N ranks sends (N-1)/N S in an all-gather or a reduce-scatter, and twice that
in an all-reduce, which is one of each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch

from ..formats import LOW_DTYPES, name_of
from ..kernels import blocks_of
from ._asked import Asked
from ._sizes import Sizes, Weight

When = Literal["held", "passes", "step", "sent"]
"""All the time; during forward and backward only; while the optimizer steps only; over the network, in each step."""


@dataclass(frozen=True, slots=True)
class Row:
    """One kind of bytes on one rank."""

    when: When
    kind: str
    dtype: torch.dtype
    bytes: int
    formula: str
    """The arithmetic, with numbers."""

    def to_json(self) -> dict[str, Any]:
        """Every field; the dtype by its name."""
        return {**asdict(self), "dtype": name_of(self.dtype)}


def rows_of(sizes: Sizes, asked: Asked) -> Iterator[Row]:
    """All rows of a plan; kinds of which there is nothing are left out."""
    made = (*_held(sizes, asked), *_in_passes(sizes, asked), *_in_step(sizes, asked), *_sent(sizes, asked))
    yield from (row for row in made if row.bytes)


def _held(sizes: Sizes, asked: Asked) -> Iterator[Row]:
    weights, trained = sizes.weights, [w for w in sizes.weights if w.trained]
    masters = [w for w in (trained if asked.shard == "zero1" else weights) if _mastered(w, asked)]
    yield from _entries("parameters", asked, weights, lambda w: w.dtype)
    yield from _entries("gradients", asked, trained, lambda w: _gradient(w, asked))
    half = torch.int16 if asked.master == "split" else torch.float32
    yield from _entries("masters", asked, masters, lambda w: half, optimizers=True)
    coded = [w for w in trained if _is_coded(w, asked)]
    plain = [w for w in trained if not _is_coded(w, asked)]
    yield from _entries("states", asked, plain, lambda w: _moment(w, asked), times=asked.kind.moments, optimizers=True)
    for codes in (torch.int8, torch.uint8) if coded else ():
        yield from _entries("states", asked, coded, lambda w, codes=codes: codes, optimizers=True)  # type: ignore[misc]
    if coded:
        blocks = sum(blocks_of(w.entries) for w in coded)
        share, over = _over(asked, optimizers=True)
        own = sum(blocks_of(w.shard(share)) for w in coded) if asked.sharded else -(-blocks // share)
        yield Row("held", "states", torch.float32, 2 * own * 4, f"2 x {blocks:,} scales of 256 x 4{over}")
    shadows = [w for w in weights if w.shadowed]
    yield from _entries("shadows", asked, shadows, lambda w: asked.policy.compute)
    if asked.replicated and not asked.bucket_view:
        yield from _entries("gradient buckets", asked, trained, lambda w: _gradient(w, asked))
    if sizes.buffers:
        yield Row("held", "buffers", torch.float32, sizes.buffers, "the model's; cast ones in float32 too")


def _in_passes(sizes: Sizes, asked: Asked) -> Iterator[Row]:
    compute = asked.policy.compute
    if not asked.sharded:
        cast = [w for w in sizes.weights if w.cast and not w.shadowed]
        yield from _entries("cast weights", asked, cast, lambda w: compute, when="passes")
        return
    unit = unit_of(sizes, asked.units)
    size, trained = compute.itemsize, any(w.trained for w in sizes.weights)
    gathered, formula = sizes.count, f"{sizes.count:,} x {size}"
    if asked.reshard and 2 * unit <= sizes.count:
        gathered, formula = 2 * unit, f"2 units x {unit:,} x {size}"
    yield Row("passes", "gathered weights", compute, gathered * size, formula)
    for kind, dtype in (("unsharded gradients", compute), ("reduce-scatter input", asked.reduce)) if trained else ():
        yield Row("passes", kind, dtype, unit * dtype.itemsize, f"{unit:,} x {dtype.itemsize}")


def _in_step(sizes: Sizes, asked: Asked) -> Iterator[Row]:
    if not asked.kind.fused:
        wide = [w for w in sizes.weights if w.trained and _mastered(w, asked)]
        yield from _entries("float32 gradients", asked, wide, lambda w: torch.float32, when="step")


def _sent(sizes: Sizes, asked: Asked) -> Iterator[Row]:
    trained = [w for w in sizes.weights if w.trained]
    if asked.sharded:
        for when in ("forward", "backward") if asked.reshard else ("forward",):
            yield _shards(f"all-gather, {when}", sizes.weights, asked, asked.policy.compute)
        yield _shards("reduce-scatter of gradients", trained, asked, asked.reduce)
    elif asked.replicated:
        yield from _ring("all-reduce of gradients", trained, asked, lambda w: _gradient(w, asked), 2)
        if asked.shard == "zero1":
            yield from _ring("broadcast of parameters", trained, asked, lambda w: w.dtype, 1)


def unit_of(sizes: Sizes, units: int) -> int:
    """Parameters of the largest unit: of so many equal ones, but at least the largest tensor of a model."""
    largest = max((w.entries for w in sizes.weights), default=0) if sizes.from_model else 0
    return max(-(-sizes.count // units), largest)


def _mastered(weight: Weight, asked: Asked) -> bool:
    return asked.policy.masters and weight.dtype in LOW_DTYPES


def _gradient(weight: Weight, asked: Asked) -> torch.dtype:
    return asked.policy.compute if weight.shadowed else weight.dtype


def _is_coded(weight: Weight, asked: Asked) -> bool:
    return asked.states == "8bit" and not weight.small


def _moment(weight: Weight, asked: Asked) -> torch.dtype:
    stochastic = asked.rounding == "stochastic" and weight.dtype is torch.bfloat16
    return torch.float32 if stochastic or _mastered(weight, asked) else weight.dtype


def _over(asked: Asked, *, optimizers: bool) -> tuple[int, str]:
    """The number of ranks that share something, and the text for it; `optimizers`: whether it is optimizer state."""
    if asked.sharded or (optimizers and asked.shard == "zero1"):
        return asked.world, f" / {asked.world}" if asked.world > 1 else ""
    return 1, ""


def _entries(
    kind: str, asked: Asked, weights: Iterable[Weight], dtype_of: Callable[[Weight], torch.dtype], *,
    when: When = "held", times: int = 1, optimizers: bool = False,
) -> Iterator[Row]:  # fmt: skip
    """A row for each dtype that weights have in some respect: entries, so many times, over the ranks that share them.

    FSDP2 shards each tensor by rows, and the first rank has the most. ZeroRedundancyOptimizer gives whole tensors to
    ranks, as evenly as it can.
    """
    share, over = _over(asked, optimizers=optimizers)
    for dtype, alike in _by_dtype(weights, dtype_of).items():
        own = sum(w.shard(share) if asked.sharded else w.entries for w in alike) * times * dtype.itemsize
        count = sum(w.entries for w in alike)
        formula = f"{f'{times} x ' if times > 1 else ''}{count:,} x {dtype.itemsize}{over}"
        yield Row(when, kind, dtype, own if asked.sharded else -(-own // share), formula)


def _ring(
    kind: str, weights: Iterable[Weight], asked: Asked, dtype_of: Callable[[Weight], torch.dtype], passes: int
) -> Iterator[Row]:
    world = asked.world
    for dtype, alike in _by_dtype(weights, dtype_of).items():
        count = sum(w.entries for w in alike)
        formula = f"{f'{passes} x ' if passes > 1 else ''}{world - 1}/{world} x {count:,} x {dtype.itemsize}"
        yield Row("sent", kind, dtype, -(-passes * (world - 1) * count * dtype.itemsize // world), formula)


def _shards(kind: str, weights: Iterable[Weight], asked: Asked, dtype: torch.dtype) -> Row:
    """A collective of FSDP2's: as many shards as there are other ranks."""
    shard, others = sum(w.shard(asked.world) for w in weights), asked.world - 1
    return Row("sent", kind, dtype, others * shard * dtype.itemsize, f"{others} x {shard:,} x {dtype.itemsize}")


def _by_dtype(weights: Iterable[Weight], dtype_of: Callable[[Weight], torch.dtype]) -> dict[torch.dtype, list[Weight]]:
    groups: dict[torch.dtype, list[Weight]] = {}
    for weight in weights:
        groups.setdefault(dtype_of(weight), []).append(weight)
    return groups
