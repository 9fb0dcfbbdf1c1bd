"""Swaps another tensor in for a parameter, without effect on hooks and references.

`parameter.data = other` would do, but where the dtype changes torch then makes a new gradient accumulator, and hooks on
the old one (DistributedDataParallel's, and any on `AccumulateGrad`) never fire again. So the tensors behind two Python
objects are swapped, as in `torch.utils.swap_tensors`: gradient and accumulator, with its hooks, stay with their tensor.
Hooks on the parameter and references from Python (in modules, groups and states of optimizers) stay with the Python
object.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Collection, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.nn.parallel import DistributedDataParallel

from ..errors import SessionError
from ..sharding import is_sharded
from .leaves import dtype_of_gradient


def set_data(parameter: Parameter, data: Tensor) -> None:
    """Replace a parameter's data permanently, also with another dtype, which its gradient gets too."""
    gradient, parameter.grad = parameter.grad, None
    if is_sharded(parameter):  # `.data` would change a DTensor's metadata, but not its local tensor
        swap(parameter, Parameter(data, parameter.requires_grad))
    else:
        parameter.data = data
    parameter.grad = None if gradient is None else gradient.to(dtype_of_gradient(parameter))


def swap(parameter: Any, other: Any) -> None:
    """Swap the tensors behind two parameters; a second call swaps them back. Hooks are those of `parameter`.

    A profiler that records shapes or stacks holds weak references to what operators are given, and torch swaps no such
    tensors. While one is on, or was, the parameters exchange data and gradients instead; accumulators are made anew.

    `SessionError`, with nothing changed, if something holds a weak reference to one of the tensors themselves, and
    other processes wait for the accumulators, or the first call has swapped the tensors.
    """
    exchanged = getattr(other, "exchanged", None)
    if exchanged is None and torch._C._autograd._profiler_enabled() and _may_exchange(parameter):
        exchanged = True
    if not exchanged:
        try:
            _swap_tensors(parameter, other)
        except RuntimeError as error:
            if exchanged is False or not _may_exchange(parameter):
                raise SessionError(
                    f"a master cannot take the place of a parameter of shape {tuple(parameter.shape)}, since something "
                    f"holds a weak reference to its tensor ({str(error).splitlines()[0]}). Drop it. It may be a "
                    "profiler: leave out record_shapes and with_stack, and do not begin within full_precision()"
                ) from error
            exchanged = True
    if exchanged:
        both, data = (other.grad, parameter.grad), parameter.data
        parameter.grad = other.grad = None
        parameter.data, other.data = other.data, data
        for each, grad in zip((parameter, other), both, strict=True):  # a pass in float32 may have ended since
            each.grad = None if grad is None else grad.to(dtype_of_gradient(each))
    other.exchanged = bool(exchanged)
    for kind in ("_backward_hooks", "_post_accumulate_grad_hooks"):  # for the tensor that is there now, too
        if (hooks := getattr(parameter, kind)) is not None:
            setattr(parameter, kind, hooks)


def _may_exchange(parameter: Parameter) -> bool:
    """Whether no other process waits for the parameter's gradient accumulator, on which hooks would be lost."""
    return not is_sharded(parameter) and not (torch.distributed.is_available() and torch.distributed.is_initialized())


def _swap_tensors(parameter: Any, other: Any) -> None:
    try:
        torch._C._swap_tensor_impl(parameter, other)
    except RuntimeError:  # inside a region autocast refers to what it has cast
        torch.clear_autocast_cache()
        torch._C._swap_tensor_impl(parameter, other)
    if is_sharded(parameter):  # what a DTensor holds, and how it is placed, belongs to its Python object
        parameter._local_tensor, other._local_tensor = other._local_tensor, parameter._local_tensor
        parameter._spec, other._spec = other._spec, parameter._spec


def hand_over(parameter: Any, other: Parameter) -> None:
    """Have `parameter` get the gradients of passes that ran while the tensor of `other` was behind it."""

    def came(other: Tensor) -> None:
        grad, other.grad = other.grad, None
        if grad is None or not parameter.requires_grad:  # it was frozen since
            return
        grad = grad.to(dtype_of_gradient(parameter))
        parameter.grad = grad if parameter.grad is None else parameter.grad + grad
        for hook in tuple((parameter._post_accumulate_grad_hooks or {}).values()):
            hook(parameter)

    if other.requires_grad:
        other.register_post_accumulate_grad_hook(came)


_GIVEN: weakref.WeakSet[nn.Module] = weakref.WeakSet()
"""Wrappers passed to sessions: the search for others does not see objects made before `gc.freeze()`."""


def rebuild_reducers(
    parameters: Collection[Parameter], *, models: Iterable[nn.Module] = (), strict: bool = False
) -> None:
    """Rebuild the reducers of DistributedDataParallel models that hold these parameters, whose dtype has changed.

    Their buckets have the former dtype, and their hooks are on its gradient accumulators: nothing would be exchanged
    any more. So they make their reducer again, as torch does after unpickling; communication hooks are kept. A model
    for which that fails refuses to train on; with `strict` that is a `SessionError` now. `models`: may contain further
    wrappers, besides those that are found.
    """
    _GIVEN.update(model for model in models if isinstance(model, DistributedDataParallel))
    for one in wrappers_of(parameters):
        try:
            _rebuild_reducer(one)
        except Exception as error:
            if strict:
                raise SessionError(
                    "a DistributedDataParallel around this model cannot lay its buckets out for 16-bit parameters "
                    f"({error}): prepare() the bare model first, then wrap it"
                ) from error
            one.register_forward_pre_hook(_refuse)


def wrappers_of(parameters: Collection[Parameter]) -> list[DistributedDataParallel]:
    """The DistributedDataParallel models of this process that hold some of these parameters."""
    if not parameters or not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return []
    kinds = {DistributedDataParallel, *DistributedDataParallel.__subclasses__()}
    every = dict.fromkeys([*_GIVEN, *(thing for thing in gc.get_objects() if type(thing) in kinds)])
    held = set(parameters)
    return [one for one in every if not held.isdisjoint(one.parameters())]


def _rebuild_reducer(wrapper: Any) -> None:
    if wrapper.mixed_precision is not None:
        raise SessionError("it casts parameters by itself: mixed_precision=...")
    logged = wrapper._get_ddp_logging_data().get("comm_hook", "")
    held, sparse = wrapper._build_params_for_reducer()
    names = wrapper._build_debug_param_to_name_mapping(held)
    wrapper._ddp_init_helper(held, sparse, names, wrapper.static_graph)
    if wrapper.static_graph:
        wrapper.reducer._set_static_graph()
        wrapper.logger._set_static_graph()
    for hook, state in wrapper._comm_hooks:
        wrapper.logger._set_comm_hook_name(hook.__qualname__)
        torch._C._distributed_c10d._register_comm_hook(wrapper.reducer, state, hook)
    _, builtin, name = logged.partition("BuiltinCommHookType.")
    if builtin:  # torch's own in C++, of which the wrapper keeps nothing but what it says
        wrapper._register_builtin_comm_hook(getattr(torch._C._distributed_c10d.BuiltinCommHookType, name))


def _refuse(wrapper: nn.Module, _: Any) -> None:
    if torch.is_grad_enabled() and wrapper.training:
        raise SessionError(
            "this DistributedDataParallel was made around 16-bit parameters, and its session is closed: they are "
            "float32 again, and their gradients would no longer be exchanged. To train on, wrap the model anew"
        )
