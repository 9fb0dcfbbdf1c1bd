"""Data parallel training over process groups: gradients averaged at the end of backward, or when `Reducer` is told."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from ....tree import tensors
from ._collectives import (
    Group,
    apply_flat_dist_call,
    broadcast_parameters,
    check_same_model,
    flat_dist_call,
    flatten,
    has_group,
    reduce_gradients,
    require_group,
    split_by_type,
    unflatten,
)

__all__ = [
    "DistributedDataParallel",
    "Reducer",
    "apply_flat_dist_call",
    "flat_dist_call",
    "flatten",
    "split_by_type",
    "unflatten",
]


class Reducer:
    """Averages gradients over all ranks when `reduce()` is called, and never by itself.

    `module_or_grads_list`: a module, whose parameters are set to rank 0's at once and whose `.grad` are averaged; or
    a tensor, or an iterable with tensors in it, which are averaged in place. RuntimeError without a process group.
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
            given = module_or_grads_list
            self.grads = list(tensors(given if isinstance(given, (Tensor, dict)) else list(given)))

    def reduce(self) -> None:
        """Average in place, in the gradients' own dtype. Every rank has to call this.

        A module's parameter without a gradient on this rank counts as zero if another rank has one; if none has,
        its `.grad` stays None.
        """
        if self.module is None:
            flat_dist_call(self.grads, dist.all_reduce)
            return
        trained = [(name, p) for name, p in self.module.named_parameters() if p.requires_grad]
        for name, parameter in trained:
            _refuse_sparse(name, parameter)
        reduce_gradients([p for _, p in trained], [p.grad is not None for _, p in trained])


class DistributedDataParallel(nn.Module):
    """A module whose gradients are averaged over all ranks at the end of every backward, in place in `param.grad`.

    At construction the parameters, not the buffers, are set to rank 0's. Wrap a model after `amp.initialize`.
    Gradients are sent when backward is over, in one message per dtype: nothing overlaps with backward, for which there
    is torch's wrapper. Any number of forwards and backwards may come before a step; parameters may be frozen and
    thawed; and they may stay unused, on all ranks or on some: such a rank counts as zero, and where no rank used a
    parameter its `.grad` stays as it is. What cannot work is a rank that runs no backward, or one that raises or fills
    no gradient at all, while the others do: they wait until the process group's timeout.

    `retain_allreduce_buffers`: keep the reduced flat buffers in `allreduce_buffers`, with `.grad` as views of
    them. `allreduce_always_fp32`: sum float16 and bfloat16 gradients in float32. `gradient_predivide_factor` f:
    gradients are divided by f before the sum and multiplied by f / world size after it; `gradient_average=False`
    leaves out the latter, and gradients should then be zeroed before every backward, since a sum of sums is not what
    was meant. `allreduce_communicators`: a pair (process groups, streams), whose first group is used. Accepted without
    effect, as there is one message: `message_size`, `delay_allreduce`, `allreduce_trigger_params`,
    `num_allreduce_streams`, `prof` and `gradient_average_split_factor`.

    ValueError: `shared_param` (obsolete), more than one stream or trigger parameters together with `delay_allreduce`,
    models that differ between ranks, a parameter that is not where the process group can send it from. RuntimeError: no
    process group.
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
                f"shared_param={shared_param!r} is obsolete: everything is sent at the end of backward, after which "
                "the gradients of parameters that layers share are complete. Leave it out."
            )
        if delay_allreduce and (num_allreduce_streams > 1 or allreduce_trigger_params is not None):
            raise ValueError(
                "num_allreduce_streams and allreduce_trigger_params are about sending during backward, and "
                "delay_allreduce=True sends after it. Leave one of them out."
            )
        self.module = module
        self.message_size, self.delay_allreduce = message_size, delay_allreduce
        self.retain_allreduce_buffers, self.allreduce_always_fp32 = retain_allreduce_buffers, allreduce_always_fp32
        self.num_allreduce_streams, self.prof = num_allreduce_streams, prof
        self.gradient_average, self.gradient_predivide_factor = gradient_average, gradient_predivide_factor
        self.world_size = float(dist.get_world_size())
        named = list(module.named_parameters())
        away = [name for name, parameter in named if not parameter.is_cuda]
        if away and dist.get_backend() == "nccl":
            raise ValueError(
                f"{away[0]} is not on a GPU, and the nccl backend moves CUDA tensors only. Call .cuda() on the module "
                'before wrapping it, or init_process_group("gloo").'
            )
        self._enabled = True
        self._begin_anew(allreduce_communicators[0][0] if allreduce_communicators else None)
        check_same_model(named, self._group)
        broadcast_parameters([p for _, p in named], self._group)
        self._hook_parameters()

    def _begin_anew(self, group: Group) -> None:
        """What is of this process alone, and in no copy."""
        self._group = group
        self.allreduce_buffers: list[Tensor] = []
        """The reduced flat buffers of the last backward, one for each dtype; empty unless they are retained."""
        self._hooked: Any = WeakTensorKeyDictionary()
        self._fresh: dict[int, Tensor] = {}
        """By id, parameters with gradients that the other ranks have not seen."""
        self._is_expected = False
        """Whether gradients have arrived in a backward that ends with a reduction."""
        self._callback: Callable[[], Any] = lambda: None
        """A weak reference to what that backward calls at its end. The engine forgets it if the backward raises."""
        self._lock = threading.Lock()  # CPU and CUDA parameters get their gradients in different threads

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """The module's own outputs. A backward through them ends with a reduction, if it fills gradients."""
        outputs = self.module(*inputs, **kwargs)
        if torch.is_grad_enabled() and has_group():
            self._hook_parameters()
            for output in tensors(outputs):  # so that it is the outermost one that reduces, not a checkpoint's
                if output.grad_fn is not None:
                    output.register_hook(lambda _: self._begin())
        return outputs

    def _hook_parameters(self) -> None:
        """Note gradients of all parameters that want some, of layers added since, or thawed, too."""
        me = weakref.ref(self)  # the hook must not keep a wrapper alive, nor reduce for one that was replaced

        def arrived(parameter: Tensor) -> None:
            wrapper = me()
            if wrapper is not None and has_group():  # else what is left of a closed group is a plain module
                wrapper._arrived(parameter)

        for name, parameter in self.module.named_parameters():
            if parameter.requires_grad and parameter not in self._hooked:
                self._hooked[parameter] = name
                parameter.register_post_accumulate_grad_hook(arrived)

    # -- in backward

    def _arrived(self, parameter: Tensor) -> None:
        _refuse_sparse(self._hooked[parameter], parameter)
        self._fresh[id(parameter)] = parameter
        if self._enabled:
            self._begin()
            self._is_expected = True

    def _begin(self) -> None:
        """Have the running backward end with a reduction."""
        with self._lock:
            if self._callback() is None and has_group():
                callback = partial(self._complete)
                self._callback = weakref.ref(callback)
                torch.autograd.Variable._execution_engine.queue_callback(callback)

    def _complete(self) -> None:
        """Reduce the gradients of all ranks, if some have arrived."""
        expected, self._is_expected, self._callback = self._is_expected, False, lambda: None
        if not expected:
            return
        parameters = list(self.module.parameters())
        fresh = [id(p) in self._fresh and p.grad is not None for p in parameters]
        buffers = reduce_gradients(
            parameters, fresh, self._group, self.gradient_average, float(self.gradient_predivide_factor),
            self.allreduce_always_fp32, self.retain_allreduce_buffers,
        )  # fmt: skip
        self._fresh.clear()
        self.allreduce_buffers = buffers if self.retain_allreduce_buffers else []

    # -- for scripts

    def enable_allreduce(self) -> None:
        """Reduce from the next backward on, together with what accumulated locally while disabled."""
        self._enabled = True

    def disable_allreduce(self) -> None:
        """Let gradients accumulate on each rank alone until `enable_allreduce()`. All ranks have to call both alike."""
        self._enabled = False

    def __getstate__(self) -> dict[str, Any]:
        of_process = {"_group", "allreduce_buffers", "_hooked", "_fresh", "_is_expected", "_callback", "_lock"}
        return {name: value for name, value in self.__dict__.items() if name not in of_process}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._begin_anew(None)


def _refuse_sparse(name: str, parameter: Tensor) -> None:
    """ValueError for a gradient that cannot be laid into a flat buffer."""
    if parameter.grad is not None and parameter.grad.layout != torch.strided:
        raise ValueError(
            f"the gradient of {name} is {parameter.grad.layout}: flat buffers hold dense gradients only, and ranks "
            "have different rows. Build the embedding with sparse=False, or wrap the model in "
            "torch.nn.parallel.DistributedDataParallel."
        )
