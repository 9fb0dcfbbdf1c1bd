"""preamp in Lightning's Trainer: a precision plugin, which Fabric takes too."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from ..errors import SessionError
from ..frameworks import replaced, unwrapped
from ..ledger import gradients_of
from . import fabric

if not fabric.IS_APART:
    from lightning.pytorch import callbacks
    from lightning.pytorch.plugins.precision import Precision
    from lightning.pytorch.trainer.states import TrainerFn
    from lightning.pytorch.utilities.model_helpers import is_overridden
else:
    from pytorch_lightning import callbacks
    from pytorch_lightning.plugins.precision import Precision
    from pytorch_lightning.trainer.states import TrainerFn
    from pytorch_lightning.utilities.model_helpers import is_overridden


class PreampPrecision(fabric.PreampPrecision, Precision):
    """Trains a `Trainer`'s model under a session: `Trainer(plugins=[PreampPrecision("O4")])`.

    Automatic and manual optimization, accumulation, clipping, and strategies for one device, DistributedDataParallel
    and FSDP2 work as they are. Checkpoints have float32 weights and the session's state: runs resume bit for bit.
    Validation, test and prediction run in the level's precision during `fit`, and in float32 outside it.

    Args:
        level: "O0" to "O5" or "auto".
        log: Whether `loss_scale` and `skipped_steps` are logged, at the Trainer's interval.
        **options: For `preamp.prepare`.
    """

    def __init__(self, level: str = "auto", *, log: bool = True, **options: Any) -> None:
        super().__init__(level, **options)
        self._log, self._in_trainer, self._ran = log, False, False
        self._module: Any = None

    def connect(self, model: nn.Module, optimizers: list[Optimizer], lr_schedulers: list[Any]) -> Any:
        """Make a session of the model and its optimizers; none where the Trainer does not fit.

        After a fit the strategy still has that one's optimizers, and gives them to what evaluates.
        """
        self.teardown()
        self._in_trainer = True
        module: Any = unwrapped(model)
        if any(each.param_groups for each in optimizers) and module.trainer.state.fn == TrainerFn.FITTING:
            self._begin(model, list(optimizers))
        return model, optimizers, lr_schedulers

    # -- a step

    def pre_backward(self, tensor: Tensor, module: Any) -> Any:
        """Scale the loss, after the hooks that see it unscaled."""
        if not self._in_trainer:
            return None
        loss = Precision.pre_backward(self, tensor, module)
        if self._session is None:  # the module has no optimizer
            return loss
        if self._module is not module:
            self._attend(module)
        self._ran = True
        return self._session.scale(loss)

    def backward(self, tensor: Tensor, model: Any, *args: Any, **kwargs: Any) -> None:
        """Call the module's own `backward`."""
        if self._in_trainer:
            Precision.backward(self, tensor, model, *args, **kwargs)
        else:
            super().backward(tensor, model, *args, **kwargs)

    def post_backward(self, tensor: Tensor, module: Any) -> Any:
        """Call the hooks after the backward pass."""
        return Precision.post_backward(self, tensor, module) if self._in_trainer else None

    def optimizer_step(  # a Fabric gives no model
        self, optimizer: Any, closure: Callable[[], Any] | None = None, *, model: Any = None, **kwargs: Any
    ) -> Any:
        """Run backward, hooks, clipping, and the session's step."""
        if closure is None or self._session is None or not self._in_trainer:
            return super().optimizer_step(optimizer, closure, **kwargs)
        if kwargs:
            raise SessionError(f"step() got {', '.join(kwargs)}: a session steps an optimizer without arguments")
        result = closure()
        if _reads_gradients(model):
            self._session.unscale_(optimizer)
        self._after_closure(model, optimizer)
        if not self._ran and (model.automatic_optimization or not gradients_of(optimizer)):
            return result  # training_step returned None, or gradients were cleared: there is nothing to step
        report, self._ran = self.session.step(optimizer), False
        interval = model.trainer.log_every_n_steps
        if self._log and interval and model.trainer.training and (report.index + 1) % interval == 0:
            logs = {name: float(value) for name, value in self._logs().items()}
            model.log_dict(logs, batch_size=1)  # which Lightning asks for where a step fetches batches by itself
        return result

    def clip_grad_by_norm(self, optimizer: Any, clip_val: float) -> None:
        """Shrink true gradients so that their norm is at most `clip_val`."""
        if gradients_of(optimizer):  # training_step may have returned None
            self.session.clip_grad_norm_(clip_val, optimizer=optimizer)

    def clip_grad_by_value(self, optimizer: Any, clip_val: float) -> None:
        """Clamp true gradients."""
        if gradients_of(optimizer):
            self.session.clip_grad_value_(clip_val, optimizer=optimizer)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the session's state; hooks of the fit that goes on may exchange masters before the first batch."""
        super().load_state_dict(state_dict)
        if self._in_trainer and self._session is not None:
            self._attend(unwrapped(self._session.models[""]))

    def _attend(self, module: Any) -> None:
        """Have the module's schedules stand still after a skipped step, and averages of weights see masters."""
        self._module = module
        self.session._steps.follow(module.trainer.strategy._lightning_optimizers)

        def with_masters(hook: Any, *args: Any, **kwargs: Any) -> None:
            with self._in_float32():
                hook(*args, **kwargs)

        self._undo.enter_context(replaced(module, "lr_scheduler_step", _UnlessSkipped(self, module)))
        if self.session.policy.masters:
            for callback in module.trainer.callbacks:
                for name in _AVERAGING if isinstance(callback, _AVERAGES) else ():
                    run = partial(with_masters, getattr(callback, name))
                    self._undo.enter_context(replaced(callback, name, run))

    def teardown(self) -> None:
        """Close the session: the model is float32 again. Checkpoints that are saved later still have its state."""
        self.close()
        self._module, self._ran = None, False

    @contextmanager
    def module_init_context(self) -> Iterator[None]:
        """Make modules in float32; `connect` brings them under the level."""
        yield


class _UnlessSkipped:
    """A module's `lr_scheduler_step`, which does nothing after a skipped step.

    A copy or a pickle of the module has the method itself: what the plugin adds ends with the fit, and is not in them.
    """

    def __init__(self, plugin: PreampPrecision, module: Any) -> None:
        self._plugin, self._module, self._step = plugin, module, module.lr_scheduler_step

    def __call__(self, *args: Any) -> None:
        session = self._plugin._session
        report = None if session is None else session.last_step
        if report is None or not report.skipped:
            self._step(*args)

    def __reduce__(self) -> Any:
        return getattr, (self._module, "lr_scheduler_step")  # of the copy, which has no attribute of that name yet


_AVERAGES = tuple(
    getattr(callbacks, name) for name in ("WeightAveraging", "StochasticWeightAveraging") if hasattr(callbacks, name)
)
"""Callbacks that average weights, and write them into the model."""

_AVERAGING = (
    "on_train_epoch_start", "on_train_batch_end", "on_train_epoch_end", "on_train_end", "on_validation_epoch_start",
    "on_validation_epoch_end",
)  # fmt: skip
"""Their hooks that do."""


def _reads_gradients(model: Any) -> bool:
    """Whether a hook of the module or of a callback sees gradients before the step, so that they have to be true.

    A module may also clip them by itself.
    """
    hook = "on_before_optimizer_step"
    own = is_overridden(hook, model) or is_overridden("configure_gradient_clipping", model)
    return own or any(is_overridden(hook, each) for each in model.trainer.callbacks)
