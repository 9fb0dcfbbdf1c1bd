"""preamp in Keras 3 with the torch backend: `attach` before `model.fit`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import torch
from torch.optim import Optimizer

from ..errors import SessionError, kind_of
from ..session import Session
from ._host import Host

_STEPS = ("train_step", "test_step", "predict_step")
_LOOP = ("apply", "scale_loss")
"""The methods of an optimizer that Keras's training step calls."""


class Attachment(Host):
    """What `attach` returns; `session` is there once the model is built."""

    _not_yet = "model.fit makes it, or model.build(shape) before attach()"

    def __init__(self, model: keras.Model, log: bool, options: dict[str, Any]) -> None:
        super().__init__(options)
        self._model, self._log, self._own = model, log, model.optimizer
        self._region: Any = None
        self._is_own = type(model).train_step is not keras.Model.train_step
        vars(self._own).update(apply=self._apply, scale_loss=self._scale_loss)
        for name in _STEPS:
            vars(model)[name] = self._in_region(getattr(model, name), trains=name == "train_step")
        vars(model)["compute_metrics"] = self._outside(model.compute_metrics)
        if model.built and model.variables:  # a subclass may be built before its layers are
            try:
                self._begin_with_model()
            except BaseException:
                self.close()
                raise

    def close(self) -> None:
        """Close the session: the model trains as Keras's own, without a loss scale. The second call does nothing."""
        self._leave()
        for name in (*_STEPS, "compute_metrics"):
            vars(self._model).pop(name, None)
        for name in _LOOP:
            vars(self._own).pop(name, None)
        super().close()

    def _begin_with_model(self) -> None:
        self._variables = list(self._model.trainable_variables)
        self._optimizer = KerasOptimizer(self._own, self._variables)
        session = self._begin(self._model, self._optimizer)
        if told := self._unfit(session):
            super().close()
            raise SessionError(told)
        self._known = [variable.value for variable in self._variables]

    def _unfit(self, session: Session) -> str | None:
        """What keeps the model from training at the session's level."""
        low = [layer for layer in self._model._flatten_layers() if layer.compute_dtype in ("float16", "bfloat16")]
        if low and session.policy.has_regions:
            return (
                f"the layer {low[0].path!r} computes in {low[0].compute_dtype} by its dtype policy, and the session's "
                "regions cast too: leave Keras's policy at 'float32', or take level='O0' (and scale='dynamic' for "
                "float16), which leaves the casting to Keras"
            )
        if self._is_own and self._options.get("scale", session.policy.scale) not in (None, 1.0):
            return (
                f"{type(self._model).__name__} has a train_step of its own, which would see gradients times the loss "
                "scale and hand them on: take a level without a scale (O4, O0), or write the loop by hand, with "
                "preamp.prepare and a KerasOptimizer"
            )
        return None

    # -- a step

    def _in_region(self, step: Callable[..., Any], trains: bool) -> Callable[..., Any]:
        """A step of the model in the session's region, which ends in `scale_loss` if it trains."""

        def run(data: Any) -> Any:
            if self._model.optimizer is not self._own:
                raise SessionError("the model was compiled after attach(): close() the attachment, and attach() again")
            if not self.is_open:
                self._begin_with_model()
            region = self._autocast()
            self._region = region
            region.__enter__()
            try:
                logs = step(data)
            finally:
                self._leave()
            return {**logs, **self._logs()} if trains and self._log else logs

        return run

    def _outside(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Metrics, which sum and count in float32."""

        def run(*args: Any, **kwargs: Any) -> Any:
            self._leave()
            return function(*args, **kwargs)

        return run

    def _leave(self) -> None:
        if self._region is not None:
            region, self._region = self._region, None
            region.__exit__(None, None, None)

    def _scale_loss(self, loss: torch.Tensor) -> torch.Tensor:
        """In the place of the optimizer's: forward pass and loss are done."""
        self._leave()
        return self.session.scale(loss)

    def _apply(self, grads: Any, trainable_variables: Any = None) -> None:
        """In the place of the optimizer's, which the session calls with true gradients, unless it skips.

        What is handed over is applied, and nothing else. Gradients in the parameters stay.
        """
        self._leave()
        variables = self._variables if trainable_variables is None else list(trainable_variables)
        values = [variable.value for variable in variables]
        handed = {p: None if g is None else g.to(p.dtype) for p, g in zip(values, grads, strict=True)}
        if not handed.keys() <= set(self._known):
            raise SessionError(
                "a layer was made trainable after attach(), and the optimizer has none of its variables: close() the "
                "attachment, compile(), and attach() again"
            )
        if not handed:
            return
        kept = [parameter.grad for parameter in self._known]
        for parameter in self._known:
            parameter.grad = handed.get(parameter)
        self._optimizer.variables = variables
        try:
            self.session.step()
        finally:
            for parameter, gradient in zip(self._known, kept, strict=True):
                parameter.grad = gradient


def attach(model: keras.Model, level: str = "auto", *, log: bool = True, **options: Any) -> Attachment:
    """Have `model.fit` train under a session. Call it after `model.compile`, and again after each `compile`.

    `level`: "O0", "O1", "O4", or "auto". `options` go to `preamp.prepare`. `log=False`: the logs have no `loss_scale`
    and `skipped_steps`. Metrics, callbacks, `evaluate` and `predict` work as they are. A skipped step does not count in
    `optimizer.iterations`, so schedules of the rate stand still. Parameters stay float32, and so do files. Raises
    `SessionError` for a model that scales or casts by itself, for a `train_step` of its own where there is a loss
    scale, and for the levels of 16-bit parameters.

    >>> model.compile(optimizer="adam", loss="mse")
    >>> attach(model, "O4")
    >>> model.fit(x, y)
    """
    if not isinstance(model, keras.Model) or keras.backend.backend() != "torch":
        raise SessionError(
            f"attach() takes a model of Keras with the backend torch (KERAS_BACKEND=torch, before keras is imported); "
            f"this is {kind_of(model)}, and the backend {keras.backend.backend()}"
        )
    if not model.compiled:
        raise SessionError("the model is not compiled: attach() comes after model.compile(...)")
    if "train_step" in vars(model):
        raise SessionError("this model is attached already: call close() of what attach() returned first")
    if model.jit_compile:
        raise SessionError(
            "compile(jit_compile=True) compiles the step as a whole, the session's with it: leave it out"
        )
    if not isinstance(model.optimizer, keras.optimizers.Optimizer):
        raise SessionError("the model is compiled without an optimizer of Keras, and nothing would step it")
    others = [
        name for name, each in vars(model).items()
        if isinstance(each, keras.optimizers.Optimizer) and each is not model.optimizer
    ]  # fmt: skip
    if others:
        raise SessionError(
            f"the model has further optimizers ({', '.join(others)}), which would step without the session's loss "
            "scale: write the loop by hand, with preamp.prepare and a KerasOptimizer for each"
        )
    scaler = isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer)
    if scaler or getattr(model.optimizer, "loss_scale_factor", None) is not None:
        raise SessionError(
            "the optimizer has a loss scale of its own (LossScaleOptimizer, or loss_scale_factor), and the session's "
            "would come on top: write compile(..., auto_scale_loss=False), without loss_scale_factor"
        )
    return Attachment(model, log, {"level": level, **options})


class KerasOptimizer(Optimizer):
    """An optimizer of Keras, as one of torch: it steps the same variables."""

    def __init__(self, optimizer: Any, variables: Any) -> None:
        self.keras, self.variables = optimizer, list(variables)
        super().__init__([variable.value for variable in self.variables], {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Apply the parameters' gradients."""
        trained = [variable for variable in self.variables if variable.trainable]  # others were frozen since
        type(self.keras).apply(self.keras, [variable.value.grad for variable in trained], trained)
