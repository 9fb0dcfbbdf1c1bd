"""`plan`: a run's memory and communication, and the value that holds them."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import nn

from ..errors import PreampError
from ..formats import LOW_DTYPES, name_of
from ..policy import Policy, parse_policy
from ..report import Cell, Column, Table
from ._asked import Asked, ask
from ._rows import Row, rows_of, unit_of
from ._sizes import Sizes, count_of, of_model, of_number

SCHEMA = "preamp-plan/1"

_GIB = 2**30

UNPLANNED = (
    "Not planned: activations, which depend on the batch; temporaries inside operators; 0-d states such as step "
    "counters; what the allocator and the device's runtime keep for themselves."
)


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """Bytes of one rank: rows and their sums."""

    title: str
    count: int
    """Parameters of the whole model."""
    asked: dict[str, Any]
    """The arguments, as plain values."""
    rows: tuple[Row, ...]
    notes: tuple[str, ...]
    """Assumptions, and what is left out."""

    @property
    def total(self) -> int:
        """Bytes that are held from step to step, gradients included."""
        return self._sum("held")

    @property
    def peak(self) -> int:
        """`total`, and the larger of what comes on top during forward and backward and during the optimizer's step."""
        return self.total + max(self._sum("passes"), self._sum("step"))

    @property
    def sent(self) -> int:
        """Bytes that a rank sends in a step."""
        return self._sum("sent")

    def bytes_of(self, kind: str) -> int:
        """Bytes of all rows of one kind ("states"); 0 where there are none."""
        return sum(row.bytes for row in self.rows if row.kind == kind)

    def to_table(self) -> Table:
        """The rows, with totals, for people."""
        size, each = Column("size", "GiB", 3), Column("bytes a parameter", "", 4)
        cells: list[tuple[Cell, ...]] = []
        for when, name, number in (
            ("held", "total held", self.total), ("passes", "", 0), ("step", "peak", self.peak),
            ("sent", "total sent in a step" if self.sent else "", self.sent),
        ):  # fmt: skip
            for row in self.rows:
                if row.when == when:
                    cells.append((when, row.kind, name_of(row.dtype), *self._shown(row.bytes), row.formula))
            if name:
                cells.append(("", name, "", *self._shown(number), ""))
        columns = ("when", "kind", "dtype", "bytes", size, each, "from")
        return Table(self.title, columns, cells, notes=self.notes)

    def to_json(self) -> dict[str, Any]:
        """Everything, in types that strict JSON takes."""
        return {
            "schema": SCHEMA, "title": self.title, "parameters": self.count, "asked": self.asked,
            "rows": [row.to_json() for row in self.rows],
            "total": self.total, "peak": self.peak, "sent": self.sent, "notes": list(self.notes),
        }  # fmt: skip

    def _sum(self, when: str) -> int:
        return sum(row.bytes for row in self.rows if row.when == when)

    def _shown(self, number: int) -> tuple[Cell, ...]:
        return number, number / _GIB, number / self.count


def plan(
    params: float | str | nn.Module,
    *,
    level: str | Policy = "O4",
    world: int = 1,
    shard: str = "none",
    optimizer: str | None = None,
    states: str = "float32",
    master: str | None = None,
    rounding: str = "nearest",
    shadow: bool = False,
    reshard: bool = True,
    bucket_view: bool = False,
    reduce: str | torch.dtype = "fp32",
    units: int = 32,
    norm_share: float = 0.0,
) -> MemoryPlan:
    """What one rank of a training run holds and sends, in bytes, by kind.

    `params`: how many parameters (7e9, "7B", "350M"), or a float32 model, of which only shapes are used, so that
    it may be on the meta device. `level`: a level or any policy. `world`: ranks. `shard`: "none"; "ddp"
    (DistributedDataParallel); "fsdp2" (`fully_shard` with `policy.fsdp()`: sharded parameters stay float32, and are
    their own masters); "zero1" (DDP and ZeroRedundancyOptimizer). `optimizer`: one of preamp.optim ("adamw",
    "sgd-momentum"), or of torch ("torch.adamw"). `states`, `master` ("float32", "split", "none"), `rounding`, `shadow`:
    as in preamp.optim and `prepare`. `reshard`: `reshard_after_forward` of FSDP2. `bucket_view`: DDP's
    `gradient_as_bucket_view`. `reduce`: `reduce_dtype` of FSDP2's MixedPrecisionPolicy. `units`: into how many equal
    ones FSDP2 gathers the model; the largest tensor of a model is a unit at least. `norm_share`: of a number of
    parameters, the share in norm layers.

    Raises the `PreampError` that preamp has for a combination that it refuses: `PolicyError`, `OptimizerError`,
    `SessionError`.

    >>> plan("7B", level="O2").total / 7e9
    16.0
    """
    policy = parse_policy(level)
    asked = ask(
        policy, world=world, shard=shard, optimizer=optimizer, states=states, master=master, rounding=rounding,
        shadow=shadow, reshard=reshard, bucket_view=bucket_view, reduce=reduce, units=units,
    )  # fmt: skip
    if isinstance(params, nn.Module):
        if norm_share:
            raise PreampError(f"norm_share={norm_share!r} beside a model, whose norm layers are counted: leave it out")
        sizes = of_model(params, policy, shadow=shadow, sharded=asked.sharded)
    else:
        count = count_of(params)
        sizes = of_number(count, policy, norm_share=norm_share, shadow=shadow, sharded=asked.sharded)
    if not sizes.count:
        raise PreampError("the model has no parameters: there is nothing to plan")
    rank = "1 rank" if shard == "none" else f"one of {world} ranks, {shard}"
    kept = f"{asked.optimizer}, {asked.states} states" + (f", master {asked.master}" if asked.master else "")
    return MemoryPlan(
        title=f"{sizes.count:,} parameters at {policy.level or policy}, {rank}; {kept}",
        count=sizes.count,
        asked=_plain(asked, norm_share),
        rows=tuple(rows_of(sizes, asked)),
        notes=tuple(_notes(sizes, asked, norm_share)),
    )


def _plain(asked: Asked, norm_share: float) -> dict[str, Any]:
    """The arguments in types that JSON takes."""
    plain: dict[str, Any] = {"policy": None, "level": asked.policy.level}
    plain |= {each.name.replace("_", " "): getattr(asked, each.name) for each in fields(asked)}
    return {**plain, "policy": str(asked.policy), "reduce": name_of(asked.reduce), "norm share": norm_share}


def _notes(sizes: Sizes, asked: Asked, norm_share: float) -> list[str]:
    notes = [
        "held: from step to step, gradients included; passes: on top during forward and backward; step: on top while "
        "the optimizer steps; sent: by this rank in a step."
    ]
    if asked.sharded:
        gathered, reduced = name_of(asked.policy.compute), name_of(asked.reduce)
        notes.append(
            f"fsdp2: fully_shard with MixedPrecisionPolicy(param_dtype={gathered}, reduce_dtype={reduced}); a unit is "
            f"{unit_of(sizes, asked.units):,} parameters (of {asked.units} equal ones, or the largest tensor), and one "
            "is gathered while another computes."
        )
    elif asked.shard == "zero1":
        notes.append(
            "zero1: ZeroRedundancyOptimizer gives whole tensors to ranks; shares are equal up to the size of a tensor."
            + (" The optimizer keeps the masters itself, without a session." if asked.policy.masters else "")
        )
    if not sizes.from_model:
        low = asked.policy.params in LOW_DTYPES and asked.policy.norms is torch.float32 and not asked.sharded
        if low or asked.states == "8bit":
            notes.append(
                f"Norm layers, float32 with float32 states, are taken to be {norm_share:.2%} of the parameters."
            )
        if asked.states == "8bit":
            notes.append(
                "Other parameters have rows of whole blocks of 256; tensors that have not keep float32 states."
                if asked.sharded
                else "Other parameters are one tensor: a tensor that is no multiple of 256 has one more scale."
            )
    notes.append(UNPLANNED)
    return notes
