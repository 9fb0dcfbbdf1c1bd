"""The rank of a process, DTensors and their local shards, and the dtype in which FSDP2 gathers them.

Nothing here imports `torch.distributed.tensor`, which takes long: code with a DTensor has imported it already.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import compress
from typing import Any

import torch
from torch import Tensor, nn


def ranks() -> int:
    """The world size; 1 outside of a process group."""
    together = torch.distributed.is_available() and torch.distributed.is_initialized()
    return torch.distributed.get_world_size() if together else 1


def rank() -> int:
    """The rank of this process; 0 outside of a process group."""
    return torch.distributed.get_rank() if ranks() > 1 else 0


def is_sharded(tensor: Tensor) -> bool:
    """Whether a tensor is a DTensor, sharded or replicated."""
    return type(tensor).__name__ == "DTensor"


def any_sharded(tensors: Iterable[Tensor]) -> bool:
    """Whether there is a DTensor among them; each type is checked once."""
    return "DTensor" in [kind.__name__ for kind in set(map(type, tensors))]


def held_here(tensor: Tensor) -> Tensor:
    """The local shard of a DTensor, sharing its memory; any other tensor itself."""
    part: Any = tensor
    local: Tensor = part.detach().to_local() if is_sharded(tensor) else tensor
    return local


def placed_like(tensor: Any, local: Tensor, shape: tuple[int, ...]) -> Tensor:
    """A DTensor of this shape with the local shard `local`, placed like another; for any other tensor, `local`.

    Strided like that one if it has its shape, else contiguous.
    """
    if not is_sharded(tensor):
        return local
    strides = tensor.stride() if tensor.shape == shape else torch.empty(shape, device="meta").stride()
    placed: Tensor = type(tensor).from_local(
        local, tensor.device_mesh, tensor.placements, run_check=False, shape=torch.Size(shape), stride=strides
    )
    return placed


def full_tensor(tensor: Tensor) -> Tensor:
    """A DTensor gathered, by all ranks of its mesh together; any other tensor itself."""
    parts: Any = tensor
    gathered: Tensor = parts.full_tensor() if is_sharded(tensor) else tensor
    return gathered


@dataclass(frozen=True, slots=True)
class Parted:
    """A DTensor's shard and the whole: gathering one, cutting the other."""

    like: Any

    @property
    def shape(self) -> torch.Size:
        """Of the whole tensor."""
        found: torch.Size = self.like.shape
        return found

    def gather(self, part: Tensor) -> Tensor:
        """The whole tensor that has `part` where the DTensor has this process's shard; all ranks call it."""
        return full_tensor(placed_like(self.like, part.contiguous(), tuple(self.shape)))

    def part(self, whole: Tensor) -> Tensor:
        """The shard for this process of `whole`, which all ranks have: a copy, without communication."""
        from torch.distributed.tensor import DTensor, Replicate

        mesh = self.like.device_mesh
        copied = DTensor.from_local(whole, mesh, [Replicate()] * mesh.ndim, run_check=False)
        return held_here(copied.redistribute(mesh, self.like.placements))


def mesh_groups(tensor: Any) -> tuple[Any, ...]:
    """The process groups of a DTensor's mesh, one for each of its dimensions; none for any other tensor."""
    if not is_sharded(tensor):
        return ()
    return tuple(tensor.device_mesh.get_group(dim) for dim in range(tensor.device_mesh.ndim))


def shard_groups(tensor: Any) -> tuple[Any, ...]:
    """Those of the `mesh_groups` whose members hold different shards of it, not copies."""
    placements = tensor.placements if is_sharded(tensor) else ()
    # not `is_shard()`: what FSDP2 makes of a tensor-parallel dimension (`_StridedShard`) is a shard that denies it
    cut = [not (placed.is_replicate() or placed.is_partial()) for placed in placements]
    return tuple(compress(mesh_groups(tensor), cut))


def placed_as(gradient: Any, parameter: Any) -> Tensor:
    """A gradient placed as its parameter is: reduced if it is still a sum over ranks (`Partial`), and sharded if it is
    whole (that of a vocabulary's rows, say); any other itself.
    """
    if is_sharded(gradient) and gradient.placements != parameter.placements:
        gradient = gradient.redistribute(gradient.device_mesh, parameter.placements)
    found: Tensor = gradient
    return found


def agreed(numbers: Tensor, group: Any, *, largest: bool) -> Tensor:
    """A group's numbers added up, or the largest of them, in place; all ranks of the group call it."""
    operations = torch.distributed.ReduceOp
    torch.distributed.all_reduce(numbers, operations.MAX if largest else operations.SUM, group=group)
    return numbers


def agreed_flag(flag: Tensor, tensors: Iterable[Tensor]) -> Tensor:
    """A 0-d flag, above 0 on all ranks with shards of the tensors if it is on one; no host sync."""
    groups = dict.fromkeys(group for tensor in tensors for group in mesh_groups(tensor))
    for group in groups:
        agreed(flag, group, largest=True)
    return flag


def gathered_as(root: nn.Module) -> dict[nn.Parameter, torch.dtype | None]:
    """For each parameter that FSDP2 shards, the dtype in which its forward pass gets it; None: its own."""
    found: dict[nn.Parameter, torch.dtype | None] = {}
    innermost: dict[str, Any] = {}
    for path, module in root.named_modules():
        state: Any = module._get_fsdp_state() if hasattr(module, "_get_fsdp_state") else None
        inherited = innermost.get(path.rpartition(".")[0]) if path else None
        innermost[path] = inherited if state is None else state._mp_policy
        for parameter in module._parameters.values():
            if parameter is not None and is_sharded(parameter) and innermost[path] is not None:
                found[parameter] = innermost[path].param_dtype
    return found


def sharded_parts(root: nn.Module) -> list[Any]:
    """The parts of a model that were given to `fully_shard` (`FSDPModule`s)."""
    return [module for module in root.modules() if hasattr(module, "_get_fsdp_state")]


def reshard(models: Iterable[nn.Module]) -> None:
    """Make modules hold their shards again. A forward pass without backward, an evaluation say, leaves the outermost
    part of an FSDP2 model gathered: plain tensors in the dtype of its `mp_policy`, which the optimizer does not have.

    All processes together, or the next forward pass gathers on some of them only.
    """
    for model in models:
        for part in sharded_parts(model):
            part.reshard()


def flat_group(models: Iterable[nn.Module]) -> Any:
    """The process group of the first model's `FullyShardedDataParallel` (FSDP1), whose shards are plain tensors."""
    for model in models:
        for module in model.modules():
            if type(module).__name__ == "FullyShardedDataParallel":
                return module.process_group
    return None
