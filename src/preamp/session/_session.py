"""`Session`: a training run under a policy. The only place where the mechanisms meet, in the order of a step."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..compiling import traced_by_callers, uncompiled
from ..errors import SessionError
from ..frameworks import framework_hooks, tell_skipped, unwrap
from ..kernels import Reading, clip_values_
from ..sharding import sharded_parts
from ._base import SessionBase
from ._capture import CapturedStep
from ._checks import check_gathered_full, check_loss, check_no_sync, names_of, selected
from ._parameters import gradients_of
from ._region import SessionRegion
from ._report import StepReport
from ._step import step_unless


class Session(SessionBase):
    """Made by `preamp.prepare`. Owns what mixed precision adds to a training loop: regions, scales, masters, skips.

    A context manager: leaving it, or `close()`, gives model, optimizer and torch back as they were, with the values
    that training gave them.
    """

    # -- forward

    @traced_by_callers
    def autocast(self, enabled: bool = True) -> SessionRegion:
        """A new region for the forward pass and the loss, as the policy has it; also a decorator."""
        self._check_open()
        active = enabled and self.policy.has_regions
        dtype = self.policy.compute if active else None
        return SessionRegion(self.device_type, dtype, active, self._entering, lambda: self.autocast(enabled))

    @uncompiled
    def _entering(self) -> None:
        """A region begins: the forward pass is to see 16-bit parameters and up-to-date copies."""
        if self._masters.shadows:
            self._masters.refresh()
        if torch.is_grad_enabled():
            self._rest()

    @contextmanager
    def full_precision(self, *, values_only: bool = False) -> Iterator[None]:
        """Inside, the model runs in float32, with its master weights: for validation, or an export.

        Between steps only: gradients of low parameters are put aside while it lasts. Not in compiled code.
        `values_only=True`: parameters and buffers are to be read, and the model will not run. A model that FSDP2
        gathers in 16 bits can only be read: `SessionError` without it.
        """
        self._check_open()
        if self._full.depth:
            yield
            return
        self._reshard()
        if self._sharded and not values_only and self.policy.compute is not torch.float32:
            check_gathered_full(self._models.values())
        self._rest()
        self._full.depth += 1
        try:
            self._full.enter()
            with torch.autocast(self.device_type, enabled=False):
                yield
        finally:
            self._full.depth = 0
            self._full.leave()

    # -- backward

    @uncompiled
    def scale(self, loss: Tensor, name: str | None = None) -> Tensor:
        """`loss` times its scale, where `backward` cannot be called: `session.scale(loss).backward()`.

        Not for losses with scales of their own, whose gradients have to be unscaled as their backward ends.
        """
        name = self._begin_backward(loss, name)
        if self._losses.apart:
            raise SessionError(f"the loss {name!r} has a scale of its own: write session.backward(loss, name={name!r})")
        self._round.ran(name)
        return self._losses[name].scale(loss)

    @uncompiled
    def backward(self, loss: Tensor, *, name: str | None = None, sync: bool = True, **kwargs: Any) -> None:
        """Gradients of `loss`, protected by its scale. Call it once a micro-batch; gradients add up until `step`.

        `loss`: a 0-d floating tensor. `name`: which of the session's losses it is. `sync=False`: more micro-batches
        follow before the step; under DistributedDataParallel and FSDP2 forward and backward must run inside
        `session.no_sync()`, which is checked. `kwargs` go to `Tensor.backward` (`retain_graph`, `inputs`).
        """
        name = self._begin_backward(loss, name)
        if not sync:
            check_no_sync(self._models.values())
        scale = self._losses[name]
        seed = scale.seed(loss) if kwargs.get("gradient") is None else None  # saves the product, and its backward
        if seed is None:
            run = functools.partial(scale.scale(loss).backward, **kwargs)
        else:
            run = functools.partial(loss.backward, seed, **kwargs)
        if not self._losses.apart:
            run()
            self._book.collect_strays()
        else:
            self._round.void_zeroed()
            readings = self._book.backward_apart(
                run, scale.inverse(loss.device), self._optimizers.values(), scale.needs_statistics
            )
            self._round.record(name, readings)
        self._round.ran(name)

    def grad(
        self, outputs: Tensor, inputs: Tensor | Sequence[Tensor], *, name: str | None = None, create_graph: bool = True
    ) -> tuple[Tensor, ...]:
        """True gradients of `outputs` with respect to `inputs`, as `torch.autograd.grad` gives them, in float32.

        For a gradient penalty: the pass is scaled and the result unscaled, so that nothing underflows on the way.
        Differentiable again by default. Entries that are not reached are an error, as in torch.
        """
        self._check_open()
        scale = self._losses[self._losses.named(name)]
        wanted = (inputs,) if isinstance(inputs, Tensor) else tuple(inputs)
        scaled = scale.scale(outputs)
        raw = torch.autograd.grad(scaled, wanted, torch.ones_like(scaled), create_graph=create_graph)
        inverse = scale.inverse(outputs.device)
        return tuple(g.float() if inverse is None else g.float() * inverse.to(g.device) for g in raw)

    @contextmanager
    def no_sync(self, *wrapped: nn.Module) -> Iterator[None]:
        """Inside, DistributedDataParallel and FSDP2 models do not exchange gradients: for micro-batches but the last.

        `wrapped`: DistributedDataParallel models made after `prepare`, which the session does not know.
        """
        with ExitStack() as stack:
            for model in (*self._models.values(), *map(unwrap, wrapped)):
                if isinstance(model, nn.parallel.DistributedDataParallel):
                    stack.enter_context(model.no_sync())
                for part in sharded_parts(model):
                    part.set_requires_gradient_sync(False, recurse=False)
                    stack.callback(part.set_requires_gradient_sync, True, recurse=False)
            yield

    # -- between backward and step

    @uncompiled
    def unscale_(self, optimizer: Optimizer | None = None) -> None:
        """Make the gradients true: unscaled, float32 for parameters with masters. Once is enough; idempotent.

        Until `step`, parameters with masters hold their masters, so that `.grad` has the dtype of the parameter.
        """
        self._check_open()
        for each in selected(self._optimizers, optimizer):
            self._look(each)
            self._book.make_true(each)

    @uncompiled
    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0, *, optimizer: Optimizer | None = None) -> Tensor:
        """Shrink the true gradients so that their common norm is at most `max_norm`.

        Over the parameters of all optimizers, which then step or skip together; or of one. Returns the norm before,
        0-d float32, not finite when the step will be skipped. Nothing waits for the device. Gradients that `unscale_`
        has not made true stay as they are until `step`, which shrinks them as it unscales them.
        """
        self._check_open()
        chosen = selected(self._optimizers, optimizer)
        for each in chosen:
            self._look(each)
            self._book.norm(each)  # what the report tells is the norm before clipping
        norms = [self._book.norm_now(each, norm_type) for each in chosen]
        norm: Tensor = norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms), norm_type)
        coefficient = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        self._book.clip(chosen, coefficient)
        return norm

    @uncompiled
    def clip_grad_value_(self, clip_value: float, *, optimizer: Optimizer | None = None) -> None:
        """Clamp every entry of the true gradients to [-clip_value, clip_value]."""
        self._check_open()
        self.unscale_(optimizer)
        for each in selected(self._optimizers, optimizer):
            self._book.norm(each)
            clip_values_(gradients_of(each), float(clip_value))

    # -- step

    @uncompiled
    def step(self, optimizer: Optimizer | None = None) -> StepReport:
        """Step all optimizers, or one, each unless its gradients are not finite; then let the scales learn.

        Those that were clipped by a common norm skip together, since it is not finite if one of them is not.
        With several optimizers stepped one by one, a scale learns once, at the next backward of its loss. Raises
        `SessionError` when no `session.backward` came before (but not with `prepare(..., group=...)`, where gradients
        may come from the loss of another stage), and `ScaleCollapse` when a scale skips without end.
        """
        self._check_open()
        chosen = selected(self._optimizers, optimizer)
        if self.is_stage and not self._losses.apart:
            if not self._attempts:
                self._check_scaled_somewhere()
            for name in () if self._round.names else self._losses:
                self._round.ran(name)  # and was scaled where it was computed
        if not self._round.names:
            raise SessionError(
                "step() without session.backward(): gradients made by loss.backward() are not scaled, and would vanish "
                "when they are unscaled. Write session.backward(loss)"
            )
        device = self._device()
        scales = [self._losses[name].current(device) for name in self._round.names]
        # of several not: a hook around the step of one may change the gradients of another after they were copied
        readings = [self._look(each, steps_next=len(chosen) == 1) for each in chosen]
        norm, scaled = self._norm(chosen)
        parameters = list(itertools.chain.from_iterable(self._book.parameters(each) for each in chosen))
        known: list[bool | None] = []
        try:
            for each, reading in zip(chosen, readings, strict=True):
                known.append(self._step_one(each, reading.found))
        finally:
            torch.clear_autocast_cache()  # of a region that is open still: casts of weights as they were
            for each in chosen:
                self._book.forget(each)
            self._reshard()  # what an evaluation since backward has gathered is out of date
        if self._masters.rounded is not None:
            self._tell_rounded()
        read = functools.reduce(Reading.merged, readings)
        names = functools.partial(names_of, parameters, self._named)
        report = StepReport(self._attempts, read.found, scales[0], norm, read.nonfinite, names, scaled)
        self._attempts += 1
        skipped = any(k for k in known if k) if None not in known else None
        if skipped is not None:
            self._skips += skipped
        elif self._device_skips is None:
            self._device_skips = read.found.clone()
        else:
            self._device_skips.add_(read.found)  # in place, for a captured step to count too
        self.last_step = report
        self._round.stepped(chosen, read, skipped)
        if optimizer is None or len(self._optimizers) == 1:
            self._settle(None)
        return report

    def capture(self, function: Callable[..., Any], *, warmup: int = 3) -> CapturedStep:
        """`function`, a whole training step on tensors, as a CUDA graph: it pays where kernels are short.

        The first `warmup` calls run as written, the next is captured, later ones replay it. One call more runs as
        written where the last one was unlike it: it made states, or had other hyper-parameters. Arguments keep their
        shapes; learning rates are tensors until `close`, which schedulers write into; results are copies. Any optimizer
        that does not need the host will do: fused, capturable, of preamp.optim, or `skip="device"`. Warns and changes
        nothing elsewhere than on CUDA. Raises `SessionError` when the parameters lie on several GPUs.

        >>> step = session.capture(train_step)
        >>> for x, y in loader:
        ...     loss = step(x, y)
        """
        self._check_open()
        return CapturedStep(self, function, warmup)

    def _replayed(self, steps: int) -> None:
        """The host's part of steps that a graph takes."""
        self._attempts += steps
        self._losses.replayed(steps, lambda: None)

    def _after_replay(self) -> None:
        if self.last_step is not None:
            self.last_step = self.last_step.after_replay(self._attempts - 1)

    @uncompiled
    def zero_grad(self, set_to_none: bool = True, *, optimizer: Optimizer | None = None) -> None:
        """Clear the gradients of all optimizers (and of the models' other parameters), or of one optimizer."""
        self._check_open()
        for each in selected(self._optimizers, optimizer):
            self._book.forget(each)
            self._round.void(each)
            each.zero_grad(set_to_none)
        if optimizer is None:
            self._round.forget_backward()
            for model in self._models.values():
                model.zero_grad(set_to_none)

    # -- inside

    def _begin_backward(self, loss: Tensor, name: str | None) -> str:
        """Checks before a backward pass, and what the loss's scale still has to learn; returns the loss's name."""
        self._check_open()
        check_loss(loss)
        name = self._losses.named(name)
        self._rest()
        self._settle(name)
        self._scale_earlier(name)
        return name

    def _look(self, optimizer: Optimizer, steps_next: bool = False) -> Reading:
        inverse = None
        if not self._losses.apart and not self._book.has_read(optimizer):
            names = self._round.names or list(self._losses)
            inverse = self._losses[names[0]].inverse(self._device())
        statistics = self._losses.need_statistics and not self._losses.apart
        return self._book.look(optimizer, inverse, statistics, steps_next)

    def _norm(self, chosen: Sequence[Optimizer]) -> tuple[Tensor, bool]:
        """The norm of all gradients before clipping, and whether it is one of scaled gradients."""
        if len(chosen) == 1:
            return self._book.norm_read(chosen[0])
        return torch.linalg.vector_norm(torch.stack([self._book.norm(each) for each in chosen])), False

    def _step_one(self, optimizer: Optimizer, found: Tensor) -> bool | None:
        self._stepping = optimizer
        try:
            with framework_hooks(self._given.get(optimizer)):
                skipped = step_unless(found, optimizer, self._book, self._losses.apart, self._skip)
            tell_skipped(self._given.get(optimizer), lambda: found > 0 if skipped is None else skipped)
            return skipped
        finally:
            self._stepping = None
