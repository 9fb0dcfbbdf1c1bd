"""The steps as functions of lists and numbers, as tests are best written."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from preamp import kernels
from preamp.kernels import Storage
from preamp.kernels.bits import chances_like, round_stochastically
from preamp.kernels.eight_bit import blocks_of, dequantize, quantize

__all__ = ["blocks_of", "chances_like", "dequantize", "join", "quantize", "round_stochastically", "split"]

Tensors = Sequence[Tensor]
Copies = Tensors | None
join, split = kernels.join, kernels.split


def _options(kind: Any, options: dict[str, Any]) -> Any:
    if issubclass(kind, kernels.AdamOptions):
        options = {
            **{name: value for name, value in options.items() if name not in ("beta1", "beta2", "decoupled")},
            "betas": (options["beta1"], options["beta2"]), "decoupled_weight_decay": options["decoupled"],
        }  # fmt: skip
    return kind(**options)


def adam_(
    params: Tensors, grads: Tensors, first: Tensors, second: Tensors, most: Tensors, copies: Copies, step: Tensor,
    **options: Any,
) -> None:  # fmt: skip
    storage = Storage(params, (first, second, most), step, copies)
    kernels.adam(storage, grads, _options(kernels.AdamOptions, options))


def adam_split_(
    params: Tensors, bits: Tensors, grads: Tensors, first: Tensors, second: Tensors, most: Tensors, step: Tensor,
    **options: Any,
) -> None:  # fmt: skip
    storage = Storage(params, (first, second, most), step, bits=bits)
    kernels.adam(storage, grads, _options(kernels.AdamOptions, options))


def adam_stochastic_(
    params: Tensors, grads: Tensors, first: Tensors, second: Tensors, most: Tensors, step: Tensor, *, seed: int,
    **options: Any,
) -> None:  # fmt: skip
    o = _options(kernels.AdamOptions, {**options, "seed": seed, "stochastic_rounding": True})
    kernels.adam(Storage(params, (first, second, most), step), grads, o)


def adam_8bit_(
    params: Tensors, grads: Tensors, first: Tensors, first_scales: Tensors, second: Tensors, second_scales: Tensors,
    copies: Copies, step: Tensor, *, bits: Tensors | None = None, stochastic: bool = False, **options: Any,
) -> None:  # fmt: skip
    storage = Storage(params, (first, second, first_scales, second_scales), step, copies, bits)
    kernels.adam_8bit(storage, grads, _options(kernels.AdamOptions, {**options, "stochastic_rounding": stochastic}))


def sgd_(
    params: Tensors, grads: Tensors, buffers: Tensors, copies: Copies, *,
    step: Tensor | None = None, bits: Tensors | None = None, **options: Any,
) -> None:  # fmt: skip
    storage = Storage(params, (buffers,), step, copies, bits)
    kernels.sgd(storage, grads, _options(kernels.SGDOptions, options))


def adagrad_(
    params: Tensors, grads: Tensors, sums: Tensors, copies: Copies, step: Tensor,
    **options: Any,
) -> None:  # fmt: skip
    storage = Storage(params, (sums,), step, copies)
    kernels.adagrad(storage, grads, _options(kernels.AdagradOptions, options))


def lamb_(
    params: Tensors, grads: Tensors, first: Tensors, second: Tensors, copies: Copies, step: Tensor, **options: Any
) -> None:
    storage = Storage(params, (first, second), step, copies)
    kernels.lamb(storage, grads, _options(kernels.LambOptions, options))


def lion_(
    params: Tensors, grads: Tensors, first: Tensors, copies: Copies, step: Tensor | None, *,
    bits: Tensors | None = None, **options: Any,
) -> None:  # fmt: skip
    kernels.lion(Storage(params, (first,), step, copies, bits), grads, _options(kernels.LionOptions, options))


def muon_(
    params: Tensors, grads: Tensors, first: Tensors, copies: Copies, step: Tensor | None, *,
    bits: Tensors | None = None, **options: Any,
) -> None:  # fmt: skip
    kernels.muon(Storage(params, (first,), step, copies, bits), grads, _options(kernels.MuonOptions, options))


def novograd_(
    params: Tensors, grads: Tensors, first: Tensors, norms: Tensor, copies: Copies, step: Tensor, **options: Any
) -> None:
    storage = Storage(params, (first, [norms]), step, copies)
    kernels.novograd(storage, grads, _options(kernels.NovoGradOptions, options))
