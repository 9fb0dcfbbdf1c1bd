"""What all ranks have to agree on: whether gradients are finite, and their common norm.

A rank that skips a step while another takes it diverges from it for good, and clipping by the norm of a shard is wrong.
Under DistributedDataParallel gradients are equal on all ranks, and nothing has to be exchanged. With sharded parameters
(FSDP2, tensor parallelism: DTensors) each rank reads its shard, and readings are added up over the parameter's mesh.
Pipeline stages, and other plain tensors that differ between ranks, use the group of `prepare(group=...)`. There is one
collective a step and group, of a few numbers, without a host sync.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .errors import SessionError
from .formats import LOW_DTYPES, name_of
from .kernels import Reading, global_norm, read
from .sharding import agreed, held_here, mesh_groups, shard_groups

Gradients = Sequence[Tensor | None]


class Agreement:
    """Agreement of the ranks that hold parts of these parameters.

    All of them have to call the same methods in the same order, also a rank without gradients.

    Args:
        parameters: DTensors, plain tensors, or both.
        group: The ranks whose plain parameters differ; None where they are the same on all.
    """

    def __init__(self, parameters: Sequence[Tensor], group: Any = None) -> None:
        self._group = group
        self._classes: dict[tuple[Any, ...], list[int]] = {}
        """Indices of parameters, by the groups of their mesh over which their squares add up."""
        for index, parameter in enumerate(parameters):
            self._classes.setdefault(shard_groups(parameter), []).append(index)
        self._meshes = list(dict.fromkeys(group for parameter in parameters for group in mesh_groups(parameter)))
        self._count = len(parameters)
        self._device = held_here(parameters[0]).device if parameters else torch.device("cpu")
        self._sent: dict[tuple[Any, ...], Tensor] = {}

    @property
    def needed(self) -> bool:
        """Whether anything has to be exchanged at all."""
        return bool(self._meshes) or self._group is not None

    @torch.no_grad()
    def read(self, gradients: Gradients) -> Reading:
        """Whether gradients are finite, and their L2 norm, over all ranks.

        `nonfinite` is of the gradients that exist; with a `group` it covers only this rank and its mesh.

        Args:
            gradients: One, or None, for each parameter.
        """
        own = [
            read([held_here(g) for i in indices if (g := gradients[i]) is not None], device=self._device)
            for indices in self._classes.values()
        ]
        found = self._together([reading.found for reading in own]).amax()
        squares = self._together([reading.norm for reading in own]).square()
        flags = torch.zeros(self._count, dtype=torch.float64, device=self._device)
        for indices, reading in zip(self._classes.values(), own, strict=True):
            there = [i for i in indices if gradients[i] is not None]
            if there:
                flags[self._placed(there)] = reading.nonfinite.to(self._device).double()
        for mesh in self._meshes:
            packed = agreed(torch.cat([found.reshape(1), flags, squares]), mesh, largest=False)
            found, flags = packed[0].clamp(max=1), packed[1 : 1 + self._count].clamp(max=1)
            over_it = self._placed([mesh in groups for groups in self._classes])
            squares = torch.where(over_it, packed[1 + self._count :], squares)
        square = squares.sum()
        if self._group is not None:
            found, square = agreed(torch.stack([found, square]), self._group, largest=False).unbind()
            found = found.clamp(max=1)
        present = [index for index, gradient in enumerate(gradients) if gradient is not None]
        return Reading(found.float(), square.sqrt().float(), flags.bool()[self._placed(present)])

    def _together(self, parts: Sequence[Tensor]) -> Tensor:
        return torch.stack([part.to(self._device).double() for part in parts])

    @torch.no_grad()
    def norm(self, gradients: Gradients, order: float = 2.0) -> Tensor:
        """The norm of the gradients over all ranks: 0-d float32. `order`: of the norm, as in `torch.linalg.norm`."""
        largest = math.isinf(order)
        parts: list[Tensor] = []
        for meshes, indices in self._classes.items():
            held = [held_here(g) for i in indices if (g := gradients[i]) is not None]
            part = global_norm(held, order, device=self._device).double()
            part = part if largest else part**order
            for mesh in meshes:
                agreed(part, mesh, largest=largest)
            parts.append(part)
        total = torch.stack(parts).amax() if largest else torch.stack(parts).sum()
        if self._group is not None:
            agreed(total, self._group, largest=largest)
        return (total if largest else total ** (1 / order)).float()

    def _placed(self, values: Sequence[int]) -> Tensor:
        """A list on the device, copied once: copying it at each step would be a host sync at each step."""
        key = (type(values[0]) if values else int, *values)
        if key not in self._sent:
            dtype = torch.bool if key[0] is bool else torch.int64
            self._sent[key] = torch.tensor(values, dtype=dtype, device=self._device)
        return self._sent[key]


class ShardReduction:
    """Combines numbers of each rank's shards of these tensors into those of the whole tensors."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        spread = [shard_groups(tensor) for tensor in tensors]
        self._over = {group: [group in groups for groups in spread] for group in dict.fromkeys(sum(spread, ()))}
        self._masks: dict[Any, Tensor] = {}

    @torch.no_grad()
    def __call__(self, numbers: Tensor, largest: bool) -> Tensor:
        """(tensors, n): sums over the ranks, or the largest. All ranks call it in the same order."""
        for group, over_it in self._over.items():
            if group not in self._masks:  # copied once: copying it at each step would be a host sync
                self._masks[group] = torch.tensor(over_it, device=numbers.device).unsqueeze(1)
            numbers = torch.where(self._masks[group], agreed(numbers.clone(), group, largest=largest), numbers)
        return numbers


def compress_hook(dtype: torch.dtype = torch.bfloat16) -> Any:
    """For `ddp.register_comm_hook(group, hook)`: gradients are sent in 16 bits, and summed in float32.

    Every rank sends every other its piece of the gradients in `dtype`, sums in float32 what it receives, divides by
    the number of ranks, and sends the mean to all in `dtype`: two roundings, however many ranks there are, and
    half the bytes of float32. torch's own 16-bit hooks leave the sums in 16 bits. Equal on all ranks, bit for bit.

    Args:
        dtype: bfloat16, or float16, which overflows beyond 65504: the step is then skipped.

    Returns:
        The hook; as its state give the process group, or None for the default one.

    >>> ddp.register_comm_hook(None, preamp.parallel.compress_hook())
    """
    if dtype not in LOW_DTYPES:
        raise SessionError(f"compress_hook({name_of(dtype)}): gradients travel in fp16 or bf16, or without a hook")

    streams: dict[torch.device, Any] = {}
    gather: Any = getattr(torch.distributed, "all_gather_single", None)  # torch 2.13, which warns of the name before
    gather = gather or torch.distributed.all_gather_into_tensor

    def exchange(gradients: Tensor, group: Any) -> None:
        ranks = group.size()
        size = -(-gradients.numel() // ranks)
        sent = gradients.new_zeros(ranks * size, dtype=dtype)
        sent[: gradients.numel()].copy_(gradients)
        got = torch.empty_like(sent)
        torch.distributed.all_to_all_single(got, sent, group=group)
        mean = got.view(ranks, size).sum(0, dtype=torch.float32).div_(ranks).to(dtype)
        gather(sent, mean, group=group)
        gradients.copy_(sent[: gradients.numel()])

    def hook(group: Any, bucket: Any) -> Any:
        gradients: Tensor = bucket.buffer()
        group = torch.distributed.group.WORLD if group is None else group
        device = gradients.device
        if device.type != "cuda":
            done: Any = torch.futures.Future()
            exchange(gradients, group)
            done.set_result(gradients)
            return done
        stream = streams.setdefault(device, torch.cuda.Stream(device))  # for the backward pass to go on beside it
        stream.wait_stream(torch.cuda.current_stream(device))
        done = torch.futures.Future(devices=[device])
        with torch.cuda.stream(stream):
            exchange(gradients, group)
            done.set_result(gradients)
        return done

    hook.__annotations__.clear()  # which are strings here, and torch accepts none or its own classes
    return hook
