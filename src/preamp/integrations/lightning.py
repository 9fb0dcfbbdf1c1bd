"""preamp in Lightning's Trainer: a precision plugin."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

try:
    from lightning.pytorch.plugins.precision import Precision
    from lightning.pytorch.utilities.model_helpers import is_overridden
except ImportError:  # the same code, in a package of its own
    from pytorch_lightning.plugins.precision import Precision  # type: ignore[assignment]
    from pytorch_lightning.utilities.model_helpers import is_overridden

from ..errors import SessionError
from ..session import Session, prepare
from ..tree import cast_floating


class PreampPrecision(Precision):
    """Trains a `Trainer`'s model under a session: `Trainer(plugins=[PreampPrecision("O5")])`.

    `level`: "O0" to "O5" or "auto". `options` go to `preamp.prepare`. `log=False`: `loss_scale` and `skipped_steps` are
    not logged; else they are, at the Trainer's interval. Automatic and manual optimization, the Trainer's accumulation
    and clipping, and its strategies for one device and DistributedDataParallel work as they are. Schedules stand still
    after a skipped step. Checkpoints have float32 weights, and the session's state, with which a run resumes bit for
    bit. Validation, test and prediction run in the level's precision during `fit`, and in float32 outside it.
    """

    def __init__(self, level: str = "auto", *, log: bool = True, **options: Any) -> None:
        self.precision = f"preamp-{level}"  # type: ignore[assignment]  # what the Trainer shows
        self._level, self._log, self._options = level, log, options
        self._session: Session | None = None
        self._held: Any = None

    @property
    def session(self) -> Session:
        """The session of the fit that runs; `SessionError` outside of one."""
        if self._session is None:
            raise SessionError("there is no session outside of Trainer.fit")
        return self._session

    def connect(self, model: nn.Module, optimizers: list[Optimizer], lr_schedulers: list[Any]) -> Any:
        """A session of the model and its optimizers; none where the Trainer does not fit."""
        self.teardown()
        if optimizers:
            self._session = prepare(model, list(optimizers), level=self._level, **self._options)
        return model, optimizers, lr_schedulers

    # -- a step

    def forward_context(self) -> AbstractContextManager[Any]:
        """The session's region."""
        return nullcontext() if self._session is None else self._session.autocast()

    def convert_input(self, data: Any) -> Any:
        """A batch, cast where there are no regions: a step calls layers of the module that have 16-bit weights."""
        if self._session is None or self._session.policy.has_regions:
            return data
        return cast_floating(data, self._session.policy.compute)

    def pre_backward(self, tensor: Tensor, module: Any) -> Tensor:
        """The loss, scaled, after the hooks that see it unscaled."""
        if self._held is not module:
            self._hold(module)
        return self.session.scale(super().pre_backward(tensor, module))

    def optimizer_step(  # type: ignore[override]  # as the Trainer's own plugins
        self, optimizer: Any, model: Any, closure: Callable[[], Any], **kwargs: Any
    ) -> Any:
        """Backward, hooks, clipping, and the session's step."""
        result = closure()
        if result is None and model.automatic_optimization:  # training_step returned None: there is nothing to step
            return result
        if _reads_gradients(model):
            self.session.unscale_(optimizer)
        self._after_closure(model, optimizer)
        report = self.session.step(optimizer)
        if self._log and model.trainer.training and (report.index + 1) % model.trainer.log_every_n_steps == 0:
            model.log_dict({"loss_scale": report.scale, "skipped_steps": float(self.session.skipped)})
        return result

    def clip_grad_by_norm(self, optimizer: Any, clip_val: float) -> None:
        """Shrink true gradients so that their norm is at most `clip_val`."""
        self.session.clip_grad_norm_(clip_val, optimizer=optimizer)

    def clip_grad_by_value(self, optimizer: Any, clip_val: float) -> None:
        """Clamp true gradients."""
        self.session.clip_grad_value_(clip_val, optimizer=optimizer)

    def _hold(self, module: Any) -> None:
        """Have the module's schedules stand still after a skipped step."""
        step = module.lr_scheduler_step

        def unless_skipped(scheduler: Any, metric: Any) -> None:
            report = None if self._session is None else self._session.last_step
            if report is None or not report.skipped:
                step(scheduler, metric)

        if self._held is not None:
            self._release()
        module.lr_scheduler_step, self._held = unless_skipped, module

    def _release(self) -> None:
        vars(self._held).pop("lr_scheduler_step", None)
        self._held = None

    # -- checkpoints

    def state_dict(self) -> dict[str, Any]:
        """The session's state."""
        return {} if self._session is None else self._session.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore it; outside of a fit there is nothing to restore, since checkpoints have float32 weights."""
        if self._session is not None:
            self._session.load_state_dict(state_dict)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Put masters in the place of the 16-bit weights that they were rounded to."""
        if self._session is None:
            return
        masters: Mapping[str, Tensor] = self._session.state_dict()["masters"]
        weights = checkpoint["state_dict"]
        for name, master in masters.items():
            if name in weights:
                weights[name] = master

    def teardown(self) -> None:
        """Close the session: the model is float32 again."""
        if self._held is not None:
            self._release()
        if self._session is not None:
            self._session.close()
            self._session = None

    @contextmanager
    def module_init_context(self) -> Iterator[None]:
        """Modules are made in float32; `connect` brings them under the level."""
        yield


def _reads_gradients(model: Any) -> bool:
    """Whether a hook of the module or of a callback sees gradients before the step, so that they have to be true."""
    hook = "on_before_optimizer_step"
    return is_overridden(hook, model) or any(is_overridden(hook, each) for each in model.trainer.callbacks)
