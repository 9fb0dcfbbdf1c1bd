"""`plan`: the memory of a run, counted on tensors without memory, and what its ranks send each other."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import Parameter
from torch.optim import LBFGS, Optimizer

from ..errors import PreampError
from ..frameworks import unwrapped
from ..kernels import blocks_in_a_row
from ..ledger import NoMasters
from ..modules import CastingModule, Conversion, check_free
from ..optim import AdamW, FusedOptimizer
from ..policy import Policy, parse_policy
from ..report import Table
from ..session import Memory, masters_for, memory_of
from ._shapes import count_of, model_of, shapes_of

SHARDS = ("none", "ddp", "fsdp2")

UNPLANNED = (
    "Not counted: activations, which depend on the batch; what a region or FSDP2 holds during a pass (16-bit copies of "
    "weights, gathered units); temporaries inside operators; what the allocator and the device's runtime keep."
)


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """What one rank holds and sends, in bytes."""

    title: str
    held: Memory
    """What is held from step to step, gradients included."""
    peak: int
    """What is held while the optimizer steps: those of torch get float32 gradients for the masters."""
    sent: int
    """What this rank sends in a step."""

    def to_table(self) -> Table:
        """The rows, with totals, for people."""
        table = self.held.to_table(self.title)
        rows = []
        if self.peak > self.held.total:
            rows.append(self.held.cells("in the optimizer's step", "", self.peak))
        if self.sent:
            rows.append((*self.held.cells("sent in a step", "", self.sent)[:-1], None))
        line = f"A rank holds {max(self.peak, self.held.total) / 2**30:,.2f} GiB at most, without activations"
        line += f", and sends {self.sent / 2**30:,.2f} GiB in a step." if self.sent else "."
        return Table(table.title, table.columns, [*table.rows, *rows], notes=(line, UNPLANNED))

    def to_json(self) -> dict[str, Any]:
        """Everything, in types that strict JSON takes."""
        return {"title": self.title, **self.held.to_json(), "peak": self.peak, "sent": self.sent}


def plan(
    params: float | str | nn.Module,
    optimizer: Callable[[Iterable[Parameter]], Optimizer] = AdamW,
    *,
    level: str | Policy = "O4",
    shard: str = "none",
    world: int = 1,
) -> MemoryPlan:
    """What one rank of a training run holds and sends, in bytes, by kind.

    The run is made on the meta device: the model's parameters are brought under the policy, get gradients, and the
    optimizer steps them. So every row is a tensor that preamp, torch or the optimizer allocates, without its memory.
    `session.memory()` counts the same rows on the tensors of a run.

    Args:
        params: How many parameters (7e9, "7B", "350M"), or a float32 model, of which only shapes are used.
        optimizer: A class, or a function of parameters: `lambda p: preamp.optim.AdamW(p, master="split")`.
        level: A level or any policy.
        shard: "none"; "ddp" (DistributedDataParallel, every rank holds everything); "fsdp2" (`fully_shard` with
            `policy.fsdp()`, and the rank with most).
        world: How many ranks there are.

    Raises:
        PreampError: For arguments that mean nothing; a `PolicyError` or `OptimizerError` as the run itself would.

    >>> round(plan("7B", level="O2").held.total / 7e9, 2)
    16.0
    """
    policy = parse_policy(level)
    if shard not in SHARDS:
        raise PreampError(f"shard={shard!r}: write {', '.join(map(repr, SHARDS))}")
    if isinstance(world, bool) or not isinstance(world, int) or world < 1 or (world > 1) != (shard != "none"):
        raise PreampError(
            f"world={world!r} with shard={shard!r}: write how many ranks there are, one with shard='none', and more "
            "with the others, since ranks that exchange nothing train apart"
        )
    whole = unwrapped(params) if isinstance(params, nn.Module) else model_of(count_of(params))
    if any(isinstance(module, CastingModule) for module in whole.modules()):
        check_free(whole)
    sharded = shard == "fsdp2"
    model = shapes_of(whole)
    parameters, count = list(model.parameters()), sum(map(torch.Tensor.numel, model.parameters()))
    if not count:
        raise PreampError("the model has no parameters: there is nothing to plan")
    optimizers = _made(optimizer, parameters, sharded=sharded)
    masters = NoMasters() if sharded else masters_for(policy, optimizers)
    conversions = [] if sharded else [Conversion(model, policy, masters, stepped=set(parameters))]
    ranks = "" if world == 1 else f", one of {world} ranks, {shard}"
    title = f"{count:,} parameters at {policy.level or policy}, {type(optimizers[0]).__name__}{ranks}"
    peak = _step(model, optimizers, masters, conversions)
    if sharded:
        _cut(parameters, optimizers, world)
    held = memory_of([model], optimizers, masters, conversions, replicated=shard == "ddp")
    buckets = held.bytes_of("gradient buckets")
    return MemoryPlan(title, held, held.total if sharded else peak + buckets, _sent(parameters, policy, shard, world))


def _made(
    make: Callable[[Iterable[Parameter]], Optimizer], parameters: list[Parameter], *, sharded: bool
) -> list[Optimizer]:
    """The optimizer; two for shards in 8 bits, since those that would be cut within a block of 256 stay float32."""
    optimizer = make(parameters) if callable(make) else make
    if not callable(make) or isinstance(optimizer, LBFGS):
        raise PreampError(
            f"optimizer={type(optimizer).__name__}: give a class, or a function of parameters, whose optimizer steps "
            "without a closure, as a session's do: preamp.optim.AdamW, or lambda p: torch.optim.SGD(p, 0.1)"
        )
    if not sharded or getattr(optimizer, "states", "") != "8bit":
        return [optimizer]
    whole = [p for p in parameters if p.dim() and p.numel() and blocks_in_a_row(p)]
    parts = [part for part in (whole, [p for p in parameters if p not in set(whole)]) if part]
    made: list[Any] = [make(part) for part in parts]
    for each, part in zip(made, parts, strict=True):
        each.states = "8bit" if part is whole else "float32"
    return made


def _step(model: nn.Module, optimizers: list[Optimizer], masters: Any, conversions: list[Conversion]) -> int:
    """Step on the meta device, as a session would; returns the bytes held meanwhile."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for parameter in trained:
        parameter.grad = torch.empty_like(parameter)
    peak = 0
    for optimizer in optimizers:
        wide: dict[Parameter, torch.Tensor] = {}
        if isinstance(optimizer, FusedOptimizer):
            optimizer.lend(masters)
        else:
            own = {p for group in optimizer.param_groups for p in group["params"]}
            wide = {p: p.grad.float() for p in masters.among(trained) if p in own and p.grad is not None}
        masters.swap_in(wide, wide)
        try:
            optimizer.step()
        except RuntimeError as error:
            raise PreampError(
                f"{type(optimizer).__name__} cannot step tensors without memory ({str(error).splitlines()[0]}), and a "
                "plan counts what a step allocates: prepare() a small model with it, and look at session.memory()"
            ) from error
        peak = max(peak, memory_of([model], optimizers, masters, conversions).total)
        masters.swap_out()
    return peak


def _cut(parameters: list[Parameter], optimizers: list[Optimizer], world: int) -> None:
    """Leave the shards of the first rank: FSDP2 cuts each tensor along its first dimension, rounded up."""
    states = {param: state for optimizer in optimizers for param, state in optimizer.state.items()}
    for param in parameters:
        rows = param.shape[0] if param.dim() else 0
        if not rows:
            continue
        own, state = -(-rows // world), states.get(param, {})
        grad, param.grad = param.grad, None
        param.data = param.data[:own]
        if grad is not None:
            param.grad = grad[:own]
        for name, value in state.items():
            # a state of its shape, or the scales of its rows
            if isinstance(value, torch.Tensor) and value.dim() and not value.shape[0] % rows:
                state[name] = value[: value.shape[0] // rows * own]


def _sent(parameters: list[Parameter], policy: Policy, shard: str, world: int) -> int:
    """Bytes that a rank sends in a step, by rings (Patarasuk and Yuan 2009).

    Of S bytes in all, each of N ranks sends (N-1)/N S in an all-gather or a reduce-scatter, and twice that in an
    all-reduce. DistributedDataParallel reduces gradients in their dtype; FSDP2 gathers weights for forward and for
    backward, and reduces gradients (Zhao et al. 2023).
    """
    if shard == "ddp":
        size = sum(p.numel() * p.element_size() for p in parameters if p.requires_grad)
        return -(-2 * (world - 1) * size // world)
    if shard == "fsdp2":
        mixed = policy.fsdp()
        gathered, reduced = mixed.param_dtype or torch.float32, mixed.reduce_dtype or torch.float32
        own = sum(p.numel() * (2 * gathered.itemsize + p.requires_grad * reduced.itemsize) for p in parameters)
        return (world - 1) * own
    return 0
