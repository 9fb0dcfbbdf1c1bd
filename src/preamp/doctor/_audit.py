"""What is really running: dtypes of results, of what is held in memory, TF32, and which products fill tensor cores."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..formats import FORMATS, format_of, name_of
from ..report import Column, Section, Table
from ..tree import tensors
from ._finite import values_here
from ._lint_shapes import Product, ProductWatcher, dimensions, misfits
from ._live import Live
from ._names import Names

_KNOWN = frozenset(one.dtype for one in FORMATS)
_MIB = 1 << 20
SHOWN = 60
"""Products on the page, those with most FLOPs; `report.json` has them all."""


def tf32() -> dict[str, bool]:
    """Whether float32 products may be rounded to TF32 on the way in: matrix products, and cuDNN's own."""
    cuda: Any = torch.backends.cuda.matmul
    cudnn: Any = torch.backends.cudnn
    if hasattr(cuda, "fp32_precision"):  # torch 2.9; asking for the older flags after setting a new one raises
        return {"matmul": cuda.fp32_precision == "tf32", "cudnn": cudnn.conv.fp32_precision == "tf32"}
    return {"matmul": bool(cuda.allow_tf32), "cudnn": bool(cudnn.allow_tf32)}


class Held:
    """What lies in memory around a step, by kind, dtype and device: numbers and bytes."""

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


def products(watcher: ProductWatcher, modules: Mapping[str, nn.Module]) -> list[dict[str, Any]]:
    """Every kind of matrix product and convolution of a forward pass: shape, dtype, share, tensor cores; largest first.

    `fills`: whether NVIDIA's tensor cores run it at full speed, by its dtype and the multiples that they want of its
    dimensions; `why` says what keeps them. Devices that have no such cores are judged alike.
    """
    flags = tf32()
    told = []
    for product in sorted(watcher.products.values(), key=lambda one: -one.flops):
        module = None if product.module is None else modules.get(product.module)
        dims = dimensions(product, module)
        why = _why_not(product, dims, flags)
        told.append({
            "module": product.module, "op": product.op, "dtype": name_of(product.dtype),
            "shape": dict(dims or product.dims),
            "share": product.flops / watcher.total if watcher.total else 0.0, "fills": why is None, "why": why,
        })  # fmt: skip
    return told


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


def seen(live: Live, names: Names) -> dict[str, Any]:
    """The record of a step's forward pass."""
    parameters: Counter[str] = Counter()
    for parameter in names.parameters():
        parameters[str(parameter.dtype).removeprefix("torch.")] += parameter.numel()
    return {
        "outputs": {path: dict(counts) for path, counts in live.dtypes.items()},
        "flops": live.products.total, "low_share": live.products.low_share,
        "low": sorted(str(dtype).removeprefix("torch.") for dtype in live.low),
        "parameters": dict(parameters), "tf32": tf32(), "products": products(live.products, dict(names.items())),
    }  # fmt: skip


def section(audit: Mapping[str, Any] | None, held: Mapping[str, Any] | None) -> Section | None:
    """What really ran, as a part of the report."""
    if not audit:
        return None
    share = audit["low_share"]
    text = f"What really ran in step {audit['step']}."
    if share is not None:
        text += f" {share:.0%} of the FLOPs of its matrix products and convolutions ran in 16 bits."
    on = [name for name, value in audit["tf32"].items() if value]
    text += f" TF32 for float32 on NVIDIA GPUs: {', '.join(on) or 'off'}."
    tables = [_held_table(held), _product_table(audit["products"]), _output_table(audit["outputs"])]
    return Section("Really running", text, [table for table in tables if table is not None])


def _held_table(held: Mapping[str, Any] | None) -> Table | None:
    if not held or not held["rows"]:
        return None
    rows = [(r["kind"], r["dtype"], r["device"], r["numbers"], r["bytes"] / _MIB) for r in held["rows"]]
    columns = ("what", "dtype", "device", Column("numbers", digits=0), Column("memory", "MiB", digits=2))
    return Table(f"Held in memory around step {held['step']}", columns, rows)


def _product_table(told: list[dict[str, Any]]) -> Table | None:
    """Products of one shape and kind in one row: a network has many like layers."""
    if not told:
        return None
    alike: dict[Any, list[dict[str, Any]]] = {}
    for one in told:
        alike.setdefault((one["op"], one["dtype"], tuple(one["shape"].items()), one["why"]), []).append(one)
    rows = []
    for (op, dtype, shape, why), same in sorted(alike.items(), key=lambda item: -sum(o["share"] for o in item[1])):
        more = f" and {len(same) - 1} more" if len(same) > 1 else ""
        where = (same[0]["module"] or "(outside of a module)") + more
        sizes = ", ".join(f"{name} {size}" for name, size in shape)
        share = f"{sum(one['share'] for one in same):.1%}"
        rows.append((where, op, dtype, sizes, share, "yes" if why is None else f"no: {why}"))
    left = len(rows) - SHOWN
    return Table(
        "Matrix products and convolutions", ("module", "operator", "dtype", "shape", "of FLOPs", "fills tensor cores"),
        rows[:SHOWN], notes=(f"{left} more kinds have fewer FLOPs",) if left > 0 else (),
    )  # fmt: skip


def _output_table(outputs: Mapping[str, Mapping[str, int]]) -> Table:
    dtypes = sorted({name for counts in outputs.values() for name in counts})
    rows: list[tuple[str | int, ...]] = [
        (path or "(root)", *(counts.get(name, 0) for name in dtypes)) for path, counts in outputs.items()
    ]
    return Table("Results by module and dtype", ("module", *dtypes), rows)
