"""Data parallel training over process groups: gradients averaged at the end of backward, or when `Reducer` is told."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import zip_longest
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from ....formats import LOW_DTYPES
from ....tree import tensors
from .._notice import has_group

Collective = Callable[..., Any]


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
            broadcast_parameters(self.module)
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
    was meant. Accepted without effect, as there is one message: `message_size`, `delay_allreduce`, `shared_param`,
    `allreduce_trigger_params`, `num_allreduce_streams`, `allreduce_communicators`, `gradient_average_split_factor` and
    `prof`.

    ValueError: models that differ between ranks. RuntimeError: no process group.
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
        allreduce_communicators: Any = None,
        gradient_average: bool = True,
        gradient_predivide_factor: float = 1.0,
        gradient_average_split_factor: float | None = None,
        prof: bool = False,
    ) -> None:
        super().__init__()
        require_group("DistributedDataParallel")
        self.module = module
        self.message_size, self.delay_allreduce = message_size, delay_allreduce
        self.retain_allreduce_buffers, self.allreduce_always_fp32 = retain_allreduce_buffers, allreduce_always_fp32
        self.num_allreduce_streams, self.prof = num_allreduce_streams, prof
        self.gradient_average, self.gradient_predivide_factor = gradient_average, gradient_predivide_factor
        self.world_size = float(dist.get_world_size())
        self._enabled = True
        self._reset_process_state()
        broadcast_parameters(module)
        self._hook_parameters()

    def _reset_process_state(self) -> None:
        """Set what belongs to this process alone, and is in no copy."""
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
            parameters, fresh, self.gradient_average, float(self.gradient_predivide_factor),
            self.allreduce_always_fp32, self.retain_allreduce_buffers,
        )  # fmt: skip
        self._fresh.clear()
        self.allreduce_buffers = buffers if self.retain_allreduce_buffers else []

    # -- for scripts

    def enable_allreduce(self) -> None:
        """Reduce from the next backward on, together with what accumulated locally while disabled."""
        self._enabled = True

    def disable_allreduce(self) -> None:
        """Let gradients accumulate on each rank alone until `enable_allreduce()`. All ranks have to call both alike.

        At O1 and O2, write `amp.scale_loss(..., delay_unscale=True)` meanwhile: else earlier gradients are put aside
        while the last pass is reduced.
        """
        self._enabled = False

    def __getstate__(self) -> dict[str, Any]:
        of_process = {"allreduce_buffers", "_hooked", "_fresh", "_is_expected", "_callback", "_lock"}
        return {name: value for name, value in self.__dict__.items() if name not in of_process}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._reset_process_state()


def _refuse_sparse(name: str, parameter: Tensor) -> None:
    """ValueError for a gradient that cannot be laid into a flat buffer."""
    if parameter.grad is not None and parameter.grad.layout != torch.strided:
        raise ValueError(
            f"the gradient of {name} is {parameter.grad.layout}: flat buffers hold dense gradients only, and ranks "
            "have different rows. Build the embedding with sparse=False, or wrap the model in "
            "torch.nn.parallel.DistributedDataParallel."
        )


# -- many tensors in one collective: laid end to end in a flat buffer, sent, and copied back


def require_group(what: str) -> None:
    """RuntimeError unless the default process group is initialised; `what` needs it."""
    if not has_group():
        raise RuntimeError(
            f"{what} was built before the process group was there, so it does not know the other ranks. Call "
            'torch.distributed.init_process_group("nccl"), or "gloo" on CPU, first; for a single process use the '
            "module itself."
        )


def broadcast_parameters(module: nn.Module) -> None:
    """Overwrite the parameters of all ranks by those of rank 0, in place; one message per dtype.

    ValueError, on every rank alike, unless the ranks' parameters agree in name, shape, dtype and requires_grad: a
    broadcast of buffers of different sizes would hang, or fill one rank's weights with another's bytes.
    """
    own = [(name, tuple(p.shape), str(p.dtype), p.requires_grad) for name, p in module.named_parameters()]
    rows: list[Any] = [None] * dist.get_world_size()
    parameters = [p.detach() for p in module.parameters()]
    with torch.cuda.device_of(parameters[0]) if parameters else nullcontext():  # where nccl puts what it sends
        dist.all_gather_object(rows, own)
    for rank, row in enumerate(rows):
        if row != rows[0]:
            first, other = next((a, b) for a, b in zip_longest(rows[0], row) if a != b)
            raise ValueError(
                f"the ranks hold different models: rank 0 has {len(rows[0])} parameters, rank {rank} has {len(row)}. "
                f"The first to differ are {first} and {other} (name, shape, dtype, requires_grad). Their gradients "
                "cannot be added. Build the same model, and freeze the same layers, on every rank before wrapping it."
            )
    flat_dist_call(parameters, dist.broadcast, (0,))


@torch.no_grad()
def reduce_gradients(
    parameters: Sequence[Tensor], fresh: Sequence[bool], average: bool = True, predivide: float = 1.0,
    always_fp32: bool = False, retain: bool = False,
) -> list[Tensor]:  # fmt: skip
    """Reduce `.grad` of the parameters for which any rank says `fresh`, one message per dtype and device.

    Every rank has to call this with the same parameters. One that has no gradient sends zeros and receives the result;
    a parameter that is fresh nowhere keeps its `.grad`, None included. Gradients are divided by `predivide` before the
    sum and multiplied by `predivide / world size` after it, the latter only when `average`. `always_fp32`: 16-bit
    gradients are summed in float32. `retain`: `.grad` becomes a view of the reduced buffer where the dtypes allow.
    Returns the reduced flat buffers. The ranks first tell each other what is fresh, for which the host waits.
    """
    if not parameters:
        return []
    votes = torch.tensor(list(fresh), dtype=torch.int32, device=parameters[0].device)
    dist.all_reduce(votes)
    alike: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for parameter, vote in zip(parameters, votes.tolist(), strict=True):
        if vote:
            alike.setdefault((parameter.dtype, parameter.device), []).append(parameter)
    buffers = []
    for (own, _), members in alike.items():
        dtype = torch.float32 if always_fp32 and own in LOW_DTYPES else own
        buffer = flatten([(torch.zeros_like(p) if p.grad is None else p.grad).to(dtype) for p in members])
        buffer.mul_(1.0 / predivide)
        dist.all_reduce(buffer)
        if average:
            buffer.mul_(predivide / dist.get_world_size())
        pieces = unflatten(buffer, members)
        for parameter, piece in zip(members, pieces, strict=True):
            if parameter.grad is None:
                parameter.grad = torch.empty_like(parameter, requires_grad=False)
            if retain and dtype == own and parameter.is_contiguous():
                parameter.grad.data = piece  # the same gradient object, as whoever holds it expects
        torch._foreach_copy_([p.grad for p in members if p.grad is not None], pieces)
        buffers.append(buffer)
    return buffers


def flatten(bucket: Sequence[Tensor]) -> Tensor:
    """One contiguous 1-d tensor with the elements of all tensors of `bucket`, of one dtype and device, in order."""
    return torch.cat([tensor.reshape(-1) for tensor in bucket])


def unflatten(coalesced: Tensor, bucket: Sequence[Tensor]) -> list[Tensor]:
    """Views of the flat tensor `coalesced` in the shapes of `bucket`: what `flatten` did, undone."""
    pieces = coalesced.split([tensor.numel() for tensor in bucket]) if bucket else ()
    return [piece.view(tensor.shape) for piece, tensor in zip(pieces, bucket, strict=True)]


def apply_flat_dist_call(bucket: Sequence[Tensor], call: Collective, extra_args: Iterable[Any] | None = None) -> None:
    """Run the collective `call(flat, *extra_args)` on the tensors of `bucket` together, in place.

    `bucket`: tensors of one dtype and device. `call`: a function of torch.distributed that works in place;
    `dist.all_reduce` sums, and its result is divided by the world size, so that it averages.
    """
    with torch.no_grad():
        coalesced = flatten(bucket)
        call(coalesced, *(extra_args or ()))
        if call is dist.all_reduce:
            coalesced /= dist.get_world_size()
        for tensor, synced in zip(bucket, unflatten(coalesced, bucket), strict=True):
            tensor.detach().copy_(synced)


def flat_dist_call(tensors: Sequence[Tensor], call: Collective, extra_args: Iterable[Any] | None = None) -> None:
    """`apply_flat_dist_call` once for every dtype and kind of device found in `tensors`, in order of appearance."""
    for bucket in split_by_type(tensors).values():
        apply_flat_dist_call(bucket, call, extra_args)


def split_by_type(tensors: Iterable[Tensor]) -> dict[str, list[Tensor]]:
    """The tensors by their `tensor.type()`, such as "torch.FloatTensor", in order of appearance."""
    buckets: dict[str, list[Tensor]] = {}
    for tensor in tensors:
        buckets.setdefault(tensor.type(), []).append(tensor)
    return buckets
