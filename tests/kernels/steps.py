"""Runs of the fused steps that tests of every kind of device share."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from preamp.kernels import dispatch

from . import calls as fused
from . import plain

COMMON: dict[str, Any] = {"lr": 1e-2, "maximize": False}
ADAM = {**COMMON, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.0, "decoupled": False, "amsgrad": False}
SGD = {**COMMON, "momentum": 0.9, "dampening": 0.0, "weight_decay": 0.0, "nesterov": False}
ADAGRAD = {**COMMON, "lr_decay": 0.0, "weight_decay": 0.0, "eps": 1e-10}
LAMB = {
    **COMMON, "betas": (0.9, 0.999), "eps": 1e-6, "weight_decay": 0.01, "bias_correction": True,
    "grad_averaging": True, "adam_w_mode": True, "max_grad_norm": 1.0, "use_nvlamb": False,
}  # fmt: skip
NOVOGRAD = {
    **COMMON, "betas": (0.95, 0.98), "eps": 1e-8, "weight_decay": 0.0, "bias_correction": True,
    "grad_averaging": True, "reg_inside_moment": False, "norm_type": 2, "init_zero": False,
}  # fmt: skip
LION = {**COMMON, "betas": (0.9, 0.99), "weight_decay": 0.0}

SETTINGS: list[tuple[str, dict[str, Any]]] = [
    ("adam", ADAM),
    ("adam", {**ADAM, "weight_decay": 0.1, "maximize": True}),
    ("adam", {**ADAM, "weight_decay": 0.1, "decoupled": True, "amsgrad": True, "beta1": 0.0}),
    ("sgd", {**SGD, "momentum": 0.0, "weight_decay": 0.1}),
    ("sgd", {**SGD, "dampening": 0.3, "maximize": True}),
    ("sgd", {**SGD, "nesterov": True, "weight_decay": 0.01}),
    ("adagrad", ADAGRAD),
    ("adagrad", {**ADAGRAD, "lr_decay": 0.1, "weight_decay": 0.1, "maximize": True}),
    ("lamb", LAMB),
    ("lamb", {**LAMB, "weight_decay": 0.0, "max_grad_norm": None, "maximize": True, "grad_averaging": False}),
    ("lamb", {**LAMB, "adam_w_mode": False, "use_nvlamb": True, "bias_correction": False}),
    ("novograd", NOVOGRAD),
    ("novograd", {**NOVOGRAD, "weight_decay": 0.1, "init_zero": True, "grad_averaging": False, "maximize": True}),
    (
        "novograd",
        {**NOVOGRAD, "weight_decay": 0.1, "reg_inside_moment": True, "norm_type": 0, "bias_correction": False},
    ),
    ("lion", LION),
    ("lion", {**LION, "weight_decay": 0.1, "betas": (0.95, 0.98), "maximize": True}),
]
WITH_KERNELS = [(name, options) for name, options in SETTINGS if name in ("adam", "sgd", "adagrad")]
"""Those that Triton has kernels for."""
NAMES = [f"{name}-{i}" for i, (name, _) in enumerate(SETTINGS)]
PLAIN = {
    "adam": plain.Adam, "sgd": plain.SGD, "adagrad": plain.Adagrad, "lamb": plain.Lamb, "novograd": plain.NovoGrad,
    "lion": plain.Lion,
}  # fmt: skip


@dataclass
class Run:
    """Parameters with the states of one optimizer, stepped by `preamp.fused`."""

    name: str
    options: dict[str, Any]
    params: list[Tensor]
    lows: list[Tensor] | None = None
    states: list[list[Tensor]] = field(init=False)
    step: Tensor = field(init=False)
    norms: Tensor = field(init=False)
    first: bool = True

    def __post_init__(self) -> None:
        device = self.params[0].device
        self.step = torch.zeros((), device=device)
        self.norms = torch.full((len(self.params),), 7.0, device=device)  # what it holds at first does not matter
        count = {"adam": 3 if self.options.get("amsgrad") else 2, "lamb": 2}.get(self.name, 1)
        self.states = [[torch.zeros_like(p) for p in self.params] for _ in range(count)]

    def take(self, grads: Sequence[Tensor], factor: Tensor | None = None, found: Tensor | None = None) -> None:
        o = {**self.options, "factor": factor, "found": found}
        p, s, lows = self.params, self.states, self.lows
        if self.name == "adam":
            fused.adam_(p, grads, s[0], s[1], s[2] if len(s) > 2 else [], lows, self.step, **o)
        elif self.name == "sgd":
            fused.sgd_(p, grads, s[0] if o["momentum"] else [], lows, first=self.first, **o)
            self.first = False
        elif self.name == "adagrad":
            fused.adagrad_(p, grads, s[0], lows, self.step, **o)
        elif self.name == "lamb":
            fused.lamb_(p, grads, s[0], s[1], lows, self.step, **o)
        elif self.name == "lion":
            fused.lion_(p, grads, s[0], lows, self.step, **o)
        else:
            fused.novograd_(p, grads, s[0], self.norms, lows, self.step, **o)

    def everything(self) -> list[Tensor]:
        """All that a step may write."""
        return [*self.params, *(self.lows or []), *(t for state in self.states for t in state), self.step, self.norms]

    def twin(self) -> Run:
        """An independent copy, strides and alignment kept: other alignment is another kernel, with other sums."""
        lows = None if self.lows is None else list(map(cloned, self.lows))
        copy = Run(self.name, self.options, list(map(cloned, self.params)), lows, first=self.first)
        for mine, theirs in zip(self.states, copy.states, strict=True):
            for a, b in zip(mine, theirs, strict=True):
                b.copy_(a)
        copy.step.copy_(self.step)
        copy.norms.copy_(self.norms)
        return copy


def cloned(tensor: Tensor) -> Tensor:
    """A copy that begins as far from an aligned address as the tensor does."""
    if not tensor.data_ptr() % 16:
        return tensor.clone()
    offset = tensor.data_ptr() % 16 // tensor.element_size()
    flat = tensor.new_empty(offset + tensor.numel())[offset:]
    return flat.as_strided(tensor.shape, torch.empty_like(tensor).stride()).copy_(tensor)


@contextmanager
def by_operators() -> Iterator[None]:
    """Let torch's operators do every step, even where Triton runs.

    On CUDA the plain ones: torch's fused Adam computes 1 - beta2 in float32 there, and second moments are 1e-5 off.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dispatch, "triton_runs_on", lambda device: False)
        has_kernel = dispatch._has_kernel
        patch.setattr(dispatch, "_has_kernel", lambda name, device: device != "cuda" and has_kernel(name, device))
        yield


def awkward(device: str = "cpu", scale: int = 1) -> list[Tensor]:
    """Parameters of all kinds of layout: none, one, odd and many elements, flat views off alignment, channels_last."""
    torch.manual_seed(1)
    flat = torch.randn(40 * scale, device=device)
    weight = torch.randn(4, 3, 5, 5, device=device).to(memory_format=torch.channels_last)
    return [
        torch.randn(0, device=device), torch.randn(1, device=device), torch.randn(17, 61 * scale, device=device),
        torch.randn(1024 * scale, device=device), flat[1 : 39 * scale], weight, torch.randn((), device=device),
        torch.randn(6, 10, device=device).t(), torch.randn(9, 8, device=device)[:, ::2],
    ]  # fmt: skip


def gradients(params: Sequence[Tensor], dtype: torch.dtype, seed: int, *, same_layout: bool = True) -> list[Tensor]:
    """Normal numbers in the shapes of `params`, and in their memory order or in another."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for p in params:
        values = torch.randn(p.shape, generator=generator, device="cpu").to(p.device, dtype)
        made.append(torch.empty_like(p, dtype=dtype).copy_(values) if same_layout else values)
    return made


CANCELLED = 2.0**-11
"""The share of entries whose gradient may be nothing but rounding, less than one of each chunk; 2e-4 were seen."""


def far(got: Sequence[Tensor], wanted: Sequence[Tensor], *, but: float = 0.0) -> float:
    """The largest distance in units of float32's epsilon times max(1, magnitude).

    `but`: a share of the entries that may be farther off. Where weight decay takes all of a gradient away but its
    rounding, which a contracted product and sum have another of, Adam makes a step of that as of any other gradient.
    """
    gaps = [torch.zeros(1, dtype=torch.float64, device="cpu")]
    for a, b in zip(got, wanted, strict=True):
        gap = (a.double() - b.double()).abs() / b.double().abs().clamp_min(1.0)
        assert not gap.isnan().any()
        gaps.append(gap.flatten().cpu())
    every = torch.cat(gaps)
    return float(every.topk(1 + int(but * len(every))).values[-1]) / 2**-23


def check_kernels(
    name: str, options: dict[str, Any], low: torch.dtype | None, params: list[Tensor], *, ulp: int, but: float = 0.0
) -> None:
    """Five steps by kernels end where operators end, but for so many units in the last place."""
    run = Run(name, options, params, [p.to(low) for p in params] if low else None)
    twin = run.twin()
    none = torch.zeros((), device=params[0].device)
    for i, factor in enumerate([None, 0.25, 0.3, 2.0**-16, 1.0]):
        grads = gradients(params, low or torch.float32, i, same_layout=i != 1)
        times = None if factor is None else none + factor
        with by_operators():
            twin.take([g.clone() for g in grads], times, none)
        run.take(grads, times, none if i else None)
    for mine, theirs in zip((run.params, *run.states), (twin.params, *twin.states), strict=True):
        assert far(mine, theirs, but=but) <= ulp
    assert float(run.step) == float(twin.step)
    for p, published in zip(params, run.lows or [], strict=low is not None):
        assert torch.equal(published, p.to(published.dtype))


def check_found_writes_nothing(run: Any, waiting: Callable[[], AbstractContextManager[None]] = nullcontext) -> None:
    """Steps of gradients that are not finite write nothing. `waiting`: for steps that may not wait for the device."""
    half, none, one, many = (torch.tensor(value, device=run.params[0].device) for value in (0.5, 0.0, 1.0, 3.0))
    good, bad = (gradients(run.params, torch.bfloat16, seed) for seed in (0, 1))
    bad[2][3, 3] = torch.inf
    run.take(good, half, none)
    before = [t.clone() for t in run.everything()]
    run.take(bad, half, one)
    with waiting():
        run.take(bad, half, many)
    assert all(map(torch.equal, before, run.everything()))
    with waiting():
        run.take(good, half, none)
