"""Data parallel training over process groups: gradients averaged during backward, or when `Reducer` is told to."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ....errors import PreampWarning
from ....tree import tensors
from ._buckets import ReductionOptions, reduce_now
from ._collectives import (
    Group,
    apply_flat_dist_call,
    broadcast_parameters,
    check_same_model,
    extract_tensors,
    flat_dist_call,
    flatten,
    has_group,
    import_flatten_impl,
    own_group,
    require_group,
    split_by_type,
    split_half_float_double,
    unflatten,
)
from ._passes import Synchronizer

__all__ = [
    "DistributedDataParallel",
    "Reducer",
    "apply_flat_dist_call",
    "extract_tensors",
    "flat_dist_call",
    "flatten",
    "import_flatten_impl",
    "split_by_type",
    "split_half_float_double",
    "unflatten",
]


class Reducer:
    """Averages gradients over all ranks when `reduce()` is called, and never by itself.

    `module_or_grads_list`: a module, whose parameters are set to rank 0's at once and whose `.grad` are averaged; or
    a tensor or any nesting of iterables of tensors, which are averaged in place. RuntimeError without a process group.
    """

    def __init__(self, module_or_grads_list: nn.Module | Tensor | Iterable[Any]) -> None:
        require_group("Reducer")
        self.module: nn.Module | None = None
        self.grads: list[Tensor] = []
        if isinstance(module_or_grads_list, nn.Module):
            self.module = module_or_grads_list
            check_same_model(list(self.module.named_parameters()), None)
            broadcast_parameters(list(self.module.parameters()))
        else:
            extract_tensors(module_or_grads_list, self.grads)

    def reduce(self) -> None:
        """Average in place, in the gradients' own dtype. Every rank has to call this.

        A module's parameter without a gradient on this rank counts as zero if another rank has one; if none has,
        its `.grad` stays None.
        """
        if self.module is None:
            flat_dist_call(self.grads, dist.all_reduce)
        else:
            reduce_now([(n, p) for n, p in self.module.named_parameters() if p.requires_grad], ReductionOptions(), None)


class DistributedDataParallel(nn.Module):
    """A module whose gradients are averaged over all ranks by the end of every backward, in place in `param.grad`.

    At construction the parameters, not the buffers, are set to rank 0's. Wrap a model after `amp.initialize`.
    Gradients are sent in buckets while backward goes on. Any number of forwards and backwards may come before a step;
    parameters may be frozen and thawed between passes, on all ranks alike; and they may stay unused, on all ranks
    or on some: such a rank counts as zero, and where no rank used a parameter its `.grad` stays as it is. What cannot
    work is a rank that runs no backward while the others do: they wait until the process group's timeout.

    `message_size`: elements after which a bucket is sent. `delay_allreduce`: send everything when backward is over,
    one message per dtype. `allreduce_trigger_params`: parameters whose gradients complete a bucket, instead of its
    size. `retain_allreduce_buffers`: keep the reduced flat buffers in `allreduce_buffers`, with `.grad` as views of
    them. `allreduce_always_fp32`: sum float16 and bfloat16 gradients in float32. `gradient_predivide_factor` f:
    gradients are divided by f before the sum and multiplied by f / world size after it; `gradient_average=False`
    leaves out the latter, and gradients should then be zeroed before every backward, since a sum of sums is not what
    was meant. `num_allreduce_streams`: accepted; torch runs each process group on a stream of its own.
    `allreduce_communicators`: a pair (process groups, streams) of as many each; buckets use the groups in turn.
    `prof` is accepted: torch.profiler sees the collectives by itself. `gradient_average_split_factor` does nothing.

    ValueError: `shared_param` (obsolete), more than one stream or trigger parameters together with `delay_allreduce`,
    a message size or factor that is not positive, models that differ between ranks. RuntimeError: no process group.
    """

    def __init__(
        self,
        module: nn.Module,
        message_size: int = 10000000,
        delay_allreduce: bool = False,
        shared_param: bool | None = None,
        allreduce_trigger_params: Sequence[Tensor] | None = None,
        retain_allreduce_buffers: bool = False,
        allreduce_always_fp32: bool = False,
        num_allreduce_streams: int = 1,
        allreduce_communicators: tuple[Sequence[Group], Sequence[Any]] | None = None,
        gradient_average: bool = True,
        gradient_predivide_factor: float = 1.0,
        gradient_average_split_factor: float | None = None,
        prof: bool = False,
    ) -> None:
        super().__init__()
        require_group("DistributedDataParallel")
        if shared_param is not None:
            raise ValueError(
                f"shared_param={shared_param!r} is obsolete: parameters that layers share were handled by sending "
                "everything at the end of backward. Leave it out, or write delay_allreduce=True for that."
            )
        if delay_allreduce and num_allreduce_streams > 1:
            raise ValueError(
                f"num_allreduce_streams={num_allreduce_streams} has nothing to overlap with delay_allreduce=True, "
                "which sends once, after backward. Leave one of them out."
            )
        if delay_allreduce and allreduce_trigger_params is not None:
            raise ValueError(
                "allreduce_trigger_params say when to send during backward, and delay_allreduce=True sends nothing "
                "until it is over. Leave one of them out."
            )
        if not message_size > 0 or not gradient_predivide_factor > 0 or num_allreduce_streams < 1:
            raise ValueError(
                f"message_size={message_size}, gradient_predivide_factor={gradient_predivide_factor} and "
                f"num_allreduce_streams={num_allreduce_streams} must be positive: they are elements per message, a "
                "divisor and a count."
            )
        if gradient_average_split_factor is not None:
            warnings.warn(
                "gradient_average_split_factor does nothing; write gradient_predivide_factor to divide before the sum.",
                PreampWarning,
                stacklevel=2,
            )
        self.module = module
        self.message_size, self.delay_allreduce = message_size, delay_allreduce
        self.retain_allreduce_buffers, self.allreduce_always_fp32 = retain_allreduce_buffers, allreduce_always_fp32
        self.num_allreduce_streams, self.prof = num_allreduce_streams, prof
        self.gradient_average, self.gradient_predivide_factor = gradient_average, gradient_predivide_factor
        self.world_size = float(dist.get_world_size())
        self._enabled = True
        named = list(module.named_parameters())
        self._triggers = _numbers(allreduce_trigger_params or (), [p for _, p in named])
        self._groups: list[Group] | None = _groups_of(allreduce_communicators, num_allreduce_streams)
        for name, parameter in named:
            _check_parameter(name, parameter)
        check_same_model(named, self._groups[0])
        broadcast_parameters([p for _, p in named], self._groups[0])
        self._sync: Synchronizer | None = self._synchronizer()

    def _synchronizer(self) -> Synchronizer:
        """A fresh one for the module's present parameters; everything it needs to know is in plain attributes."""
        if self._groups is None:
            self._groups = [own_group()]
        options = ReductionOptions(
            average=self.gradient_average,
            predivide=float(self.gradient_predivide_factor),
            always_fp32=self.allreduce_always_fp32,
            retain=self.retain_allreduce_buffers,
        )
        size = float("inf") if self.delay_allreduce else float(self.message_size)
        made = Synchronizer(list(self.module.named_parameters()), options, self._groups, size, self._triggers)
        made.enabled = self._enabled
        return made

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """The module's own outputs. With gradients enabled, the ranks get ready for a backward."""
        if not torch.is_grad_enabled() or not has_group():
            return self.module(*inputs, **kwargs)
        sync = self._current_synchronizer()
        outputs = self.module(*inputs, **kwargs)
        sync.watch(tensors((inputs, kwargs)), tensors(outputs))
        return outputs

    def _current_synchronizer(self) -> Synchronizer:
        sync = self._sync
        present = list(self.module.parameters())
        if sync is not None and list(map(id, present)) == list(map(id, sync.parameters)):
            sync.refresh()
            return sync
        if sync is not None:  # layers were added or replaced after wrapping
            sync.close()
        self._sync = self._synchronizer()
        return self._sync

    def enable_allreduce(self) -> None:
        """Reduce from the next backward on, together with what accumulated locally while disabled."""
        self._enabled = True
        if self._sync is not None:
            self._sync.enabled = True

    def disable_allreduce(self) -> None:
        """Let gradients accumulate on each rank alone until `enable_allreduce()`. All ranks have to call both alike."""
        self._enabled = False
        if self._sync is not None:
            self._sync.enabled = False

    @property
    def allreduce_buffers(self) -> list[Tensor]:
        """The reduced flat buffers of the last backward, in the order sent; empty unless they are retained."""
        return [] if self._sync is None else self._sync.buffers

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_sync": None, "_groups": None}  # groups and hooks live in this process only

    def __deepcopy__(self, memo: dict[int, Any]) -> DistributedDataParallel:
        twin = self.__class__.__new__(self.__class__)
        memo[id(self)] = twin
        twin.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        twin._groups = self._groups  # same process, same ranks: no need to agree on new groups
        return twin


def _numbers(chosen: Sequence[Tensor], parameters: Sequence[Tensor]) -> frozenset[int]:
    """The places of the `chosen` parameters in the model."""
    places = {id(p): number for number, p in enumerate(parameters)}
    strangers = sum(id(p) not in places for p in chosen)
    if strangers:
        raise ValueError(
            f"{strangers} of the {len(chosen)} allreduce_trigger_params are no parameters of the wrapped module, so no "
            "gradient of theirs will ever arrive. Pass parameters out of module.parameters()."
        )
    return frozenset(places[id(p)] for p in chosen)


def _groups_of(communicators: tuple[Sequence[Group], Sequence[Any]] | None, streams: int) -> list[Group]:
    if not communicators:
        return [own_group()]
    if len(communicators) != 2 or not len(communicators[0]) == len(communicators[1]) == streams:
        raise ValueError(
            f"allreduce_communicators has parts of lengths {[len(part) for part in communicators]}, but with "
            f"num_allreduce_streams={streams} it must be a pair of a list of {streams} process groups and a list of as "
            "many streams."
        )
    return list(communicators[0])


def _check_parameter(name: str, parameter: Tensor) -> None:
    if isinstance(parameter, nn.parameter.UninitializedParameter):
        raise ValueError(
            f"{name} has no shape yet, so rank 0 cannot send it. Run one forward on every rank before wrapping."
        )
    if dist.get_backend() == "nccl" and not parameter.is_cuda:
        raise ValueError(
            f"{name} is on {parameter.device}, and the nccl backend moves CUDA tensors only. Call .cuda() on the "
            'module before wrapping it, or init_process_group("gloo").'
        )
