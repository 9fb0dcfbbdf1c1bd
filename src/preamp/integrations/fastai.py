"""preamp in fastai: `learn.to_preamp("O4")`, in the place of `learn.to_fp16()`."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch
from fastai.callback.core import Callback, CancelStepException
from fastai.callback.fp16 import MixedPrecision, ModelToHalf, NonNativeMixedPrecision
from fastai.learner import Learner, ValueMetric
from fastai.optimizer import OptimWrapper
from torch.optim import Optimizer

from ..errors import SessionError
from ..frameworks import replaced
from ..tree import cast_floating
from ._host import Host

_METHODS = ("fit", "save", "load", "export", "to_fp32")
"""The methods of a learner that its callback wraps."""


def to_preamp(learn: Learner, level: str = "auto", *, log: bool = True, **options: Any) -> Learner:
    """Have a learner train under a session, and return it: `learn.to_preamp("O4")`. `learn.to_fp32()` undoes it.

    Args:
        learn: The learner.
        level: "O0" to "O5" or "auto".
        log: Whether the progress table has the columns `loss_scale` and `skipped_steps`.
        **options: For `preamp.prepare`.
    """
    return learn.add_cb(PreampCallback(level, log=log, **options))


Learner.to_preamp = to_preamp


class PreampCallback(Host, Callback):
    """Trains a learner under a session: `Learner(dls, model, cbs=PreampCallback("O4"))`, or `learn.to_preamp("O4")`.

    There is a session while `fit` runs; its scale and its counts go on in the next one. Between fits the model is
    float32. Files of `learn.save` have float32 weights, and the session's state beside the optimizer's.
    Arguments are those of `to_preamp`; `SessionError` for a learner that casts by itself.
    """

    order = MixedPrecision.order  # after GradientAccumulation, before GradientClip
    _not_yet = "learn.fit makes it, and closes it when it ends"
    _opt: Any = None
    _region: Any = None
    _stateattrs = ("_session", "_opt", "_region")

    def __init__(self, level: str = "auto", *, log: bool = True, **options: Any) -> None:
        super().__init__({"level": level, **options})
        self._log = log

    @property
    def learn(self) -> Any:
        """The learner; None after `remove_cb`, which closes the session of a fit that runs."""
        return vars(self).get("_learner")

    @learn.setter
    def learn(self, learner: Any) -> None:
        if learner is not None:
            self._check(learner)
        if self.learn is not None:
            self.close()
            for name in _METHODS:
                vars(self.learn).pop(name, None)
        self.__dict__["_learner"] = learner
        if learner is not None:
            for name in _METHODS:
                setattr(learner, name, getattr(self, f"_{name}"))

    def _check(self, learner: Any) -> None:
        for other in learner.cbs:
            if isinstance(other, (MixedPrecision, ModelToHalf, NonNativeMixedPrecision)):
                raise SessionError(
                    f"the learner has fastai's {type(other).__name__}, which casts by itself, and the level says what "
                    "is 16-bit: leave out to_fp16(), to_bf16() and their kin, or call learn.to_fp32() first"
                )
            if isinstance(other, PreampCallback) and other is not self:
                raise SessionError("the learner has a PreampCallback already: call learn.to_fp32() first")

    # -- a session

    def _begin_with_optimizer(self) -> None:
        self._check(self.learn)  # for what was added later
        opt, before = self.learn.opt, self._last
        self._begin(self.learn.model, opt.opt if isinstance(opt, OptimWrapper) else FastaiOptimizer(opt))
        self._opt, opt.step = opt, self._step
        try:
            self.load_state_dict(before)
        except BaseException:
            self.close()
            self._last = before
            raise

    def close(self) -> None:
        """Close the session of a fit that runs, which goes on without one until its next batch."""
        self._leave()
        if self._opt is not None:
            vars(self._opt).pop("step", None)
            self._opt = None
        super().close()

    # -- a batch

    def before_batch(self) -> None:
        """Begin the region; before the first batch that trains, or trains a new optimizer, the session."""
        if self.learn.training and (self._session is None or self._opt is not self.learn.opt):
            self.close()
            self._begin_with_optimizer()
        if self._session is not None:
            self._region = self._session.autocast()
            self._region.__enter__()

    def after_pred(self) -> None:
        """Make predictions float32, as fastai's own mixed precision does."""
        if self._session is not None:
            self.learn.pred = cast_floating(self.learn.pred, torch.float32)

    def after_loss(self) -> None:
        """End the region."""
        self._leave()

    def after_cancel_batch(self) -> None:
        """End the region, if a callback has cancelled the batch inside."""
        self._leave()

    def _leave(self) -> None:
        if self._region is not None:
            region, self._region = self._region, None
            region.__exit__(None, None, None)

    def before_backward(self) -> None:
        """Scale the loss."""
        if self._session is not None:
            self.learn.loss_grad = self._session.scale(self.learn.loss_grad)

    def before_step(self) -> None:
        """Make gradients true, if a later callback may read them."""
        if self._session is not None and self.learn.ordered_cbs("before_step")[-1] is not self:
            self._session.unscale_()

    def _step(self, closure: Any = None) -> None:
        """Step by the session, in place of the optimizer's `step`."""
        if self._session is not None and self._session.step().skipped:
            raise CancelStepException

    # -- methods of the learner

    def _fit(self, *args: Any, **kwargs: Any) -> Any:
        learner = self.learn
        self._check(learner)  # before fastai's ModelToHalf makes the model 16-bit, and after an error leaves it so
        columns = [
            ValueMetric(lambda name=name: self._logs()[name] if self.is_open else None, name)
            for name in ("loss_scale", "skipped_steps")
        ]  # None in a fit without a batch that trains
        if self._log:
            learner.metrics = [*learner.metrics, *columns]
        try:
            return type(learner).fit(learner, *args, **kwargs)
        finally:
            learner.metrics = [metric for metric in learner.metrics if metric not in columns]
            if self.learn is learner:
                self.close()

    def _save(self, *args: Any, **kwargs: Any) -> Any:
        learner, state = self.learn, self.state_dict()
        with self._in_float32(), ExitStack() as stack:
            if learner.opt is not None and state:
                own = learner.opt.state_dict
                stack.enter_context(replaced(learner.opt, "state_dict", lambda: {**own(), "preamp": state}))
            return type(learner).save(learner, *args, **kwargs)

    def _load(self, *args: Any, **kwargs: Any) -> Any:
        learner = self.learn
        self.close()
        if learner.opt is None:
            learner.create_opt()
        own = learner.opt.load_state_dict

        def load(state: dict[str, Any]) -> None:
            self._last = state.pop("preamp", {})
            own(state)

        with replaced(learner.opt, "load_state_dict", load):
            return type(learner).load(learner, *args, **kwargs)

    def _export(self, *args: Any, **kwargs: Any) -> Any:
        learner = self.learn
        with learner.removed_cbs(self):  # the file is to load without preamp
            return learner.export(*args, **kwargs)

    def _to_fp32(self) -> Any:
        return self.learn.remove_cb(self).to_fp32()


class FastaiOptimizer(Optimizer):
    """An optimizer of fastai's own, as one of torch: with its parameters and state, and stepped by it."""

    def __init__(self, opt: Any) -> None:
        self.opt = opt
        super().__init__(opt.param_groups, {})

    @property
    def state(self) -> Any:
        """Fastai's state, by parameter."""
        return self.opt.state

    @state.setter
    def state(self, state: Any) -> None:
        """Nothing: torch's constructor sets an empty one."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Step with fastai's present hyper-parameters."""
        type(self.opt).step(self.opt)
