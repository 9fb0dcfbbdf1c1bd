"""`Session`: a training run under a policy. The only place where the mechanisms meet, in the order of a step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..autocast import REGISTRY, autocast
from ..errors import SessionError
from ..gradients import clip_values_, global_norm, multiply_
from ..masters import Masters
from ..modules import Conversion, unwrapped
from ..policy import Policy
from ._checks import STATE_VERSION, check_loss, check_no_sync, check_state, selected
from ._gradients import GradientBook, gradients_of, parameters_of, state_like_parameters
from ._losses import Losses
from ._precision import in_float32
from ._report import StepReport
from ._round import Round


class Session:
    """Made by `preamp.prepare`. Owns what mixed precision adds to a training loop: regions, scales, masters, skips.

    A context manager: leaving it, or `close()`, gives model, optimizer and torch back as they were, with the values
    that training gave them.
    """

    def __init__(
        self,
        models: Mapping[str, nn.Module],
        optimizers: Mapping[str, Optimizer],
        policy: Policy,
        losses: Losses,
        masters: Masters,
        conversions: Sequence[Conversion],
        device_type: str,
    ) -> None:
        self.policy = policy
        """The policy in force."""
        self.device_type = device_type
        self._models, self._optimizers = dict(models), dict(optimizers)
        self._losses, self._masters, self._conversions = losses, masters, list(conversions)
        self._book = GradientBook(masters)
        self._round = Round(losses, self._book, list(self._optimizers.values()))
        self._attempts = 0
        self._skips: Tensor | int = 0
        self._closed = False
        self.last_step: StepReport | None = None
        """The report of the last `step`."""
        if policy.has_regions:
            assert policy.ops is not None
            REGISTRY.hold(policy.ops, device_type)
        self._handles = [
            handle
            for optimizer in self._optimizers.values()
            for handle in (
                optimizer.register_load_state_dict_pre_hook(self._before_optimizer_load),
                optimizer.register_load_state_dict_post_hook(self._after_optimizer_load),
            )
        ]

    # -- forward

    def autocast(self, enabled: bool = True) -> autocast:
        """A new region for the forward pass and the loss, as the policy has it; also a decorator."""
        self._check_open()
        if self._book.any_true() and not self._round.running:
            self._forget_all()
        active = enabled and self.policy.has_regions
        return autocast(self.device_type, self.policy.compute if active else None, active)

    @contextmanager
    def full_precision(self) -> Iterator[None]:
        """Inside, the model runs in float32, with its master weights: for validation, or an export.

        Between steps only: gradients of low parameters are put aside while it lasts. Not in compiled code.
        """
        self._check_open()
        if self._book.any_true():
            raise SessionError("full_precision() between unscale_() or clipping and step(): call step() first")
        with in_float32(self._models.values(), self._masters, self._conversions, self.device_type):
            yield

    # -- backward

    def scale(self, loss: Tensor, name: str | None = None) -> Tensor:
        """`loss` times its scale, where `backward` cannot be called: `session.scale(loss).backward()`.

        Not for losses with scales of their own, whose gradients have to be unscaled as their backward ends.
        """
        name = self._begin_backward(loss, name)
        if self._losses.apart:
            raise SessionError(f"the loss {name!r} has a scale of its own: write session.backward(loss, name={name!r})")
        self._round.ran(name)
        return self._losses[name].scale(loss)

    def backward(self, loss: Tensor, *, name: str | None = None, sync: bool = True, **kwargs: Any) -> None:
        """Gradients of `loss`, protected by its scale. Call it once a micro-batch; gradients add up until `step`.

        `loss`: a 0-d floating tensor. `name`: which of the session's losses it is. `sync=False`: more micro-batches
        follow before the step; under DistributedDataParallel the forward pass must have run inside
        `session.no_sync()`, which is checked. `kwargs` go to `Tensor.backward` (`retain_graph`, `inputs`).
        """
        name = self._begin_backward(loss, name)
        if not sync:
            check_no_sync(self._models.values())
        scale = self._losses[name]
        scaled = scale.scale(loss)
        if not self._losses.apart:
            scaled.backward(**kwargs)
        else:
            self._round.void_zeroed()
            found = self._book.backward_apart(
                lambda: scaled.backward(**kwargs), scale.inverse(loss.device), self._optimizers.values()
            )
            self._round.record(name, found)
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
        return tuple(g.float() if inverse is None else g.float() * inverse for g in raw)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Inside, DistributedDataParallel models do not exchange gradients: for all micro-batches but the last."""
        with ExitStack() as stack:
            for model in self._models.values():
                if isinstance(model, nn.parallel.DistributedDataParallel):
                    stack.enter_context(model.no_sync())
            yield

    # -- between backward and step

    def unscale_(self, optimizer: Optimizer | None = None) -> None:
        """Make the gradients true: unscaled, float32 for parameters with masters. Once is enough; idempotent.

        Until `step`, parameters with masters hold their masters, so that `.grad` has the dtype of the parameter.
        """
        self._check_open()
        for each in selected(self._optimizers, optimizer):
            self._make_true(each)

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0, *, optimizer: Optimizer | None = None) -> Tensor:
        """Shrink the true gradients so that their common norm is at most `max_norm`.

        Over the parameters of all optimizers, or of one. Returns the norm before, 0-d float32, not finite when the
        step will be skipped. Nothing waits for the device.
        """
        self._check_open()
        chosen = selected(self._optimizers, optimizer)
        self.unscale_(optimizer)
        gradients = [g for each in chosen for g in gradients_of(each)]
        for each in chosen:
            self._book.norm(each)  # what the report tells is the norm before clipping
        norm = self._norm(chosen) if norm_type == 2.0 else global_norm(gradients, norm_type)
        multiply_(gradients, (max_norm / (norm + 1e-6)).clamp(max=1.0))
        return norm

    def clip_grad_value_(self, clip_value: float, *, optimizer: Optimizer | None = None) -> None:
        """Clamp every entry of the true gradients to [-clip_value, clip_value]."""
        self._check_open()
        self.unscale_(optimizer)
        for each in selected(self._optimizers, optimizer):
            self._book.norm(each)
            clip_values_(gradients_of(each), float(clip_value))

    # -- step

    def step(self, optimizer: Optimizer | None = None) -> StepReport:
        """Step all optimizers, or one, each unless its gradients are not finite; then let the scales learn.

        With several optimizers stepped one by one, a scale learns once, at the next backward of its loss. Raises
        `SessionError` when no `session.backward` came before, and `ScaleCollapse` when a scale skips without end.
        """
        self._check_open()
        chosen = selected(self._optimizers, optimizer)
        if not self._round.names:
            raise SessionError(
                "step() without session.backward(): gradients made by loss.backward() are not scaled, and would vanish "
                "when they are unscaled. Write session.backward(loss)"
            )
        device = self._device()
        scales = [self._losses[name].current(device) for name in self._round.names]
        for each in chosen:
            self._make_true(each)
        found = [self._book.found(each).to(device) for each in chosen]
        norm = self._norm(chosen)
        known: list[bool | None] = []
        try:
            for each, flag in zip(chosen, found, strict=True):
                known.append(self._step_one(each, flag))
        finally:
            for each in chosen:
                self._book.forget(each)
        any_found = torch.stack(found).amax()
        report = StepReport(self._attempts, any_found, scales[0], norm)
        self._attempts += 1
        skipped = any(k for k in known if k) if None not in known else None
        self._skips = self._skips + (any_found if skipped is None else int(skipped))
        self.last_step = report
        self._round.stepped(chosen, any_found, skipped)
        if optimizer is None or len(self._optimizers) == 1:
            self._settle(None)
        return report

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

    @property
    def models(self) -> dict[str, nn.Module]:
        """The session's models by name; a single one has the name ""."""
        return dict(self._models)

    @property
    def optimizers(self) -> dict[str, Optimizer]:
        """The session's optimizers by name; a single one has the name ""."""
        return dict(self._optimizers)

    @property
    def steps(self) -> int:
        """Attempts at a step so far, skipped ones included."""
        return self._attempts

    @property
    def skipped(self) -> int:
        """Skipped steps so far; waits for the device."""
        return int(self._skips)

    def loss_scale(self, name: str | None = None) -> float:
        """The present scale of a loss; waits for the device."""
        name = self._losses.named(name)
        self._settle(name)
        return float(self._losses[name].current(self._device()))

    # -- state

    def state_dict(self) -> dict[str, Any]:
        """All that preamp adds to a training run: scales, masters, counters. Save it beside model and optimizer.

        Tensors, numbers and strings only, so `torch.load(weights_only=True)` reads it. The tensors are the live ones,
        as in torch's own state dicts: clone them to keep a moment.
        """
        self._check_open()
        self._settle(None)
        return {
            "version": STATE_VERSION,
            "policy": str(self.policy),
            "losses": self._losses.state_dict(),
            "masters": dict(self._masters.named()),
            "steps": self._attempts,
            "skipped": self.skipped,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` gave; before or after the model's and the optimizer's own state, as you like.

        Strict: another version, policy, set of losses or of masters is a `StateError`, and nothing has changed.
        """
        self._check_open()
        check_state(state, str(self.policy))
        self._losses.check(state["losses"])
        self._forget_all()
        self._masters.load(state["masters"])
        self._losses.load_state_dict(state["losses"])
        self._attempts, self._skips = int(state["steps"]), int(state["skipped"])
        self._round.clear()

    def close(self) -> None:
        """Give model, optimizer and torch back as they were; the second call does nothing."""
        if self._closed:
            return
        self._closed = True
        self._forget_all()
        for handle in self._handles:
            handle.remove()
        for conversion in self._conversions:
            conversion.undo()
        self._masters.restore()
        for each in self._optimizers.values():
            state_like_parameters(each)
        if self.policy.has_regions:
            REGISTRY.release()

    def __enter__(self) -> Session:
        self._check_open()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        level = self.policy.level
        state = "closed" if self._closed else f"{self._attempts} steps"
        return f"Session({level or 'custom'} on {self.device_type}, {state}: {self.policy})"

    # -- inside

    def _begin_backward(self, loss: Tensor, name: str | None) -> str:
        """Checks before a backward pass, and what the loss's scale still has to learn; returns the loss's name."""
        self._check_open()
        check_loss(loss)
        name = self._losses.named(name)
        waiting = [o for o in self._optimizers.values() if self._book.is_true(o)]
        if any(gradients_of(o) for o in waiting):
            raise SessionError(
                "backward() after unscale_() or clipping and before step(): true and scaled gradients would add. "
                "Accumulate first, then unscale or clip once, then step; or throw the gradients away: zero_grad()"
            )
        if waiting:
            self._forget_all()
        self._settle(name)
        return name

    def _check_open(self) -> None:
        if self._closed:
            raise SessionError("this session is closed; prepare the model again to go on")

    def _device(self) -> torch.device:
        for each in self._optimizers.values():
            for parameter in parameters_of(each):
                return parameter.device
        return torch.device(self.device_type)

    def _make_true(self, optimizer: Optimizer) -> None:
        inverse = None
        if not self._losses.apart and not self._book.is_true(optimizer):
            names = self._round.names or list(self._losses)
            inverse = self._losses[names[0]].inverse(self._device())
        self._book.make_true(optimizer, inverse)

    def _norm(self, chosen: Iterable[Optimizer]) -> Tensor:
        device = self._device()
        norm: Tensor = torch.linalg.vector_norm(torch.stack([self._book.norm(each).to(device) for each in chosen]))
        return norm

    def _step_one(self, optimizer: Optimizer, found: Tensor) -> bool | None:
        """Step unless `found`; returns whether it skipped, or None when only the device knows."""
        if getattr(optimizer, "_step_supports_amp_scaling", False):
            optimizer.grad_scale, optimizer.found_inf = None, found  # type: ignore[attr-defined]
            try:
                optimizer.step()
            finally:
                del optimizer.grad_scale, optimizer.found_inf  # type: ignore[attr-defined]
            return bool(found) if found.device.type == "cpu" else None
        skipped = bool(found)
        if not skipped:
            optimizer.step()
        return skipped

    def _settle(self, name: str | None) -> None:
        self._round.settle(name, self._first_nonfinite)

    def _forget_all(self) -> None:
        for each in self._optimizers.values():
            self._book.forget(each)

    def _first_nonfinite(self) -> str | None:
        for prefix, model in self._models.items():
            for path, parameter in unwrapped(model).named_parameters():
                if parameter.grad is not None and not bool(parameter.grad.isfinite().all()):
                    return f"{prefix}:{path}" if prefix else path
        return None

    def _before_optimizer_load(self, optimizer: Optimizer, state: Any) -> None:
        """Torch casts loaded state to the parameters' dtype: let it find float32 masters, not 16-bit parameters."""
        self._masters.refresh(parameters_of(optimizer))
        self._masters.swap_in(parameters_of(optimizer))

    def _after_optimizer_load(self, optimizer: Optimizer) -> None:
        self._masters.swap_out(parameters_of(optimizer))
