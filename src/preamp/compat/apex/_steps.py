"""One step over a list of parameters of any mixture: sorted by device and dtype, then handed to `preamp.kernels`.

Every function steps in place and computes in float32 (float64 for float64 parameters), whatever the parameters are
stored in. 16-bit parameters with a master step the master and get it rounded; those without are widened for the
length of the call, stepped, and rounded back once. torch's fused operators are not asked to step 16-bit tensors: on
the CPU, `_fused_sgd_` of torch 2.13 leaves such parameters as they were. `found` is a 0-d float32 flag on the device:
above 0 nothing is written. `factor` multiplies the gradients.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ... import kernels
from ...formats import LOW_DTYPES
from ...kernels import Storage, global_norm

Masters = Sequence[Tensor | None] | None

WIDENED = 2**26
"""Elements of 16-bit parameters that are held in float32 at a time: the copies take 256 MiB at most, if no single
parameter is larger."""
WIDENED_ON_CPU = 2**18
"""The same on a CPU, where the copies should stay in the cache; larger parameters are cut where a step allows it."""

CORRECTED = 2.0**31
"""A step count after which Adam's bias corrections are 1 to the last bit: what `bias_correction=False` means."""


@dataclass(frozen=True, slots=True)
class Run:
    """Parameters, or a stretch of one, of one device and dtype that one call of a kernel steps."""

    places: list[int]
    """Their positions in the list they come from."""
    targets: list[Tensor]
    """What is stepped."""
    lows: list[Tensor] | None
    """16-bit parameters that the targets are rounded into."""
    stretch: slice | None = None
    """Which elements of the one contiguous parameter."""

    def of(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The tensors of another list at the same positions."""
        if self.stretch is not None:
            return [tensors[self.places[0]].detach().view(-1)[self.stretch]]
        return [tensors[i] for i in self.places]


def runs(
    params: Sequence[Tensor], *states: Sequence[Tensor], masters: Masters = None, grads: Sequence[Tensor] | None = None
) -> Iterator[Run]:
    """Sort parameters into runs, by what a call of a kernel needs to have in common.

    `grads`: given by steps that are elementwise, so that a large 16-bit parameter may be cut.
    """
    alike: dict[tuple[Any, ...], list[int]] = defaultdict(list)
    for i, param in enumerate(params):
        mastered = masters is not None and masters[i] is not None
        kept = tuple(state[i].dtype for state in states)
        alike[(param.device, param.dtype, mastered, kept)].append(i)
    for (device, dtype, mastered, _), places in alike.items():
        own = [params[i] for i in places]
        if masters is not None and mastered:
            yield Run(places, [master for i in places if (master := masters[i]) is not None], own)
        elif dtype not in LOW_DTYPES:
            yield Run(places, own, None)
        else:
            yield from _widened(params, places, device, [] if grads is None else [grads, *states])


def _widened(
    params: Sequence[Tensor], places: list[int], device: torch.device, along: Sequence[Sequence[Tensor]]
) -> Iterator[Run]:
    """Runs over float32 copies. `along`: the lists that would have to be cut with the parameters, if they may be."""
    limit = WIDENED_ON_CPU if device.type == "cpu" else WIDENED
    room: Tensor | None = None
    for part in _parts(params, places, limit):
        low = [params[i] for i in part]
        large = len(part) == 1 and low[0].numel() > limit and device.type == "cpu" and along
        if not large or not all(lists[part[0]].is_contiguous() for lists in (params, *along)):
            yield Run(part, [param.detach().float() for param in low], low)
            continue
        flat = low[0].detach().view(-1)
        room = (
            torch.empty(limit, dtype=torch.float32, device=device) if room is None else room
        )  # one place for all stretches, so that it stays cached
        for begin in range(0, flat.numel(), limit):
            stretch = slice(begin, begin + limit)
            values = flat[stretch]
            yield Run(part, [room[: values.numel()].copy_(values)], [values], stretch)


def _parts(params: Sequence[Tensor], places: list[int], limit: int) -> Iterator[list[int]]:
    begin, total = 0, 0
    for end, place in enumerate(places):
        size = params[place].numel()
        if total and total + size > limit:
            yield places[begin:end]
            begin, total = end, 0
        total += size
    yield places[begin:]


def adam(
    params: Sequence[Tensor], grads: Sequence[Tensor], exp_avgs: Sequence[Tensor], exp_avg_sqs: Sequence[Tensor], *,
    step: int | Tensor, lr: float | Tensor, betas: tuple[float, float], eps: float, weight_decay: float,
    decoupled: bool, bias_correction: bool, masters: Masters = None, factor: Tensor | None = None,
    found: Tensor | None = None,
) -> None:  # fmt: skip
    """Adam, or AdamW if `decoupled`. `step`: the number of this step, from 1; a tensor is read on the device."""
    for run in runs(params, exp_avgs, exp_avg_sqs, masters=masters, grads=grads):
        taken = _taken(step if bias_correction else None, run)
        storage = Storage(run.targets, (run.of(exp_avgs), run.of(exp_avg_sqs)), taken, run.lows)
        o = kernels.AdamOptions(
            lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, decoupled_weight_decay=decoupled, factor=factor,
            found=found,
        )  # fmt: skip
        kernels.adam(storage, run.of(grads), o)


def lamb(
    params: Sequence[Tensor], grads: Sequence[Tensor], exp_avgs: Sequence[Tensor], exp_avg_sqs: Sequence[Tensor], *,
    step: int | Tensor, grad_norm: Tensor, masters: Masters = None, **options: Any,
) -> None:  # fmt: skip
    """LAMB. `grad_norm`: 0-d, the global norm that clipping goes by; `options`: of `kernels.LambOptions`."""
    for run in runs(params, exp_avgs, exp_avg_sqs, masters=masters):
        storage = Storage(run.targets, (run.of(exp_avgs), run.of(exp_avg_sqs)), _taken(step, run), run.lows)
        norm = grad_norm.to(run.targets[0].device)
        kernels.lamb(storage, run.of(grads), kernels.LambOptions(grad_norm=norm, **options))


def novograd(
    params: Sequence[Tensor], grads: Sequence[Tensor], exp_avgs: Sequence[Tensor], norms: Tensor, *, step: int,
    **options: Any,
) -> None:  # fmt: skip
    """NovoGrad. `norms`: (number of parameters,) float32, written; `options`: of `kernels.NovoGradOptions`."""
    for run in runs(params, exp_avgs):
        whole = len(run.places) == len(params) and run.targets[0].device == norms.device
        places = slice(None) if whole else torch.tensor(run.places, device=norms.device)  # the copy makes the host wait
        own = norms[places].to(run.targets[0].device)
        storage = Storage(run.targets, (run.of(exp_avgs), [own]), _taken(step, run), run.lows)
        kernels.novograd(storage, run.of(grads), kernels.NovoGradOptions(**options))
        if not whole:
            norms[places] = own.to(norms.device)


def adagrad(
    params: Sequence[Tensor], grads: Sequence[Tensor], sums: Sequence[Tensor], *, lr: float | Tensor, eps: float,
    weight_decay: float, decoupled: bool, found: Tensor | None = None,
) -> None:  # fmt: skip
    """Adagrad; `decoupled`: weight decay shrinks the parameter, else it is added to the gradient."""
    for run in runs(params, sums, grads=grads):
        if decoupled and weight_decay:
            shrink(run.targets, lr, weight_decay, found)
        decay = 0.0 if decoupled else weight_decay
        storage = Storage(run.targets, (run.of(sums),), _taken(1, run), run.lows)
        o = kernels.AdagradOptions(lr=lr, eps=eps, weight_decay=decay, found=found)
        kernels.adagrad(storage, run.of(grads), o)


def sgd(
    params: Sequence[Tensor], grads: Sequence[Tensor], momentum_buffers: Sequence[Tensor], *, lr: float | Tensor,
    momentum: float, dampening: float, weight_decay: float, nesterov: bool, first: bool, wd_after_momentum: bool,
    factor: Tensor | None = None, found: Tensor | None = None,
) -> None:  # fmt: skip
    """Gradient descent. `first`: the buffers hold nothing yet. `wd_after_momentum`: decay is added to the update."""
    late = wd_after_momentum and weight_decay != 0
    kept = [momentum_buffers] if momentum else []
    for run in runs(params, *kept, grads=grads):
        if late:
            shrink(run.targets, lr, weight_decay, found)
        storage = Storage(run.targets, (run.of(momentum_buffers) if momentum else [],), None, run.lows)
        o = kernels.SGDOptions(
            lr=lr, momentum=momentum, dampening=dampening, weight_decay=0.0 if late else weight_decay,
            nesterov=nesterov, first=first, factor=factor, found=found,
        )  # fmt: skip
        kernels.sgd(storage, run.of(grads), o)


def shrink(params: list[Tensor], lr: float | Tensor, weight_decay: float, found: Tensor | None) -> None:
    """Multiply parameters by 1 - lr * weight_decay, unless `found`: lr * weight_decay * parameter taken off early."""
    device = params[0].device
    keep = 1 - (lr.to(device) if isinstance(lr, Tensor) else lr) * weight_decay
    if found is not None:
        keep = torch.where(found.to(device) > 0, 1.0, torch.as_tensor(keep, dtype=torch.float32, device=device))
    torch._foreach_mul_(params, keep)


def norm_of(gradients: Sequence[Tensor], factor: Tensor | None) -> Tensor:
    """The global L2 norm of true gradients, 0-d float32."""
    norm = global_norm(gradients)
    return norm if factor is None else norm * factor.to(norm.device)


def _taken(step: int | Tensor | None, run: Run) -> Tensor:
    """How many steps were taken before this one, 0-d float32 on the device; None: so many that it does not matter."""
    device = run.targets[0].device
    if isinstance(step, Tensor):
        return step.reshape(()).to(device, torch.float32) - 1
    return torch.full((), CORRECTED if step is None else step - 1, dtype=torch.float32, device=device)
