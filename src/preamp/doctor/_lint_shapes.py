"""PA105: dimensions that miss the tensor cores' multiple. PA109: mixed precision asked for and not in effect."""

from __future__ import annotations

import math
import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor, nn

from ..formats import LOW_DTYPES, format_of, name_of
from ..policy import Policy
from ..report.finding import Finding
from ._lint_constants import kept_full
from ._lint_observe import Call, Watcher

_CHECKPOINT = torch.utils.checkpoint.__file__

WEIGHT = 0.05
"""Share of the FLOPs from which a layer's shape is worth a finding."""

Dims = tuple[tuple[str, int], ...]


@dataclass(slots=True)
class Product:
    """All products of one kind that one module computed: FLOPs, and the dimensions that a wider layer would change."""

    module: str | None
    op: str
    dtype: torch.dtype
    dims: Dims
    autocast_on: bool
    place: tuple[str | None, int | None]
    flops: float = 0.0
    trained: bool = False
    """Whether a backward pass goes through one of them: a frozen backbone has no gradients that could underflow."""


@dataclass
class ProductWatcher(Watcher):
    """Counts the FLOPs of matrix products and convolutions, 2 for each multiplication and addition."""

    products: dict[Any, Product] = field(default_factory=dict)

    def after(self, call: Call) -> None:
        """Count one product."""
        measured = _measure(call)
        if measured is None:
            return
        flops, dtype, dims = measured
        key = (call.module, call.base, dtype, dims, call.autocast_on)
        if key not in self.products:
            self.products[key] = Product(call.module, call.base, dtype, dims, call.autocast_on, call.place())
        product = self.products[key]
        product.flops += flops
        product.trained = product.trained or _goes_back(call)

    @property
    def total(self) -> float:
        """FLOPs of the whole run."""
        return sum(p.flops for p in self.products.values())

    @property
    def trained_low(self) -> set[torch.dtype]:
        """16-bit dtypes of the products that a backward pass goes through."""
        return {p.dtype for p in self.products.values() if p.trained and p.dtype in LOW_DTYPES}

    @property
    def low_share(self) -> float | None:
        """Share of the FLOPs that ran in 16 bits; None when there were none."""
        low = sum(p.flops for p in self.products.values() if p.dtype in LOW_DTYPES)
        return low / self.total if self.total else None


def _goes_back(call: Call) -> bool:
    """Whether gradients will be asked for. Reentrant checkpointing hides that: it runs without, and again later."""
    if any(t.requires_grad for t in call.inputs):
        return True
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename == _CHECKPOINT:
            return True
        frame = frame.f_back
    return False


def _measure(call: Call) -> tuple[float, torch.dtype, Dims] | None:
    args, base = call.args, call.base
    if base in ("mm", "bmm") or base in ("addmm", "baddbmm", "_addmm_activation"):
        left, right = args[:2] if base in ("mm", "bmm") else args[1:3]
        return _matmul(left, right)
    if base in ("convolution", "_convolution", "mkldnn_convolution", "cudnn_convolution"):
        return _conv(args[0], args[1], call.out, transposed=base == "convolution" and bool(args[6]))
    if base in ("mkldnn_rnn_layer", "_cudnn_rnn"):
        weights = args[1:3] if base == "mkldnn_rnn_layer" else args[1]
        return _recurrent(args[0], [w for w in weights if w.dim() == 2])
    if base.startswith("_scaled_dot_product") and isinstance(args[0], Tensor) and "backward" not in base:
        query, key, value = args[:3]
        flops = 2.0 * query.numel() * key.shape[-2] + 2.0 * math.prod(query.shape[:-1]) * value.shape[-2:].numel()
        return flops, query.dtype, (("head size", query.shape[-1]),)
    return None


def _matmul(left: Tensor, right: Tensor) -> tuple[float, torch.dtype, Dims]:
    inner, columns = right.shape[-2:]
    # The rows are the batch, which says nothing here: an example is often smaller than a training batch.
    return 2.0 * left.numel() * columns, left.dtype, (("inner", inner), ("columns", columns))


def _recurrent(given: Tensor, weights: list[Tensor]) -> tuple[float, torch.dtype, Dims]:
    """A whole recurrent layer, or several of them, in one kernel: every weight meets every position."""
    positions = given.numel() // given.shape[-1]
    dims = (("input_size", weights[0].shape[1]), ("hidden_size", weights[1].shape[1]))
    return 2.0 * positions * sum(w.numel() for w in weights), given.dtype, dims


def _conv(given: Tensor, weight: Tensor, out: Tensor, *, transposed: bool) -> tuple[float, torch.dtype, Dims]:
    places = given if transposed else out
    flops = 2.0 * weight.numel() * places.shape[0] * math.prod(places.shape[2:])
    first, second = ("in", "out") if transposed else ("out", "in")
    return flops, given.dtype, ((f"{first}_channels", weight.shape[0]), (f"{second}_channels", weight.shape[1]))


def dimensions(product: Product, module: nn.Module | None) -> Dims:
    """What decides whether a product fills tensor cores, in the words of the module that computes it.

    Empty for grouped and depthwise convolutions, which do not run on tensor cores by channel.
    """
    if isinstance(module, nn.modules.conv._ConvNd) and module.groups > 1:
        return ()
    if not isinstance(module, nn.Linear):
        return product.dims
    names = {"inner": "in_features", "columns": "out_features"}
    known = {module.in_features, module.out_features}
    if not {size for _, size in product.dims} <= known:
        return product.dims
    return tuple((names.get(name, name), size) for name, size in product.dims)


def misfits(dims: Dims, dtype: torch.dtype) -> dict[str, int]:
    """The dimensions that are no multiple of what tensor cores want in this dtype."""
    return {name: size for name, size in dims if size % format_of(dtype).multiple}


def unaligned(watcher: ProductWatcher, model: nn.Module) -> Iterator[Finding]:
    """PA105, for what ran in 16 bits with `WEIGHT` or more of the FLOPs. Information: slower, not wrong."""
    modules = dict(model.named_modules())
    missing: dict[tuple[str | None, str, torch.dtype, Dims], list[Product]] = defaultdict(list)
    for product in watcher.products.values():
        if product.dtype in LOW_DTYPES:
            module = None if product.module is None else modules.get(product.module)
            missing[product.module, product.op, product.dtype, dimensions(product, module)].append(product)
    for (path, op, dtype, dims), products in missing.items():
        share = sum(p.flops for p in products) / watcher.total
        odd = misfits(dims, dtype)
        if not odd or share < WEIGHT:
            continue
        multiple = format_of(dtype).multiple
        wanted = {name: -(-size // multiple) * multiple for name, size in odd.items()}
        change = ", ".join(f"{name} {size} to {wanted[name]}" for name, size in odd.items())
        file, line = products[0].place
        yield Finding(
            "PA105", "info",
            f"{op} with {', '.join(f'{n}={s}' for n, s in odd.items())} does not fill NVIDIA's tensor cores, "
            f"which want multiples of {multiple} in {name_of(dtype)}; it is {share:.0%} of the FLOPs",
            module=path, op=op, direction="forward", file=file, line=line,
            evidence={"share of FLOPs": round(share, 3), "dtype": name_of(dtype), "multiple": multiple, **odd},
            fix=f"# pad {change}",
        )  # fmt: skip


def not_in_effect(watcher: ProductWatcher, policy: Policy) -> Iterator[Finding]:
    """PA109: a 16-bit compute dtype, and no product in 16 bits among those that the policy does not keep full."""
    if policy.compute not in LOW_DTYPES:
        return
    products = [p for p in watcher.products.values() if not kept_full(p.module or "", policy)]
    if not products or any(p.dtype in LOW_DTYPES for p in products):
        return
    worst = max(products, key=lambda p: p.flops)
    seen = sorted({name_of(p.dtype) for p in products})
    why, fix = _reason(worst, policy)
    file, line = worst.place
    yield Finding(
        "PA109",
        "warning",
        f"the policy asks for {name_of(policy.compute)}, and all {len(products)} kinds of matmul and conv ran in "
        f"{' and '.join(seen)}: {why}",
        module=worst.module,
        op=worst.op,
        direction="forward",
        file=file,
        line=line,
        evidence={"asked for": name_of(policy.compute), "observed": seen, "autocast on": worst.autocast_on},
        fix=fix,
    )


def _reason(product: Product, policy: Policy) -> tuple[str, str]:
    if product.dtype is torch.float64:
        return "autocast leaves float64 alone", "model.float()  # and inputs: x = x.float()"
    if policy.ops is None:
        return "ops=none makes no autocast regions", f"policy = 'compute={name_of(policy.compute)}'  # without ops=none"
    if not product.autocast_on:
        return "autocast was off where they ran", "# remove torch.autocast(..., enabled=False) from the model's forward"
    return "the rules of its operators keep them full", "# remove the operator rules that say 'full' for matmul or conv"
