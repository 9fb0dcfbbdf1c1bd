"""preamp in Keras 3 with the torch backend: `attach` before `model.fit`, and Keras's dtype policies as preamp's."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

import keras
import torch
from torch.optim import Optimizer

from ..errors import PolicyError, SessionError, kind_of
from ..formats import name_of
from ..policy import Policy, parse_policy
from ..session import Session, prepare

_STEPS = ("train_step", "test_step", "predict_step")
_LOOP = ("apply", "scale_loss")
"""The methods of an optimizer that Keras's training step calls."""


class Attachment:
    """What `attach` returns; `session` is there once the model is built."""

    def __init__(self, model: keras.Model, optimizer: Optimizer | None, log: bool, options: dict[str, Any]) -> None:
        self._model, self._log, self._options = model, log, options
        self._session: Session | None = None
        self._region: Any = None
        self._is_own = type(model).train_step is not keras.Model.train_step
        self._ran = False
        self._true = False  # whether gradients in the parameters are so, of a backward pass that was not applied yet
        self._fine: Any = None  # 1 or, after an overflow, NaN: of the backward pass whose gradients are applied
        self._given = optimizer
        self._own = model.optimizer if optimizer is None else _Rates(optimizer)
        if optimizer is not None:
            model.optimizer = self._own
        vars(self._own).update(apply=self._apply, scale_loss=self._scale_loss)
        for name in _STEPS:
            vars(model)[name] = self._in_region(getattr(model, name), trains=name == "train_step")
        vars(model)["compute_metrics"] = self._outside(model.compute_metrics)
        if model.built and model.variables:  # a subclass may be built before its layers are
            try:
                self._begin()
            except BaseException:
                self.close()
                raise

    @property
    def session(self) -> Session:
        """The session that trains; `SessionError` before the model is built."""
        if self._session is None:
            raise SessionError("no session yet: model.fit makes it, or model.build(shape) before attach()")
        return self._session

    def close(self) -> None:
        """Close the session: the model trains as Keras's own, without a loss scale. The second call does nothing."""
        self._leave()
        for name in (*_STEPS, "compute_metrics"):
            vars(self._model).pop(name, None)
        for name in _LOOP:
            vars(self._own).pop(name, None)
        if self._model.optimizer is self._own and self._given is not None:
            self._model.optimizer = None
        if self._session is not None:
            self._session.close()

    def _begin(self) -> None:
        optimizer = KerasOptimizer(self._own, self._model.trainable_variables) if self._given is None else self._given
        session = prepare(self._model, optimizer, **self._options)
        low = [layer for layer in self._model._flatten_layers() if layer.compute_dtype in ("float16", "bfloat16")]
        if low and session.policy.has_regions:
            session.close()
            raise SessionError(
                f"the layer {low[0].path!r} computes in {low[0].compute_dtype} by its dtype policy, and the session's "
                "regions cast too: leave Keras's policy at 'float32', or take level='O0' (and scale='dynamic' for "
                "float16), which leaves the casting to Keras"
            )
        self._session, self._optimizer = session, optimizer
        self._variables = list(self._model.trainable_variables)
        self._known = {p: None for group in optimizer.param_groups for p in group["params"]}
        self._scales = self._options.get("scale", session.policy.scale) not in (None, 1.0)

    # -- a step

    def _in_region(self, step: Callable[..., Any], trains: bool) -> Callable[..., Any]:
        """A step of the model in the session's region, which ends in `scale_loss` if it trains."""

        def run(data: Any) -> Any:
            if self._model.optimizer is not self._own:
                raise SessionError("the model was compiled after attach(): close() the attachment, and attach() again")
            if self._session is None:
                self._begin()
            if trains and not self._true:
                self._fine = None
            region = self.session.autocast()
            self._region = region
            region.__enter__()
            try:
                logs = step(data)
            finally:
                self._leave()
            if trains and self._log:
                logs = {**logs, "loss_scale": self.session.loss_scale(), "skipped_steps": self.session.skipped}
            return logs

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
        """In the place of the optimizer's: forward pass and loss are done.

        What a `train_step` of one's own does with gradients is seen only when it hands them over: from the end of the
        backward pass on they are true, so that clipping, say, means there what it says.
        """
        self._leave()
        scaled, self._ran = self.session.scale(loss), True
        if self._is_own and self._scales and scaled.requires_grad:
            scaled.register_hook(self._begin_backward)
        return scaled

    def _begin_backward(self, _: torch.Tensor) -> None:
        """Gradients that are there are scaled, to be added to: by the session if it knows them, else here."""
        users = {parameter: parameter.grad for parameter in self._known}
        true, self._true, one = self._true, True, self._scale_one()
        for parameter, gradient in users.items() if not true else ():
            parameter.grad = None if gradient is None else gradient * one
        found = [(p, p.grad, None if p.grad is None else p.grad._version) for p in self._known]
        end = functools.partial(self._end_backward, None if true else users, found)
        torch.autograd.Variable._execution_engine.queue_callback(end)

    def _end_backward(self, users: dict[Any, Any] | None, found: list[tuple[Any, Any, Any]]) -> None:
        """Gradients are true again. If the pass has kept none in the parameters, they are what they were before."""
        if all(p.grad is before and (before is None or before._version == at) for p, before, at in found):
            if users is None:
                self.session.unscale_()
            else:
                for parameter, gradient in users.items():
                    parameter.grad = gradient
            raise SessionError(
                "this train_step takes gradients of the scaled loss that are not kept in the parameters, so that they "
                "stay scaled: write optimizer.scale_loss(loss).backward() and read v.value.grad, or take a level "
                "without a loss scale (O4, O0)"
            )
        finite = [parameter.grad.isfinite().all() for parameter in self._known if parameter.grad is not None]
        self._fine = torch.where(torch.stack(finite).all(), 1.0, torch.nan)
        self.session.unscale_()

    def _scale_one(self) -> torch.Tensor:
        return self.session.scale(torch.ones((), device=next(iter(self._known)).device))

    def _apply(self, grads: Any, trainable_variables: Any = None) -> None:
        """In the place of the optimizer's, which the session calls with true gradients, unless it skips.

        What is handed over is applied, and nothing else.
        """
        self._leave()
        variables = self._variables if trainable_variables is None else list(trainable_variables)
        values = [variable.value for variable in variables]
        handed = {p: None if g is None else g.to(p.dtype) for p, g in zip(values, grads, strict=True)}
        if any(parameter not in self._known for parameter in handed):
            raise SessionError(
                "a layer was made trainable after attach(), and the optimizer has none of its variables: close() the "
                "attachment, compile(), and attach() again"
            )
        if not handed:
            return
        if self._scales and (self._fine is None if self._is_own else not self._ran):
            raise SessionError(
                "this train_step called optimizer.apply with gradients that were taken without optimizer.scale_loss, "
                "and float16 gradients underflow without a loss scale: write optimizer.scale_loss(loss).backward()"
            )
        kept = {parameter: parameter.grad for parameter in self._known}
        if self._fine is not None or not self._ran:
            for parameter in kept:
                parameter.grad = None
            one = self._scale_one()  # the session forgets that they were true
            if self._fine is not None:  # NaN after an overflow, also where an edit has hidden that
                handed = {p: None if g is None else g * (one * self._fine) for p, g in handed.items()}
        for parameter in kept:
            parameter.grad = handed.get(parameter)
        if isinstance(self._optimizer, KerasOptimizer):
            self._optimizer.variables = variables
        try:
            self.session.step()
        finally:
            self._true = self._ran = False
            for parameter, gradient in kept.items():
                parameter.grad = gradient


def attach(
    model: keras.Model, level: str = "auto", optimizer: Optimizer | None = None, *, log: bool = True, **options: Any
) -> Attachment:
    """Have `model.fit` train under a session. Call it after `model.compile`, and again after each `compile`.

    `level`: "O0", "O1", "O4", or "auto". `optimizer`: one of torch or of preamp.optim, for a model that was built and
    compiled with `optimizer=None`; else Keras's own steps. `options` go to `preamp.prepare`. `log=False`: the logs have
    no `loss_scale` and `skipped_steps`. Metrics, callbacks, `evaluate` and `predict` work as they are. A skipped step
    does not count in `optimizer.iterations`, so schedules of the rate stand still. Parameters stay float32, and so do
    files. Raises `SessionError` for a model that scales or casts by itself, and for the levels of 16-bit parameters.

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
    if optimizer is not None and model.optimizer is not None:
        raise SessionError(
            f"the model is compiled with Keras's {type(model.optimizer).__name__}, which would not step: write "
            "compile(optimizer=None, ...), or leave out the optimizer of torch"
        )
    if optimizer is not None and not model.built:
        raise SessionError(
            "the model is not built, so that the optimizer has other parameters: call model.build(shape)"
        )
    if optimizer is None and not isinstance(model.optimizer, keras.optimizers.Optimizer):
        raise SessionError("the model is compiled without an optimizer, and attach() was given none")
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
    return Attachment(model, optimizer, log, {"level": level, **options})


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


class _Rates:
    """An optimizer of torch where Keras expects one of its own: callbacks read and set its learning rate."""

    apply: Callable[..., None]

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self.built = True

    def apply_gradients(self, grads_and_vars: Any) -> None:
        """As Keras's."""
        self.apply(*zip(*grads_and_vars, strict=True))

    @property
    def learning_rate(self) -> float:
        """Of all groups; `SessionError` if they differ."""
        rates = {float(group["lr"]) for group in self._optimizer.param_groups}
        if len(rates) > 1:
            raise SessionError("the optimizer's groups have different learning rates: schedule them by torch's means")
        return rates.pop()

    @learning_rate.setter
    def learning_rate(self, rate: Any) -> None:
        self.learning_rate  # noqa: B018 - the check
        for group in self._optimizer.param_groups:
            group["lr"] = float(rate)


_KERAS = {"O0": "float32", "O1": "mixed_float16", "O4": "mixed_bfloat16"}
"""The dtype policies of Keras that mean what a level means."""

_INSIDE = re.compile(r"\(\?:(.*)\)\(\?:/\.\*\)\?")
"""A pattern of `dtype_policy_map`, for a layer and what is inside."""


def dtype_policy_map(policy: Policy | str) -> keras.dtype_policies.DTypePolicyMap:
    """A policy of preamp for Keras: `keras.config.set_dtype_policy(dtype_policy_map("O1; net/head -> full"))`.

    `policy`: level O0, O1 or O4, and rules for modules, whose patterns are over the paths of Keras's layers; `\\.` is
    read as `/`. A rule holds for what is inside a layer, too. `PolicyError` for what a policy of Keras cannot say.

    >>> dtype_policy_map(r"O4; decoder/\\d+/norm -> full; head -> fp16")
    """
    chosen = parse_policy(policy)
    base = chosen.replace(modules=())
    if base.level not in _KERAS or (base.level == "O0" and chosen.modules):
        raise PolicyError(
            f"the policy {str(chosen)!r} has no counterpart in Keras, whose layers have float32 variables and compute "
            "in a dtype of their own: levels O1 and O4 with rules for modules, or O0 without. (mixed_float16 computes "
            "as O2 does. A loss scale and rules for operators belong to a session)"
        )
    default = _KERAS[base.level]
    found = keras.dtype_policies.DTypePolicyMap(default)
    for pattern, precision in chosen.modules:
        if isinstance(precision, torch.dtype):
            name = {"fp16": "mixed_float16", "bf16": "mixed_bfloat16"}[name_of(precision)]
        else:
            name = "float32" if precision == "full" else default
        if re.fullmatch(r"[\w./]+", pattern):  # a path, which wins over patterns
            path = pattern.replace(".", "/")
            found[path], found[f"{path}/.+"] = name, name
        else:
            found[f"(?:{pattern.replace(chr(92) + '.', '/')})(?:/.*)?"] = name
    return found


def policy_of(dtype_policy: keras.dtype_policies.DTypePolicy | str) -> Policy:
    """A dtype policy of Keras, or a map of such, as preamp's: of float32 variables, level O0, O1 or O4.

    Keys of a map become rules, `/` in them `\\.`; in preamp a rule holds for what is inside a layer, too. `PolicyError`
    for 16-bit variables, float64 and quantization, and for a map whose default is float32 while layers are not.

    >>> str(policy_of("mixed_float16")) == str(preamp.policy("O1"))
    True
    """
    given = keras.dtype_policies.get(dtype_policy)
    is_map = isinstance(given, keras.dtype_policies.DTypePolicyMap)
    default = given.default_policy.name if is_map else given.name
    rules = {key: given[key].name for key in given} if is_map else {}
    levels = {name: level for level, name in _KERAS.items()}
    unknown = [name for name in (default, *rules.values()) if name not in levels]
    if unknown:
        raise PolicyError(
            f"{unknown[0]!r} has no counterpart in preamp, whose policies for Keras have float32 variables: "
            f"{', '.join(levels)}"
        )
    if default == "float32" and any(name != "float32" for name in rules.values()):
        raise PolicyError(
            "the map's default is 'float32', and some layers compute in 16 bits: make the 16-bit policy the default, "
            "and give the other layers 'float32'"
        )
    found = parse_policy(levels[default])
    for key, name in rules.items():
        if key.endswith("/.+") and rules.get(key[:-3]) == name:
            continue  # what is inside follows
        inside = _INSIDE.fullmatch(key)
        pattern = inside[1] if inside else key
        pattern = pattern.replace("/", "." if re.fullmatch(r"[\w/]+", pattern) else r"\.")
        precision = {"float32": "full", "mixed_float16": "fp16", "mixed_bfloat16": "bf16", default: "low"}
        found = found.override(pattern, precision[name])
    return found
