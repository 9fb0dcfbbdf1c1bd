"""The optimizers as their papers write them, one tensor at a time in float64: what every fast way is held against."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


@dataclass
class Plain:
    """Parameters and states in float64; `step` takes true gradients, already multiplied."""

    params: list[Tensor]
    options: dict[str, Any]
    count: int = 0
    states: dict[str, list[Tensor]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.params = [p.detach().double().clone() for p in self.params]
        for name in ("m", "v", "x"):
            self.states[name] = [torch.zeros_like(p) for p in self.params]

    def step(self, grads: list[Tensor]) -> None:
        self.count += 1
        o = self.options
        self.prologue(grads)
        for i, (p, g) in enumerate(zip(self.params, grads, strict=True)):
            g = -g.double() if o["maximize"] else g.double()
            self.one(i, p, g)

    def prologue(self, grads: list[Tensor]) -> None:
        """What needs all gradients."""

    def one(self, i: int, p: Tensor, g: Tensor) -> None:
        raise NotImplementedError


class Adam(Plain):
    def one(self, i: int, p: Tensor, g: Tensor) -> None:
        o, m, v, x = self.options, self.states["m"][i], self.states["v"][i], self.states["x"][i]
        if o["decoupled"]:
            p -= o["lr"] * o["weight_decay"] * p
        else:
            g = g + o["weight_decay"] * p
        m.copy_(o["beta1"] * m + (1 - o["beta1"]) * g)
        v.copy_(o["beta2"] * v + (1 - o["beta2"]) * g**2)
        x.copy_(torch.maximum(x, v))
        second = (x if o["amsgrad"] else v) / (1 - o["beta2"] ** self.count)
        p -= o["lr"] * (m / (1 - o["beta1"] ** self.count)) / (second.sqrt() + o["eps"])


class SGD(Plain):
    def one(self, i: int, p: Tensor, g: Tensor) -> None:
        o, m = self.options, self.states["m"][i]
        g = g + o["weight_decay"] * p
        if o["momentum"]:
            m.copy_(g if self.count == 1 else o["momentum"] * m + (1 - o["dampening"]) * g)
            g = g + o["momentum"] * m if o["nesterov"] else m
        p -= o["lr"] * g


class Adagrad(Plain):
    def one(self, i: int, p: Tensor, g: Tensor) -> None:
        o, v = self.options, self.states["v"][i]
        g = g + o["weight_decay"] * p
        v += g**2
        p -= o["lr"] / (1 + (self.count - 1) * o["lr_decay"]) * g / (v.sqrt() + o["eps"])


class Lamb(Plain):
    clip = 1.0

    def prologue(self, grads: list[Tensor]) -> None:
        most = self.options["max_grad_norm"]
        norm = float(torch.stack([g.double().norm() for g in grads]).norm())
        self.clip = max(1.0, norm / most) if most else 1.0

    def one(self, i: int, p: Tensor, g: Tensor) -> None:
        o, m, v, (b1, b2) = self.options, self.states["m"][i], self.states["v"][i], self.options["betas"]
        g = g / self.clip
        if not o["adam_w_mode"]:
            g = g + o["weight_decay"] * p
        m.copy_(b1 * m + (1 - b1 if o["grad_averaging"] else 1) * g)
        v.copy_(b2 * v + (1 - b2) * g**2)
        c1, c2 = (1 - b1**self.count, 1 - b2**self.count) if o["bias_correction"] else (1, 1)
        update = (m / c1) / ((v / c2).sqrt() + o["eps"])
        if o["adam_w_mode"]:
            update = update + o["weight_decay"] * p
        ratio = 1.0
        if (o["weight_decay"] or o["use_nvlamb"]) and p.norm() > 0 and update.norm() > 0:
            ratio = float(p.norm() / update.norm())
        p -= o["lr"] * ratio * update


class NovoGrad(Plain):
    def one(self, i: int, p: Tensor, g: Tensor) -> None:
        if not p.numel():
            return
        o, m, v, (b1, b2) = self.options, self.states["m"][i], self.states["v"], self.options["betas"]
        now = g.norm() if o["norm_type"] == 2 else g.abs().max()
        before = v[i] if self.count > 1 else torch.zeros_like(now) if o["init_zero"] else now
        if o["norm_type"] == 2:
            v[i] = (b2 * before**2 + (1 - b2) * now**2).sqrt()
        else:
            v[i] = b2 * before + (1 - b2) * now
        c1, c2 = (1 - b1**self.count, 1 - b2**self.count) if o["bias_correction"] else (1, 1)
        below = v[i] / c2**0.5 + o["eps"]
        if o["reg_inside_moment"]:
            g = g / below + o["weight_decay"] * p
        m.copy_(b1 * m + (1 - b1 if o["grad_averaging"] else 1) * g)
        update = m / c1
        if not o["reg_inside_moment"]:
            update = update / below + o["weight_decay"] * p
        p -= o["lr"] * update


class Lion(Plain):
    def one(self, i: int, p: Tensor, g: Tensor) -> None:
        o, m, (b1, b2) = self.options, self.states["m"][i], self.options["betas"]
        update = (b1 * m + (1 - b1) * g).sign()
        p -= o["lr"] * (update + o["weight_decay"] * p)
        m.copy_(b2 * m + (1 - b2) * g)


class Muon(Plain):
    """In float64 throughout, where the iteration may be in bfloat16: so only near."""

    def one(self, i: int, p: Tensor, g: Tensor) -> None:
        o, m = self.options, self.states["m"][i]
        m.copy_(o["momentum"] * m + (1 - o["momentum"]) * g)
        x = o["momentum"] * m + (1 - o["momentum"]) * g if o["nesterov"] else m
        x = x / max(float(x.norm()), o["eps"])
        a, b, c = o["ns_coefficients"]
        for _ in range(o["ns_steps"]):
            x = a * x + b * (x @ x.T @ x) + c * (x @ x.T @ x @ x.T @ x)
        rows, columns = p.shape
        ratio = (
            0.2 * max(rows, columns) ** 0.5 if o["adjust_lr_fn"] == "match_rms_adamw" else max(1, rows / columns) ** 0.5
        )
        p -= o["lr"] * (ratio * x + o["weight_decay"] * p)
