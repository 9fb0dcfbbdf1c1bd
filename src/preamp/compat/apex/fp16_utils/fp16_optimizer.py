"""FP16_Optimizer: an optimizer whose 16-bit parameters are stepped by way of float32 masters, under a loss scale."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.optim import Optimizer

from ....autocast import PRODUCTS
from ....formats import LOW_DTYPES
from ....ledger import parameters_of
from .._masters import Masters, clear_gradients, fitting, forwarded, multiply_gradients
from .._notice import deprecated_warning
from .._scaler import LossScaler, scaler_of, state_of
from .fp16util import clip_grad_norm, model_grads_to_master_grads

RETRIES = 64
"""How often a closure is called again because it overflowed: a scale of 2**16 falls to 2**-48 meanwhile, far below
what could help."""


class FP16_Optimizer(Masters):
    """Wraps an optimizer of a model with 16-bit parameters; their places in its groups are taken by float32 masters.

    `static_loss_scale`: a fixed loss scale. `dynamic_loss_scale`: one that looks for overflows instead;
    `dynamic_loss_args`: its arguments, those of `amp.scaler.LossScaler`. `verbose`: print what is wrapped.
    The loss goes through `backward(loss)`; float16 and bfloat16 parameters get masters, float32 ones
    are stepped as they are, frozen ones are left alone. Raises TypeError for other dtypes.
    """

    def __init__(
        self, init_optimizer: Optimizer, static_loss_scale: float = 1.0, dynamic_loss_scale: bool = False,
        dynamic_loss_args: dict[str, Any] | None = None, verbose: bool = True,
    ) -> None:  # fmt: skip
        print("Warning:  FP16_Optimizer is deprecated and dangerous, and will be deleted soon.")
        deprecated_warning(
            "FP16_Optimizer is deprecated in Apex: preamp.prepare(model, optimizer, policy='O2') keeps masters too, "
            "and leaves the optimizer its parameters"
        )
        super().__init__()
        self.verbose = verbose
        self.optimizer = init_optimizer
        for i, group in enumerate(init_optimizer.param_groups):
            self.maybe_print(f"FP16_Optimizer processing param group {i}:")
            self._take_group(group)
        if any(param.device.type == "cpu" for param in self.all_fp16_params):
            # of a model that the optimizer does not know: `.half()` made it, and its forward pass is torch's
            PRODUCTS.hold_while(self, everywhere=True)
        self.dynamic_loss_scale = bool(dynamic_loss_scale)
        self.loss_scaler = self._make_scaler(static_loss_scale, self.dynamic_loss_scale, dynamic_loss_args)
        self.overflow = False
        self.first_closure_call_this_step = True
        self.clip_grad_norm = clip_grad_norm
        self._scale_on_fp16: float | None = None
        """The scale on the model's 16-bit gradients, None where there are none yet."""
        self._fp32_are_true = False
        """Whether gradients of float32 parameters were divided by the scale already."""

    def _make_scaler(self, static: float, dynamic: bool, arguments: dict[str, Any] | None) -> LossScaler:
        return LossScaler("dynamic", **(arguments or {})) if dynamic else LossScaler(static)

    def _take_group(self, group: dict[str, Any]) -> None:
        """Put masters in the places of 16-bit parameters."""
        for param in group["params"]:
            if param.requires_grad and param.dtype not in (torch.float32, *LOW_DTYPES):
                raise TypeError(
                    "Wrapped parameters must be either float32, float16 or bfloat16, and one of shape "
                    f"{tuple(param.shape)} is {param.type()}, for which a float32 master would lose bits: cast the "
                    "model first, with .half() or .float()"
                )
            if param.requires_grad:
                self.maybe_print(f"FP16_Optimizer received {param.type()} with {param.size()}")
        self.make_masters(self.optimizer, group)

    def maybe_print(self, msg: str) -> None:
        """Print if `verbose`."""
        if self.verbose:
            print(msg)

    # -- gradients

    def zero_grad(self, set_grads_to_None: bool = False) -> None:
        """Zero the gradients of the model and of the masters, or make them None."""
        clear_gradients([*parameters_of(self.optimizer), *self.all_fp16_params], set_grads_to_None)
        self._scale_on_fp16, self._fp32_are_true = None, False

    def backward(self, loss: Tensor, update_master_grads: bool = True, retain_graph: bool = False) -> None:
        """The backward pass of the scaled loss; gradients add up until `zero_grad`, as they do without this class.

        `update_master_grads=False`: leave the masters' gradients for a later `update_master_grads()`.
        """
        self.take_unfrozen(self.optimizer)
        scale = self.loss_scaler.loss_scale()
        self._rescale_gradients(scale)
        (loss.float() * scale).backward(retain_graph=retain_graph)
        if update_master_grads:
            self.update_master_grads()

    def _rescale_gradients(self, scale: float) -> None:
        """Bring gradients that are there already under the scale of those to come, so that they can be added."""
        before = scale if self._scale_on_fp16 is None else self._scale_on_fp16
        if before != scale and not self.overflow:
            multiply_gradients(self.all_fp16_params, scale / before)
        if self._fp32_are_true:
            multiply_gradients(self.all_fp32_from_fp32_params, scale)
        self._scale_on_fp16, self._fp32_are_true = scale, False

    def update_master_grads(self) -> None:
        """Copy the model's gradients to the masters in float32, divided by the scale; note overflow, move the scale."""
        self.loss_scaler.clear_overflow_state()
        model_grads_to_master_grads(self.all_fp16_params, self.all_fp32_from_fp16_params)
        scale = self.loss_scaler.loss_scale() if self._scale_on_fp16 is None else self._scale_on_fp16
        scaled = [master.grad for master in self.all_fp32_from_fp16_params if master.grad is not None]
        for param in self.all_fp32_from_fp32_params if not self._fp32_are_true else ():
            if param.grad is not None:
                param.grad = param.grad if param.grad.layout is torch.strided else param.grad.to_dense()
                scaled.append(param.grad)
        with torch.no_grad():
            self.loss_scaler.unscale(scaled, scaled, scale, scale_override=scale)
        self._fp32_are_true = True
        self.overflow = self.loss_scaler.update_scale()

    def clip_master_grads(self, max_norm: float, norm_type: float = 2) -> Any:
        """Clip the gradients of the optimizer's parameters to a global norm; returns it as it was, -1 on overflow."""
        if self.overflow:
            return -1
        return self.clip_grad_norm(list(parameters_of(self.optimizer)), max_norm, norm_type)

    # -- stepping

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step the masters and round them into the model; returns what the optimizer's step does.

        On overflow nothing is stepped, a line says so, and None is returned. `closure`: evaluates the model, calls
        `backward` of this object and returns the loss; it is called again until it does not overflow (RuntimeError
        if the scale does not help).
        """
        if closure is None:
            self._check_masters_know()
        if self.overflow and closure is None:
            print(f"Gradient overflow.  Skipping step, reducing loss scale to {self.loss_scaler.loss_scale()}")
            return None
        value = self.optimizer.step() if closure is None else self._step_with_closure(closure)
        self._master_params_to_model_params()
        return value

    def _check_masters_know(self) -> None:
        """RuntimeError for gradients of the model that the masters were not given: a step would lose them."""
        if self._scale_on_fp16 is not None or self._fp32_are_true:
            return
        if any(p.grad is not None and bool(p.grad.any()) for p in self.all_fp16_params):
            raise RuntimeError(
                "the model's 16-bit gradients come from a backward pass that this optimizer has not seen, and the "
                "masters that it steps do not have them: write optimizer.backward(loss) for loss.backward(), or call "
                "optimizer.update_master_grads() before step()"
            )

    def _step_with_closure(self, closure: Callable[[], Any]) -> Any:
        def evaluated() -> Any:
            if self.first_closure_call_this_step:
                self.first_closure_call_this_step = False
            else:  # the optimizer has moved the masters since, and knows of no others
                self._master_params_to_model_params()
            loss = closure()
            for _ in range(RETRIES):
                if not self.overflow:
                    return loss
                scale = self.loss_scaler.loss_scale()
                print(f"OVERFLOW within closure! Skipping step, reducing loss scale to {scale}")
                loss = closure()
            raise RuntimeError(
                f"the closure overflowed {RETRIES} times in a row, and the loss scale is down to "
                f"{self.loss_scaler.loss_scale():g}: the gradients are not finite whatever the scale. Look for inf or "
                "nan in the loss and the inputs"
            )

        try:
            return self.optimizer.step(evaluated)
        finally:
            self.first_closure_call_this_step = True

    _master_params_to_model_params = Masters.masters_to_model

    # -- saving and loading

    def state_dict(self) -> dict[str, Any]:
        """Loss scale, flags, the optimizer's state and the masters; loads with `torch.load(weights_only=True)`."""
        return {
            "loss_scaler": state_of(self.loss_scaler),
            "dynamic_loss_scale": self.dynamic_loss_scale,
            "overflow": self.overflow,
            "first_closure_call_this_step": self.first_closure_call_this_step,
            "optimizer_state_dict": self.optimizer.state_dict(),
            "fp32_from_fp16": [[master.detach() for master in group] for group in self.fp32_from_fp16_groups],
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` gave, here or in Apex; masters by position, and rounded into the model.

        `state_dict["loss_scaler"]` may also be a scaler object, as Apex saved it. `StateError`, a ValueError, and
        nothing is changed, if the masters do not fit.
        """
        saved = [master for group in state_dict["fp32_from_fp16"] for master in group]
        pairs = fitting(self.all_fp32_from_fp16_params, saved)
        self.loss_scaler = scaler_of(state_dict["loss_scaler"])
        self.dynamic_loss_scale = bool(state_dict["dynamic_loss_scale"])
        self.overflow = bool(state_dict["overflow"])
        self.first_closure_call_this_step = bool(state_dict["first_closure_call_this_step"])
        self.optimizer.load_state_dict(state_dict["optimizer_state_dict"])
        for master, value in pairs:
            master.detach().copy_(value)
        self._master_params_to_model_params()

    def __getstate__(self) -> NoReturn:
        raise RuntimeError(
            "FP16_Optimizer should be serialized using state_dict(), and deserialized using load_state_dict(): a copy "
            "would step masters of a model it has lost"
        )

    # -- what users look at

    loss_scale = forwarded("loss_scaler._loss_scale", "The loss scale as it stands; may be set.")
    state = forwarded("optimizer.state", "The optimizer's state; may be set.")
    param_groups = forwarded("optimizer.param_groups", "The optimizer's groups, with the masters in them; may be set.")
