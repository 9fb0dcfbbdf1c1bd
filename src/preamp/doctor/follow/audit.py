"""The operators of one step of a running script, in the dtypes in which they really run, and what is held in memory.

Nothing is changed and nothing is run twice.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ...formats import FORMATS, format_of, name_of
from ...tree import tensors
from ..findings import kinds_of
from ..findings.events import Recomputed
from ..findings.pa105 import misfits
from ..measure import values_here
from ..names import Names
from ..operators import Call, Observer, Product, Products, dimensions
from ..places import UNINITIALISED, Place, key_of, users_line
from ..records import NOWHERE
from ..shadow.execution import Shadowed
from ..shadow.facts import Absorbed, Fact
from .precision import regions_entered
from .run import Run
from .scales import is_well_known

_KNOWN = frozenset(one.dtype for one in FORMATS)
_BOUNDS = frozenset({"clamp", "clamp_min", "clamp_max", "clip", "hardtanh", "tanh"})
"""Operators that mean a size: of a gradient that is too large by a factor they make another one."""


class Outputs(Observer):
    """Counts the floating results of each dtype by module."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: dict[str, Counter[str]] = {}

    def after(self, call: Call) -> None:
        """Count one result."""
        if call.module is None or call.base in UNINITIALISED:
            return
        if isinstance(call.out, Tensor) and call.out.is_floating_point():
            self.dtypes.setdefault(call.module, Counter())[name_of(call.out.dtype)] += 1


class Handled(Observer):
    """What the script does with weights and gradients by operators of its own."""

    everywhere = True

    def __init__(self, names: Names, keeps_casts: Callable[[], bool]) -> None:
        super().__init__()
        self._keeps_casts, self._weights = keeps_casts, {key_of(p): p for p in names.parameters()}
        self.gradients: frozenset[int] = frozenset()
        """Storages of gradients that are still scaled."""
        self.reads: list[Place] = []
        """Where the script computed with them."""
        self.backward_scale = 1.0
        """On the loss that goes back."""
        self.bounded: list[tuple[Place, str]] = []
        """Where a hook of the script's bounds the gradient of a parameter, and by which operator."""
        self.writes: list[tuple[Place, Tensor]] = []
        """Where a weight was changed in place in the forward pass, while casts of it are kept."""

    def before(self, call: Call) -> None:
        """Note one operator. Autograd functions are left to mean what they do."""
        place = call.place
        if place.direction == "forward":
            if self._keeps_casts():
                self.writes += [(place, self._weights[key_of(t)]) for t in call.written if key_of(t) in self._weights]
            if self.gradients and any(key_of(t) in self.gradients for t in tensors((call.args, call.kwargs))):
                self.reads.append(place)
        elif self.backward_scale != 1 and place.own is not None and call.base in _BOUNDS:
            node = torch._C._current_autograd_node()
            if node is not None and node.name() == "torch::autograd::AccumulateGrad":
                self.bounded.append((place, call.base))


class Look:
    """All observers of one step that is looked at operator by operator."""

    def __init__(self, run: Run, keeps_casts: Callable[[], bool]) -> None:
        self.facts: list[Fact] = []
        """What the shadows showed."""
        self.modules = dict(run.names.items())
        self.products, self.outputs, self.handled = Products(), Outputs(), Handled(run.names, keeps_casts)
        self.shadowed = Shadowed(lambda fact, _: self.facts.append(fact), readings=run.tape.readings)
        finders: list[Observer] = [kind() for kind in kinds_of(Observer)]
        self.observers = [*finders, self.products, self.outputs, self.handled, self.shadowed]
        for observer in self.observers:
            observer.begin(self.modules)


def owned(event: Absorbed, run: Run, step: int) -> Absorbed:
    """The same, with its step, the models' parameters and buffers that it is about, and the optimizer's line."""
    names = run.names
    parameters = [p for p in names.parameters() if key_of(p) in event.storages]
    counts = {id(p): event.storages[key_of(p)] for p in parameters}
    stuck = [p for p in parameters if 2 * counts[id(p)][1] >= counts[id(p)][0]]
    module, buffer = names.common(stuck or parameters) if parameters else event.place.module, None
    for path, part in () if parameters else names.items():
        for name, tensor in part._buffers.items():
            if tensor is not None and key_of(tensor) in event.storages:
                module, buffer = path, name
    made_at, optimizer = NOWHERE, event.optimizer
    if optimizer is not None and (event.is_moment or is_well_known(optimizer)):
        made_at = run.place_of(optimizer)
    if event.is_gradient:
        made_at = run.backward_at
    return event._replace(parameters=parameters, module=module, buffer=buffer, made_at=made_at, step=step)


class Recomputation:
    """Follows the autocast region in which each module runs, forward and when it is recomputed."""

    def __init__(self, names: Names) -> None:
        self._names = names
        self._first: dict[nn.Module, tuple[torch.dtype, ...]] = {}
        self._differ: list[Recomputed] = []
        self._hook: Any = nn.modules.module.register_module_forward_pre_hook(self._enter)

    def close(self) -> Iterator[Recomputed]:
        """Let go of torch's global hook; gives the outermost modules that were recomputed otherwise."""
        self._hook.remove()
        return iter(self._differ)

    def _enter(self, module: nn.Module, _: Any) -> None:
        now = tuple(torch.get_autocast_dtype(kind) for kind in regions_entered())
        if torch._C._current_autograd_node() is None:
            self._first.setdefault(module, now)
            return
        before, path = self._first.get(module), self._names.get(module)
        if before is None or before == now or path is None:
            return
        if not any(path == outer.module or path.startswith(f"{outer.module}.") for outer in self._differ):
            self._differ.append(Recomputed(path, before, now, users_line()))


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


def dtypes_of(names: Names) -> dict[str, int]:
    """How many numbers of the parameters have each dtype."""
    found: Counter[str] = Counter()
    for parameter in names.parameters():
        found[str(parameter.dtype).removeprefix("torch.")] += parameter.numel()
    return dict(found)


def audit(outputs: Outputs, products: Products, names: Names, parameters: Mapping[str, int]) -> dict[str, Any]:
    """The record of a step's forward pass; `parameters`: their dtypes then."""
    return {
        "outputs": {path: dict(counts) for path, counts in outputs.dtypes.items()},
        "flops": products.flops,
        "low_share": products.low_share,
        "low": sorted({str(product.dtype).removeprefix("torch.") for product in products.low}),
        "parameters": dict(parameters),
        "tf32": tf32(),
        "products": product_rows(products, dict(names.items())),
    }
