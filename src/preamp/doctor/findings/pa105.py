"""PA105: dimensions that miss the tensor cores."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping

import torch
from torch import nn

from ...formats import format_of, name_of
from ...report import Finding
from ..operators import Dims, Product, Products, dimensions
from .check import Check, on
from .events import Examined, Observed

WEIGHT = 0.05
"""Share of the FLOPs from which a layer's shape is worth a finding."""


class PA105(Check):
    """16-bit products whose dimensions are no multiples of what tensor cores want. Information: slower, not wrong."""

    @on(Examined)
    def examined(self, event: Examined) -> Iterator[Finding]:
        """Products of a trial run."""
        if event.products is not None:
            yield from self._unaligned(event.products, dict(event.model.named_modules()))

    @on(Observed)
    def observed(self, event: Observed) -> Iterator[Finding]:
        """Products of a step."""
        yield from self._unaligned(event.products, event.modules)

    def _unaligned(self, products: Products, modules: Mapping[str, nn.Module]) -> Iterator[Finding]:
        alike: dict[tuple[str | None, str, torch.dtype, Dims], list[Product]] = defaultdict(list)
        for product in products.low:
            module = None if product.module is None else modules.get(product.module)
            alike[product.module, product.op, product.dtype, dimensions(product, module)].append(product)
        for (path, op, dtype, dims), same in alike.items():
            share = sum(product.flops for product in same) / max(products.flops, 1.0)  # none in an empty batch
            multiple = format_of(dtype).multiple
            odd = {name: size for name, size in dims if size % multiple}
            if not odd or share < WEIGHT:
                continue
            change = ", ".join(f"{name} {size} to {-(-size // multiple) * multiple}" for name, size in odd.items())
            yield self.finding(
                "info",
                f"{op} with {', '.join(f'{n}={s}' for n, s in odd.items())} does not fill NVIDIA's tensor cores, "
                f"which want multiples of {multiple} in {name_of(dtype)}; it is {share:.0%} of the FLOPs",
                f"# pad {change}",
                module=path,
                op=op,
                direction="forward",
                at=same[0].at,
                evidence={"share of FLOPs": round(share, 3), "dtype": name_of(dtype), "multiple": multiple, **odd},
            )
