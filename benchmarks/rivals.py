"""AdamW of several libraries: bytes a parameter, what training comes to, and whether second moments freeze.

    TORCHDYNAMO_DISABLE=1 python -m benchmarks.rivals [network ...] [--out FILE]

Bytes are allocated ones, of a large bfloat16 matrix after a step: weight, gradient, and whatever the optimizer holds.
Losses: the zoo's size ci, three seeds, one thread. torchao and bitsandbytes where they are installed. FlashOptim has no
step for a CPU, so its bytes are those of its documents, and its second moments go through its codes as published.
torchao compiles its step for each shape; without Dynamo it computes the same operator by operator.
"""

from __future__ import annotations

import argparse
import importlib
import json
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from preamp.machine import environment
from preamp.optim import AdamW

from .options import OPTIONS, train

LOW = "O5,masters=no"


class ByHand(torch.optim.Optimizer):
    """Steps float32 copies of its parameters by torch's AdamW, and rounds them back."""

    def __init__(self, params: Any, **arguments: Any) -> None:
        super().__init__(params, {"betas": (0.9, 0.999), **arguments})
        self.params = self.param_groups[0]["params"]
        self.masters = [Parameter(p.detach().float()) for p in self.params]
        self.inner = torch.optim.AdamW(self.masters, **arguments)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One step."""
        self.inner.param_groups[0].update(lr=self.param_groups[0]["lr"], betas=self.param_groups[0]["betas"])
        for parameter, master in zip(self.params, self.masters, strict=True):
            master.grad = None if parameter.grad is None else parameter.grad.float()
        self.inner.step()
        self.inner.zero_grad()
        for parameter, master in zip(self.params, self.masters, strict=True):
            parameter.copy_(master)


def of(module: str, kind: str, **arguments: Any) -> Callable[..., Any]:
    """An optimizer of another library; `ImportError` where that is missing."""
    return lambda params, **more: getattr(importlib.import_module(module), kind)(params, **more, **arguments)


WAYS: dict[str, tuple[str, Callable[..., Any], dict[str, Any]]] = {
    "torch AdamW, float32 weights": ("O4", torch.optim.AdamW, {}),
    "torch AdamW, bfloat16 weights": (LOW, torch.optim.AdamW, {}),
    "torch AdamW, masters by hand": (LOW, ByHand, {}),
    "torchao AdamW8bit, stochastic rounding": (LOW, of("torchao.optim", "AdamW8bit", bf16_stochastic_round=True), {}),
    "torchao AdamW4bit, stochastic rounding": (LOW, of("torchao.optim", "AdamW4bit", bf16_stochastic_round=True), {}),
    "bitsandbytes AdamW8bit": (LOW, of("bitsandbytes.optim", "AdamW8bit"), {}),
    **{name: (LOW if "no master" in name else "O5", partial(AdamW, **o), {}) for name, o in OPTIONS.items()},
    "master split24, 8-bit states, released": (
        "O5", partial(AdamW, **OPTIONS["master split24, 8-bit states"]), {"release_gradients": True},
    ),
}  # fmt: skip
TOLD = {"FlashOptim": 7.0, "FlashOptim, released": 5.0}
"""Bytes by the documents of a library that has no step for a CPU."""
IN_OPTIONS = set(OPTIONS) - {"master float32", "master split24, 8-bit states"}
"""Whose losses `benchmarks.options` has."""


def bytes_of(way: str) -> float:
    """Bytes a parameter."""
    policy, make, options = WAYS[way]
    weight = Parameter(torch.randn(1024, 4096).to(torch.float32 if policy == "O4" else torch.bfloat16))
    optimizer = make([weight], lr=1e-3)
    weight.grad = torch.randn_like(weight)
    optimizer.step()
    if options.get("release_gradients"):
        weight.grad = None
    roots = [weight, weight.grad, dict(optimizer.state), getattr(optimizer, "masters", None)]
    roots += [dict(optimizer.inner.state)] if isinstance(optimizer, ByHand) else []
    held = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for root in roots for t in leaves(root)}
    return sum(held.values()) / weight.numel()


def leaves(value: Any) -> Iterator[Tensor]:
    """The tensors in containers and in tensors that are made of others."""
    if isinstance(value, dict):
        value = [*value.values()]
    if isinstance(value, (list, tuple)):
        for each in value:
            yield from leaves(each)
    elif hasattr(value, "__tensor_flatten__"):
        yield from leaves([getattr(value, name) for name in value.__tensor_flatten__()[0]])
    elif isinstance(value, Tensor):
        yield value


class FlashOptimsCodes(torch.optim.AdamW):
    """AdamW whose second moments go through these codes: their roots in 8 bits, relative to the largest of 32."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One step."""
        super().step()
        for state in self.state.values():
            root = state["exp_avg_sq"].sqrt().view(-1, 32)
            largest = root.amax(1, keepdim=True)
            coded = (root / largest * 255).round() / 255 * largest
            state["exp_avg_sq"].copy_(coded.square().view_as(state["exp_avg_sq"]))


def frozen(make: Callable[..., Any], before: int = 3000, after: int = 5000) -> float:
    """The length of an element's steps after its gradients have become 10 times smaller, relative to torch's AdamW.

    Gradients are normal. Those of every second element become smaller; the mean is of the last 100 steps.
    """
    torch.manual_seed(0)
    scale = torch.where(torch.arange(64) % 2 == 0, 0.1, 1.0).expand(64, 64)
    weights = [Parameter(torch.zeros(64, 64)) for _ in range(2)]
    optimizers = [
        kind([w], lr=1.0, weight_decay=0.0) for kind, w in zip((torch.optim.AdamW, make), weights, strict=True)
    ]
    moved = [0.0, 0.0]
    for step in range(before + after):
        gradient = torch.randn(64, 64) * (scale if step >= before else 1.0)
        for i, (weight, optimizer) in enumerate(zip(weights, optimizers, strict=True)):
            weight.data.zero_()
            weight.grad = gradient.clone()
            optimizer.step()
            if step >= before + after - 100:
                moved[i] += float(weight.detach()[:, ::2].abs().mean())
    return moved[1] / moved[0]


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("networks", nargs="*", default=["flights", "unet", "bert", "seresnext"])
    parser.add_argument("--out", type=Path, default=Path("preamp-bench/rivals.json"))
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    result: dict[str, Any] = {"schema": "preamp-bench/1", "suite": "rivals"}
    result["environment"] = environment(torch.device("cpu"))
    result["bytes"] = [{"name": name, "bytes": bytes_of(name), "counted": True} for name in WAYS]
    result["bytes"] += [{"name": name, "bytes": told, "counted": False} for name, told in TOLD.items()]
    kinds = {name: make for name, (_, make, _) in WAYS.items() if "bit" in name and "master" not in name}
    kinds |= {"FlashOptim, its codes": FlashOptimsCodes, "8-bit states": partial(AdamW, states="8bit")}
    result["steps"] = [{"name": name, "length": frozen(make)} for name, make in kinds.items()]
    result["rows"] = []
    print(json.dumps(result, indent=1), flush=True)
    for network in arguments.networks:
        for name, (policy, make, options) in WAYS.items():
            if name in IN_OPTIONS:
                continue
            losses = [train(network, policy, seed, make, **options) for seed in range(3)]
            result["rows"].append({"network": network, "name": name, "losses": losses})
            print(network, name, losses, flush=True)
            arguments.out.parent.mkdir(parents=True, exist_ok=True)
            arguments.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
