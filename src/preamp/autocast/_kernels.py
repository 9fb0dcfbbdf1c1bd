"""Kernels for the autocast dispatch key, one builder a category of rules.

A kernel gets the operator's arguments, casts what its category says, and calls the operator with the autocast key
excluded, so that the parts of a composite operator are not ruled again: exactly what torch's own kernels do in C++.
Casts happen above autograd, so gradients flow back through them to the dtype they came from.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial, reduce
from typing import Any

import torch
from torch import Tensor

from ..formats import LOW_DTYPES
from ..rules import autocast_key
from ..tree import CASTABLE, tensors

Kernel = Callable[..., Any]
Cast = Callable[[Any], Any]


def build(op: Any, category: str, device_type: str) -> Kernel:
    """The kernel of an operator overload (`torch.ops.aten.mm.default`) for a category, on a device type."""
    return _BUILDERS[category](op, device_type)


def _as_is(op: Any, device_type: str) -> Kernel:
    call = _calling(op, device_type)
    return lambda *args, **kwargs: call(_leave, args, kwargs)


def _full(op: Any, device_type: str) -> Kernel:
    call, run = _calling(op, device_type), _quickest(op)
    to_float = _caster(device_type, LOW_DTYPES, torch.float32)
    keys, exclude = _autocast_keys(device_type), torch._C._ExcludeDispatchKeyGuard
    reads_float32 = op.overloadpacket is torch.ops.aten.linalg_matrix_norm  # whatever dtype it is asked for

    def full(*args: Any, **kwargs: Any) -> Any:
        return call(to_float, args, kwargs)

    def full_of_tensors(*args: Any) -> Any:
        """For operators called dozens of times a step, usually with nothing to cast: norms of a float32 stream."""
        for value in args:
            if isinstance(value, Tensor) and value.dtype in LOW_DTYPES:
                return call(to_float, args, {})
        with exclude(keys):
            return run(*args)

    def full_cross_entropy(input: Tensor, target: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Of classes, without smoothing: log_softmax on CUDA reads float16 and writes float32, with no copy between."""
        of_classes = not kwargs and len(args) <= 3 and input.shape != target.shape
        if not of_classes or input.dtype is not torch.float16 or input.device.type != device_type:
            return full(input, target, *args, **kwargs)
        with exclude(keys):
            logs = torch.log_softmax(input, min(input.dim() - 1, 1), torch.float32)
            return torch.ops.aten.nll_loss_nd.default(logs, target, *map(to_float, args))

    arguments = op._schema.arguments
    written = [argument.alias_info is not None and argument.alias_info.is_write for argument in arguments]
    position = next((i for i, argument in enumerate(arguments) if argument.name == "dtype"), None)

    def full_beside(*args: Any, **kwargs: Any) -> Any:
        """For what also writes: a cast of those would take what is written."""
        cast = [value if kept else to_float(value) for value, kept in zip(args, written, strict=False)]
        return call(_leave, cast, {name: to_float(value) for name, value in kwargs.items()})

    if any(written):
        return full_beside
    if op is torch.ops.aten.cross_entropy_loss.default and device_type == "cuda":
        return full_cross_entropy
    if position is None:
        return full if run is op else full_of_tensors
    keyword_only = arguments[position].kwarg_only

    def full_by_dtype(*args: Any, **kwargs: Any) -> Any:
        """For softmax, sum, ...: they convert while they read, which spares a float32 copy of the input."""
        by_keyword = keyword_only or len(args) <= position
        given = kwargs.get("dtype") if by_keyword else args[position]
        if given is None and isinstance(args[0], Tensor) and args[0].dtype in LOW_DTYPES:
            if reads_float32:
                args = (args[0].float(), *args[1:])
            elif by_keyword:
                kwargs["dtype"] = torch.float32
            else:
                args = (*args[:position], torch.float32, *args[position + 1 :])
        with exclude(keys):
            return run(*args, **kwargs)

    return full_by_dtype


def _quickest(op: Any) -> Kernel:
    """The fastest way to call an operator: torch's own binding, which parses arguments in half the time, for the few
    that a step calls often and whose binding takes the operator's arguments unchanged.
    """
    name = str(op).removeprefix("aten.").removesuffix(".default")
    quickest: Kernel = getattr(torch._C._VariableFunctions, name.split(".")[0]) if name in _OFTEN else op
    return quickest


_OFTEN = ("layer_norm", "group_norm", "rms_norm", "softmax.int", "log_softmax.int", "exp", "log", "pow.Tensor_Scalar")


def _plain_low(op: Any, device_type: str) -> Kernel:
    call = _calling(op, device_type)
    return lambda *args, **kwargs: call(_to_low(device_type), args, kwargs)


def _to_low(device_type: str) -> Cast:
    return _caster(device_type, CASTABLE, torch.get_autocast_dtype(device_type))


def _low(op: Any, device_type: str) -> Kernel:
    low = _plain_low(op, device_type)

    def low_cell(input: Tensor, state: Any, *weights: Any, **kwargs: Any) -> Any:
        """For lstm_cell and its kin: its parts stay under autocast, whose cache casts a weight once, not every step."""
        to_low = _to_low(device_type)
        return op.decompose(to_low(input), to_low(state), *weights, **kwargs)

    def low_vecdot(x: Tensor, y: Tensor, *, dim: int = -1) -> Any:
        """As a matrix product: torch rounds each term to 16 bits before it adds them."""
        to_low = _to_low(device_type)
        if x.is_complex() or y.is_complex() or (x.dim() != y.dim() and dim != -1):
            return low(x, y, dim=dim)
        with torch._C._ExcludeDispatchKeyGuard(_autocast_keys(device_type)):
            rows, columns = to_low(x).movedim(dim, -1).unsqueeze(-2), to_low(y).movedim(dim, -1).unsqueeze(-1)
            return (rows @ columns).squeeze(-1).squeeze(-1)

    name = str(op).split(".")[1]
    if name == "linalg_vecdot" and device_type == "cpu":
        return low_vecdot
    return low_cell if name in _CELLS else low


_CELLS = ("lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell")


def _promote(op: Any, device_type: str) -> Kernel:
    call = _calling(op, device_type)

    def promote(*args: Any, **kwargs: Any) -> Any:
        found = {t.dtype for t in tensors((args, kwargs)) if t.dtype in CASTABLE and t.device.type == device_type}
        if len(found) < 2:
            return call(_leave, args, kwargs)
        return call(_caster(device_type, CASTABLE, reduce(torch.promote_types, found)), args, kwargs)

    def into_its_dtype(first: Tensor, *args: Any, **kwargs: Any) -> Any:
        """For what writes its first argument in place, or looks values up in it."""
        kept = first.dtype if first.is_floating_point() else None
        cast = _leave if kept is None else _caster(device_type, CASTABLE, kept)
        return call(cast, (first, *args), kwargs)

    written = op._schema.arguments[0].alias_info
    if (written is not None and written.is_write) or op.overloadpacket is torch.ops.aten.embedding_bag:
        return into_its_dtype
    return promote


def _promote_one_dtype(op: Any, device_type: str) -> Kernel:
    """Torch's own on the CPU: float32 wins over the region's dtype, and the other 16-bit one is an error where it comes
    before any float32.
    """
    call = _calling(op, device_type)

    def promote_one_dtype(*args: Any, **kwargs: Any) -> Any:
        low = widest = torch.get_autocast_dtype(device_type)
        for tensor in tensors((args, kwargs)):
            if tensor.dtype not in CASTABLE or tensor.device.type != device_type:
                continue
            if torch.float32 in (tensor.dtype, widest):
                widest = torch.float32
            elif tensor.dtype is not low:
                raise RuntimeError("Unexpected floating ScalarType in at::autocast::prioritize")
        return call(_caster(device_type, CASTABLE, widest), args, kwargs)

    return promote_one_dtype


def _banned(op: Any, device_type: str, always: bool = False) -> Kernel:
    call = _calling(op, device_type)

    def banned(*args: Any, **kwargs: Any) -> Any:
        if always:
            raise RuntimeError(_ban_message(op, "torch.autocast refuses it on this device whatever its inputs"))
        for tensor in tensors((args, kwargs)):
            if tensor.dtype in LOW_DTYPES:
                raise RuntimeError(_ban_message(op, f"an input is {str(tensor.dtype).removeprefix('torch.')}"))
        return call(_leave, args, kwargs)

    return banned


def _ban_message(op: Any, seen: str) -> str:
    name = str(op).split(".")[1]
    advice = (
        "A 16-bit probability rounds to exactly 0 or 1, whose logarithm is infinite. Leave the sigmoid out and use "
        "binary_cross_entropy_with_logits (torch.nn.BCEWithLogitsLoss), or call .float() on the probabilities."
        if name == "binary_cross_entropy"
        else "Cast its inputs with .float(), or lift the ban: OpRules().with_full(...)."
    )
    return f"{name} is banned in a 16-bit autocast region: {seen}. {advice}"


_BUILDERS: dict[str, Callable[[Any, str], Kernel]] = {
    "as-is": _as_is,
    "full": _full,
    "low": _low,
    "plain low": _plain_low,
    "promote": _promote,
    "promote one dtype": _promote_one_dtype,
    "banned": _banned,
    "refused": partial(_banned, always=True),
}


def _autocast_keys(device_type: str) -> Any:
    return torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, autocast_key(device_type)))


def _calling(op: Any, device_type: str) -> Callable[[Cast, Any, Any], Any]:
    """A function that calls `op` outside autocast with its arguments cast."""
    keys, exclude = _autocast_keys(device_type), torch._C._ExcludeDispatchKeyGuard

    def call(cast: Cast, args: Any, kwargs: Any) -> Any:
        if cast is not _leave:
            args = [cast(argument) for argument in args]
            if kwargs:
                kwargs = {name: cast(argument) for name, argument in kwargs.items()}
        with exclude(keys):
            return op(*args, **kwargs)

    return call


def _caster(device_type: str, sources: Collection[torch.dtype], target: torch.dtype) -> Cast:
    """Casts tensors of the source dtypes on the device, alone or in lists; float64 and integers are never touched."""

    def cast(value: Any) -> Any:
        if isinstance(value, Tensor):
            if value.dtype in sources and value.dtype is not target and value.device.type == device_type:
                return value.to(target)
            return value
        if isinstance(value, (list, tuple)):
            return type(value)(cast(item) for item in value)
        return value

    return cast


def _leave(value: Any) -> Any:
    return value
