"""What is really running: dtypes of results, of what is held in memory, TF32, and which products fill tensor cores."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ...formats import FORMATS, format_of, name_of
from ...tree import tensors
from ..findings.pa105 import misfits
from ..measure import values_here
from ..names import Names
from ..operators import Call, Observer, Product, Products, dimensions

_KNOWN = frozenset(one.dtype for one in FORMATS)


class Outputs(Observer):
    """How many floating results of each dtype each module gave."""

    def __init__(self) -> None:
        self.dtypes: dict[str, Counter[str]] = {}

    def after(self, call: Call) -> None:
        """Count one result."""
        if call.module is not None and isinstance(call.out, Tensor) and call.out.is_floating_point():
            self.dtypes.setdefault(call.module, Counter())[name_of(call.out.dtype)] += 1


def tf32() -> dict[str, bool]:
    """Whether float32 products may be rounded to TF32 on the way in: matrix products, and cuDNN's own."""
    cuda: Any = torch.backends.cuda.matmul
    cudnn: Any = torch.backends.cudnn
    if hasattr(cuda, "fp32_precision"):  # torch 2.9; asking for the older flags after setting a new one raises
        return {"matmul": cuda.fp32_precision == "tf32", "cudnn": cudnn.conv.fp32_precision == "tf32"}
    return {"matmul": bool(cuda.allow_tf32), "cudnn": bool(cudnn.allow_tf32)}


class Held:
    """What is held in memory around a step, by kind, dtype and device: numbers and bytes."""

    def __init__(self) -> None:
        self._counts: dict[tuple[str, str, str], list[int]] = {}
        self._own: set[int] | None = None

    def count(self, kind: str, given: Iterable[Tensor]) -> None:
        """Add tensors of one kind; floating ones are counted, each once."""
        for tensor in {id(t): t for t in given if t.is_floating_point()}.values():
            tensor = values_here(tensor)
            counts = self._counts.setdefault((kind, name_of(tensor.dtype), str(tensor.device)), [0, 0])
            counts[0] += tensor.numel()
            counts[1] += tensor.numel() * tensor.element_size()

    def before_step(self, names: Names) -> None:
        """Parameters and their gradients; more than once where a step is made by way of a scaler."""
        parameters = names.parameters()
        self._counts.clear()
        self.count("parameters", parameters)
        self.count("gradients", (p.grad for p in parameters if p.grad is not None))
        self._own = {id(p) for p in parameters}

    def after_step(self, optimizers: Iterable[Optimizer]) -> None:
        """What optimizers keep, and parameters of theirs that are no model's: masters."""
        if self._own is None:  # the step was given up before it began
            return
        own = self._own
        for optimizer in optimizers:
            groups = optimizer.param_groups
            self.count("master weights", (p for g in groups for p in g["params"] if id(p) not in own))
            kept = list(optimizer.state.values())
            self.count("optimizer state", (t for t in tensors(kept) if t.dim()))  # step counts are numbers

    def rows(self) -> list[dict[str, Any]]:
        """For the record."""
        return [
            {"kind": kind, "dtype": dtype, "device": device, "numbers": numbers, "bytes": size}
            for (kind, dtype, device), (numbers, size) in self._counts.items()
        ]


def product_rows(products: Products, modules: Mapping[str, nn.Module]) -> list[dict[str, Any]]:
    """Every kind of matrix product and convolution of a forward pass: shape, dtype, share, tensor cores; largest first.

    `fills`: whether NVIDIA's tensor cores run it at full speed, by its dtype and the multiples that they want of its
    dimensions; `why` says what keeps them. Devices that have no such cores are judged alike.
    """
    flags = tf32()
    rows = []
    for product in sorted(products.all, key=lambda one: -one.flops):
        module = None if product.module is None else modules.get(product.module)
        dims = dimensions(product, module)
        why = _why_not(product, dims, flags)
        share = product.flops / products.flops if products.flops else 0.0
        facts = {"module": product.module, "op": product.op, "dtype": name_of(product.dtype)}
        rows.append({**facts, "shape": dict(dims or product.dims), "share": share, "fills": why is None, "why": why})
    return rows


def _why_not(product: Product, dims: tuple[tuple[str, int], ...], flags: Mapping[str, bool]) -> str | None:
    dtype = product.dtype
    if dtype not in _KNOWN or dtype is torch.float64:
        return f"{name_of(dtype)}: few GPUs have tensor cores for it"
    if not dims:
        return "grouped convolution"
    if dtype is torch.float32 and not flags["matmul" if "mm" in product.op else "cudnn"]:
        return "float32, and TF32 is off"
    odd = ", ".join(f"{name}={size}" for name, size in misfits(dims, dtype).items())
    return f"{odd}: no multiple of {format_of(dtype).multiple}" if odd else None


def audit(outputs: Outputs, products: Products, names: Names) -> dict[str, Any]:
    """The record of a step's forward pass."""
    parameters: Counter[str] = Counter()
    for parameter in names.parameters():
        parameters[str(parameter.dtype).removeprefix("torch.")] += parameter.numel()
    return {
        "outputs": {path: dict(counts) for path, counts in outputs.dtypes.items()},
        "flops": products.flops,
        "low_share": products.low_share,
        "low": sorted({str(product.dtype).removeprefix("torch.") for product in products.low}),
        "parameters": dict(parameters),
        "tf32": tf32(),
        "products": product_rows(products, dict(names.items())),
    }
