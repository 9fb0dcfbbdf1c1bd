"""preamp in HF Accelerate: `attach` before `accelerator.prepare`, and its loops train under a session."""

from __future__ import annotations

import functools
from contextlib import ExitStack
from types import MethodType
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import DistributedType
from torch import nn
from torch.optim import Optimizer

from ..errors import SessionError, kind_of
from ..frameworks import replaced, unwrap
from ..session import Session, SessionScaler, StepReport
from ..tree import cast_floating
from ._host import Host

_REFUSED = (DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM, DistributedType.XLA)


class Attachment(Host):
    """What `attach` returns; `session` is there once the accelerator has prepared a model and an optimizer."""

    _not_yet = "accelerator.prepare(model, optimizer, ...) makes it, or trainer.train(), and closes it when it ends"

    def __init__(self, accelerator: Accelerator, session: Session | None, options: dict[str, Any]) -> None:
        super().__init__(options)
        self._undo = ExitStack()
        self._optimizers: list[AcceleratedOptimizer] = []
        self.follow(accelerator)
        if session is not None:
            self._session, accelerator.scaler = session, _Scaler(session, self)

    def follow(self, accelerator: Accelerator) -> None:
        """Take part in an accelerator's loop: that of another one than before, if a framework makes a new one."""
        self.close()
        self._accelerator, self._prepare, self._free = accelerator, accelerator.prepare, accelerator.free_memory
        self._save_state, accelerator.save_state = accelerator.save_state, self._saved
        accelerator.prepare, accelerator.autocast = self._prepared, self._autocast
        accelerator.unscale_gradients, accelerator.free_memory = self._unscale, self._freed
        self._prepare_optimizer, accelerator.prepare_optimizer = accelerator.prepare_optimizer, self._held

    def close(self) -> None:
        """Close the session, which restores model and optimizer: the accelerator's loop goes on without one.

        If `attach` was given a level, the next `accelerator.prepare` makes a new session. Checkpoints that are saved
        later still have this one's state.
        """
        if self._session is None:
            return
        self._undo.close()
        for optimizer in self._optimizers:
            optimizer.__class__, optimizer.scaler, optimizer._is_overflow = AcceleratedOptimizer, None, False
        self._optimizers, self._accelerator.scaler = [], None
        super().close()

    def _prepared(self, *args: Any, **kwargs: Any) -> Any:
        """`accelerator.prepare`, then the session, and both as the accelerator's loop uses them."""
        accelerator = self._accelerator
        results = self._prepare(*args, **kwargs)
        optimizers = list(accelerator._optimizers)
        models = [model for model in accelerator._models if any(p.requires_grad for p in model.parameters())]
        began = any(isinstance(each, Optimizer) for each in args)  # not of a loader, for an evaluation after training
        waiting = any(isinstance(each, _SessionOptimizer) for each in optimizers)  # for its model
        if self._session is None and (began or waiting) and self._options:
            if not models:
                self._hold(optimizers)
                return results
            accelerator.scaler = _Scaler(self._begin(models, optimizers), self)
        if self._session is None:
            return results
        own = list(self._session.optimizers.values())
        if any(all(unwrap(optimizer) is not each for each in own) for optimizer in optimizers):
            raise SessionError(
                "accelerator.prepare() was given an optimizer that is not the session's, which would step without loss "
                "scale and masters: give all models and optimizers to one call of accelerator.prepare()"
            )
        self._hold(optimizers)
        for model in models:
            if self._session.policy.has_regions and "_original_forward" not in vars(model):
                self._enter_region(model, self._session)
        return results

    def _held(self, *args: Any, **kwargs: Any) -> Any:
        """`accelerator.prepare_optimizer`, also when a loop calls it by itself, without a model: nothing steps then."""
        optimizer = self._prepare_optimizer(*args, **kwargs)
        if self._session is not None or self._options:
            self._hold([*self._optimizers, optimizer])
        return optimizer

    def _hold(self, optimizers: list[AcceleratedOptimizer]) -> None:
        for optimizer in optimizers:
            optimizer.__class__, optimizer.scaler = _SessionOptimizer, self._accelerator.scaler
        self._optimizers = optimizers

    def _freed(self, *args: Any) -> Any:
        """`accelerator.free_memory`, before which the session lets go of the model and the optimizer."""
        self.close()
        return self._free(*args)

    def _saved(self, *args: Any, **kwargs: Any) -> Any:
        """`accelerator.save_state`: float32 weights, and the session's state in the place of a scaler's."""
        scaler = self._accelerator.scaler
        if self._last:  # it is closed
            self._accelerator.scaler = self
        try:
            with self._in_float32():
                return self._save_state(*args, **kwargs)
        finally:
            self._accelerator.scaler = scaler

    def _enter_region(self, model: nn.Module, session: Session) -> None:
        """Run a model's forward in the session's region, with float32 outputs: as Accelerate does for its own."""
        forward: Any = model.forward
        function = getattr(forward, "__func__", forward)

        @functools.wraps(function)
        def in_region(*args: Any, **kwargs: Any) -> Any:
            if self._session is not session:  # it is closed, and this is a copy of the model: an average, say
                return function(*args, **kwargs)
            with session.autocast():
                return cast_floating(function(*args, **kwargs), torch.float32)

        wrapped = in_region if function is forward else MethodType(in_region, model)
        self._undo.enter_context(replaced(model, "forward", wrapped))
        self._undo.enter_context(replaced(model, "_original_forward", forward))  # which unwrap_model looks for

    def _unscale(self, optimizer: Any = None) -> None:
        """True gradients, which the accelerator's clipping reads and changes: of all optimizers, or of some."""
        for each in optimizer if isinstance(optimizer, (list, tuple)) else [optimizer]:
            if self._session is not None:
                self._session.unscale_(each)


def attach(accelerator: Accelerator, session: Session | str = "auto", **options: Any) -> Attachment:
    """Have an accelerator's loop train under a session. Call it before `accelerator.prepare`.

    The loop stays as it is; `save_state` and `load_state` carry the session, and schedulers stand still by
    `step_was_skipped`.

    Args:
        accelerator: One that has prepared nothing yet.
        session: A level ("O0" to "O5", "auto"), for a session that `accelerator.prepare` makes of its models and
            optimizers; or a session of yours, made of the same model and optimizer.
        **options: For `preamp.prepare`, with a level.

    Raises:
        SessionError: For an accelerator with a `mixed_precision`, and for DeepSpeed, Megatron and XLA.

    >>> accelerator = Accelerator()
    >>> attach(accelerator, "O4")
    >>> model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    """
    if not isinstance(accelerator, Accelerator):
        raise SessionError(f"attach() takes an Accelerator; this is {kind_of(accelerator)}")
    if accelerator.mixed_precision != "no":
        raise SessionError(
            f"Accelerator(mixed_precision={accelerator.mixed_precision!r}) casts by itself, and the level says what is "
            "16-bit: leave mixed_precision out (also in `accelerate config` and ACCELERATE_MIXED_PRECISION)"
        )
    if accelerator.distributed_type in _REFUSED:
        raise SessionError(
            f"{accelerator.distributed_type.value} has its own optimizer step and precision, which a session cannot "
            "take part in: use DistributedDataParallel or FSDP2"
        )
    # which is a method of the attachment from the first call on
    if isinstance(getattr(accelerator.prepare, "__self__", None), Attachment):
        raise SessionError("attach() a second time: once will do, before accelerator.prepare() or trainer.train()")
    if accelerator._models or accelerator._optimizers:
        raise SessionError("attach() came after accelerator.prepare(), which has wrapped the model: call it before")
    if isinstance(session, Session):
        if options:
            raise SessionError(f"attach() got a session, and options for a new one: {', '.join(options)}")
        if accelerator.is_fsdp2:
            raise SessionError(
                "accelerator.prepare() shards the model, so that a session made before has none of its parameters: "
                "give attach() a level"
            )
        return Attachment(accelerator, session, {})
    return Attachment(accelerator, None, {"level": session, **options})


class _Scaler(SessionScaler):
    """The session as the accelerator's scaler, whose state has no masters: they are the weights that are saved."""

    def __init__(self, session: Session, host: Host) -> None:
        super().__init__(session)
        self.state_dict, self.load_state_dict = host.state_dict, host.load_state_dict  # type: ignore[method-assign]


class _SessionOptimizer(AcceleratedOptimizer):
    """Accelerate's optimizer, which a session steps."""

    _is_overflow: bool | StepReport

    def step(self, closure: Any = None) -> None:
        """Step when the accumulation of gradients is complete. Without gradients there is nothing to step."""
        if not self.gradient_state.sync_gradients:
            return
        if closure is None and all(p.grad is None for group in self.param_groups for p in group["params"]):
            self._is_overflow = False
            return
        if self.scaler is None:
            raise SessionError(
                "this optimizer has no session, because accelerator.prepare() was given no model that trains: give "
                "model and optimizer to one call of accelerator.prepare()"
            )
        self.scaler.step(self.optimizer, closure)
        self._is_overflow = self.scaler.session.last_step

    @property
    def step_was_skipped(self) -> bool:
        """Whether the last step was skipped, also of an optimizer that is fused; a host sync."""
        return self._is_overflow.skipped if isinstance(self._is_overflow, StepReport) else self._is_overflow
