"""The operators of `amp_C` in terms of torch._foreach operators and preamp's kernels, and `multi_tensor_applier`.

All take `(chunk_size, noop_flag, tensor_lists, ...)`. `chunk_size` is without effect. `noop_flag`: an integer or
floating tensor of one entry on the device of the tensors; an operator that looks at values sets it to 1 when one is
inf or nan, without waiting for the device, and leaves it alone otherwise; one that steps parameters does nothing where
it is above 0. `tensor_lists`: lists of equal length, entry by entry of one shape, of float16, bfloat16, float32 or
float64; computed in float32 (float64 for float64). Empty lists are fine. RuntimeError for lists that do not fit.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ... import kernels
from ...formats import LOW_DTYPES
from ...kernels import check_and_unscale_, l2_norms

Lists = Sequence[Sequence[Tensor]]

LATE = 2**31
"""A step at which Adam's bias corrections are 1 to the last bit: what `bias_correction=False` means."""


def multi_tensor_scale(chunk_size: int, noop_flag: Tensor, tensor_lists: Lists, scale: float | Tensor) -> None:
    """`outs = ins * scale` for lists `[ins, outs]`, which may be the same; flags what is not finite in `ins`."""
    ins, outs = _checked("multi_tensor_scale", tensor_lists, 2)
    _store(outs, _times(ins, scale, noop_flag))


def multi_tensor_axpby(
    chunk_size: int, noop_flag: Tensor, tensor_lists: Lists, a: float, b: float, arg_to_check: int = -1
) -> None:
    """`outs = a * xs + b * ys` for lists `[xs, ys, outs]`.

    `arg_to_check`: flag what is not finite in `xs` (0), in `ys` (1), or in either (-1).
    """
    xs, ys, outs = _checked("multi_tensor_axpby", tensor_lists, 3)
    sums = _times(xs, a, noop_flag if arg_to_check != 1 else None)
    others = _times(ys, b, noop_flag if arg_to_check != 0 else None)
    if sums:
        torch._foreach_add_(sums, [other.to(s.dtype) for s, other in zip(sums, others, strict=True)])
    _store(outs, sums)


def multi_tensor_l2norm(
    chunk_size: int, noop_flag: Tensor, tensor_lists: Lists, per_tensor: bool | None = False
) -> tuple[Tensor, Tensor]:
    """(L2 norm of all entries, norms of the tensors), float32 of shapes (1,) and (number of tensors,).

    The second is empty unless `per_tensor`. Flags a norm that is not finite.
    """
    (tensors,) = _checked("multi_tensor_l2norm", tensor_lists, 1)
    norms = [norm.float() for norm in l2_norms(_wide(tensors))]
    each = torch.stack([n.to(norms[0].device) for n in norms]) if norms else noop_flag.new_zeros(0, dtype=torch.float32)
    total = torch.linalg.vector_norm(each).reshape(1)
    _flag(noop_flag, ~total.isfinite())
    return total, each if per_tensor else each.new_zeros(0)


def multi_tensor_adam(
    chunk_size: int, noop_flag: Tensor, tensor_lists: Lists, lr: float, beta1: float, beta2: float, epsilon: float,
    step: int, mode: int, bias_correction: int, weight_decay: float,
) -> None:  # fmt: skip
    """One step of Adam for lists `[grads, params, exp_avgs, exp_avg_sqs]`.

    `step`: its number, from 1. `mode`: 0 adds weight decay to the gradient, 1 shrinks the parameter (AdamW).
    """
    grads, params, exp_avgs, exp_avg_sqs = _checked("multi_tensor_adam", tensor_lists, 4)
    o = kernels.AdamOptions(
        lr=lr, betas=(beta1, beta2), eps=epsilon, weight_decay=weight_decay, decoupled_weight_decay=mode == 1,
        found=_found(noop_flag),
    )  # fmt: skip
    step_with(kernels.adam, o, params, grads, [exp_avgs, exp_avg_sqs], step - 1 if bias_correction else LATE)


def multi_tensor_sgd(
    chunk_size: int, noop_flag: Tensor, tensor_lists: Lists, wd: float, momentum: float, dampening: float, lr: float,
    nesterov: bool, first_run: bool, wd_after_momentum: bool, scale: float = 1.0,
) -> None:  # fmt: skip
    """One step of gradient descent for lists `[grads, params, momentum_buffers]`, or with 16-bit copies of the
    parameters as a fourth, which are written too. Gradients are multiplied by `scale`. RuntimeError for
    `wd_after_momentum`.
    """
    if wd_after_momentum:
        raise RuntimeError("multi_tensor_sgd(wd_after_momentum=True) is not here: write multi_tensor_adam(mode=1)")
    lists = _checked("multi_tensor_sgd", tensor_lists, 4 if len(tensor_lists) == 4 else 3)
    grads, params, momentum_buffers = lists[:3]
    factor = None if scale == 1.0 else torch.full((), scale, dtype=torch.float32, device=noop_flag.device)
    o = kernels.SGDOptions(
        lr=lr, momentum=momentum, dampening=dampening, weight_decay=wd, nesterov=nesterov, first=first_run,
        factor=factor, found=_found(noop_flag),
    )  # fmt: skip
    step_with(kernels.sgd, o, params, grads, [momentum_buffers] if momentum else [[]], None)
    for copies in lists[3:]:
        _store(copies, params)


def multi_tensor_lamb(
    chunk_size: int, noop_flag: Tensor, tensor_lists: Lists, lr: float, beta1: float, beta2: float, epsilon: float,
    step: int, bias_correction: int, weight_decay: float, grad_averaging: int, mode: int, global_grad_norm: Tensor,
    max_grad_norm: float, use_nvlamb: bool | None = False,
) -> None:  # fmt: skip
    """One step of LAMB for lists `[grads, params, exp_avgs, exp_avg_sqs]`.

    `global_grad_norm`: of one entry, what clipping to `max_grad_norm` goes by. `mode` as in `multi_tensor_adam`.
    """
    grads, params, exp_avgs, exp_avg_sqs = _checked("multi_tensor_lamb", tensor_lists, 4)
    o = kernels.LambOptions(
        grad_norm=global_grad_norm.reshape(()).float(), lr=lr, betas=(beta1, beta2), eps=epsilon,
        weight_decay=weight_decay, bias_correction=bool(bias_correction), grad_averaging=bool(grad_averaging),
        adam_w_mode=mode == 1, max_grad_norm=max_grad_norm, use_nvlamb=bool(use_nvlamb), found=_found(noop_flag),
    )  # fmt: skip
    step_with(kernels.lamb, o, params, grads, [exp_avgs, exp_avg_sqs], step - 1)


@torch.no_grad()
def step_with(
    kernel: Any, options: Any, params: Sequence[Tensor], grads: Sequence[Tensor], states: Lists, steps: int | None
) -> None:
    """One step of parameters of any mixture of devices and dtypes by one of the kernels, after so many `steps`.

    16-bit parameters are widened for the length of the call, stepped in float32, and rounded back once.
    """
    alike: dict[tuple[torch.device, torch.dtype], list[int]] = defaultdict(list)
    for i, param in enumerate(params):
        alike[param.device, param.dtype].append(i)
    for (device, dtype), places in alike.items():
        own = [params[i].detach() for i in places]
        wide = [param.float() for param in own] if dtype in LOW_DTYPES else own
        lists = [[state[i] for i in places] if state else [] for state in states]
        step = None if steps is None else torch.full((), steps, dtype=torch.float32, device=device)
        storage = kernels.Storage(wide, lists, step, own if dtype in LOW_DTYPES else None)
        kernel(storage, [grads[i] for i in places], options)


def _checked(name: str, tensor_lists: Lists, number: int) -> list[list[Tensor]]:
    """The lists, known to fit each other."""
    lists = [list(tensors) for tensors in tensor_lists]
    sizes = [len(tensors) for tensors in lists]
    if len(lists) != number or len(set(sizes)) > 1:
        raise RuntimeError(f"{name} got lists of lengths {sizes}: it takes {number} lists of one length")
    return lists


def _wide(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [tensor.detach().float() if tensor.dtype in LOW_DTYPES else tensor.detach() for tensor in tensors]


def _times(tensors: Sequence[Tensor], scale: float | Tensor, noop_flag: Tensor | None) -> list[Tensor]:
    """Wide copies times `scale`; flags what is not finite in `tensors`."""
    copies = [t.detach().to(torch.promote_types(t.dtype, torch.float32), copy=True) for t in tensors]
    if not copies:
        return copies
    device = copies[0].device
    if isinstance(scale, Tensor):
        factor = scale.reshape(()).to(device, torch.float32)
    else:
        factor = torch.full((), scale, dtype=torch.float32, device=device)
    found = check_and_unscale_(copies, factor)
    if noop_flag is not None:
        _flag(noop_flag, found > 0)
    return copies


def _store(outs: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    if outs:
        with torch.no_grad():
            torch._foreach_copy_(list(outs), list(values))


def _flag(noop_flag: Tensor, bad: Tensor) -> None:
    noop_flag.masked_fill_(bad.to(noop_flag.device).reshape(()), 1)


def _found(noop_flag: Tensor) -> Tensor:
    return noop_flag.reshape(-1)[0].to(torch.float32)


# -- apex.multi_tensor_apply


class MultiTensorApply:
    """Calls an operator of `amp_C` over lists of tensors: `applier(op, noop_flag_buffer, tensor_lists, *args)`.

    `chunk_size`: handed to the operator, as Apex's kernels cut tensors by it; preamp's own choose for themselves.
    `available` is always True, there being nothing to compile; `warned` and `import_err` are kept for those who look.
    """

    available = True
    warned = False
    import_err: ImportError | None = None

    def __init__(self, chunk_size: int) -> None:
        self.chunk_size = chunk_size

    def __call__(
        self, op: Callable[..., Any], noop_flag_buffer: Tensor, tensor_lists: list[list[Tensor]], *args: Any
    ) -> Any:
        """What `op(chunk_size, noop_flag_buffer, tensor_lists, *args)` returns."""
        return op(self.chunk_size, noop_flag_buffer, tensor_lists, *args)


multi_tensor_applier = MultiTensorApply(2048 * 32)
