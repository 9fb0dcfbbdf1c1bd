"""The elementwise steps as Triton kernels: Adam on three kinds of masters, gradient descent, Adagrad."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..storage import AdagradOptions, AdamOptions, Options, RoundedOptions, SGDOptions, Storage, Tensors
from .launch import (
    FACTOR,
    GO,
    KEEP,
    KEY,
    RATE,
    ROOT,
    address,
    chunk_of,
    launch,
    mix,
    on,
    parts,
    prepare,
    put,
    take,
    type_of_copies,
    wrote,
)

PLAIN = tl.constexpr(0)  # float32 parameters
SPLIT = tl.constexpr(1)  # bfloat16 weights and the 16 bits that make them float32
STOCHASTIC = tl.constexpr(2)  # bfloat16 weights, rounded stochastically
SPLIT24 = tl.constexpr(3)  # bfloat16 weights and 8 bits more, rounded stochastically
DRAWS = (STOCHASTIC, SPLIT24)
"""The kinds whose steps need random numbers."""


def adam(storage: Storage, gradients: Tensors, o: AdamOptions) -> None:
    """Adam on float32 parameters, on split ones, or on bfloat16 ones with stochastic rounding."""
    kind = kind_of(storage)
    with on(storage.params[0].device):
        scalars = adam_numbers(storage, o, o.seed if kind in DRAWS else None)
        for grad, part in parts(storage, gradients):
            launch(
                adam_kernel, part, (scalars,), adam_constants(o), GRAD=grad, LOW=type_of_copies(storage),
                KIND=int(kind.value), DECAY=decay_of(o), AMSGRAD=o.amsgrad,
            )  # fmt: skip
    wrote(storage)


def kind_of(storage: Storage) -> tl.constexpr:
    """The kernels' code for the kind of parameters."""
    if storage.bits:
        return SPLIT if storage.bits[0].dtype is torch.int16 else SPLIT24
    return PLAIN if storage.params[0].dtype is torch.float32 else STOCHASTIC


def adam_numbers(storage: Storage, o: AdamOptions, seed: int | None) -> Tensor:
    """The numbers of a step of Adam. `seed`: for stochastic rounding."""
    decay = o.weight_decay if o.decoupled_weight_decay else 0.0
    return prepare(
        storage.params[0].device, o, storage.step, betas=(float(o.betas[0]), float(o.betas[1])),
        decay=decay, seed=seed,
    )  # fmt: skip


def adam_constants(o: AdamOptions) -> tuple[float, ...]:
    """The arguments of Adam's kernels after the table."""
    beta1, beta2 = o.betas
    return tuple(map(float, (1 - beta1, beta2, 1 - beta2, o.eps, o.weight_decay)))


def decay_of(o: AdamOptions) -> int:
    """The kernels' code for weight decay: none (0), in the gradient (1), decoupled (2)."""
    return (2 if o.decoupled_weight_decay else 1) if o.weight_decay else 0


def sgd(storage: Storage, gradients: Tensors, o: SGDOptions) -> None:
    """Gradient descent with momentum."""
    rule = 0 if not o.momentum else 1 if o.first else 2
    numbers = (o.weight_decay, o.momentum, 1 - o.dampening, 0.0)
    _simple(rule, storage, gradients, o, numbers, nesterov=o.nesterov)


def adagrad(storage: Storage, gradients: Tensors, o: AdagradOptions) -> None:
    """Adagrad."""
    _simple(3, storage, gradients, o, (o.weight_decay, 0.0, 0.0, o.eps), slowing=o.lr_decay)


def _simple(
    rule: int, storage: Storage, gradients: Tensors, o: Options, numbers: tuple[float, ...], *, nesterov: bool = False,
    slowing: float = 0.0,
) -> None:  # fmt: skip
    device, kind = storage.params[0].device, kind_of(storage)
    with on(device):
        seed = o.seed if isinstance(o, RoundedOptions) and kind in DRAWS else None
        scalars = prepare(device, o, storage.step, slowing=slowing, seed=seed)
        for grad, part in parts(storage, gradients, shaped=1 if rule else 0):
            launch(
                simple_kernel, part, (scalars,), tuple(map(float, numbers)), GRAD=grad, LOW=type_of_copies(storage),
                KIND=int(kind.value), RULE=rule, NESTEROV=nesterov,
            )  # fmt: skip
    wrote(storage)


@triton.jit
def chances(key, spot, places):
    """32 random bits for each element: a function of the key, the tensor's position and the element's."""
    low = (places & 0xFFFFFFFF).to(tl.uint32)
    high = (places >> 32).to(tl.uint32)
    return mix(low ^ mix(mix(key + spot.to(tl.uint32) * 0x9E3779B9) + high))


@triton.jit
def joined(high, low):
    """The bits of a float32 number, from its upper half (shifted) and the distance to it; a zero stays zero."""
    return high + tl.where(((high << 1) == 0) & (low < 0), 0, low)


@triton.jit
def one_nan(bits):
    """Replace every NaN by one that stays NaN without its low half."""
    return tl.where((bits & 0x7FFFFFFF) > 0x7F800000, 0x7FC00000, bits)


@triton.jit
def rounded_to_24(bits, chance):
    """The bits of a float32 number without the last 8, rounded stochastically, by 32 random bits."""
    return bits + (chance >> 24).to(tl.int32) & -256


@triton.jit
def publish_at(pointer, places, values, size, LOW: tl.constexpr, FULL: tl.constexpr):
    """Round float32 values to nearest even; bfloat16 by integers, because the interpreter's own cast truncates."""
    if tl.bfloat16 == LOW:
        bits = one_nan(values.to(tl.int32, bitcast=True))
        bits = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
        put(pointer.to(tl.pointer_type(tl.int16), bitcast=True), places, bits.to(tl.int16), size, FULL)
    else:
        put(pointer, places, values.to(LOW), size, FULL)


@triton.jit
def take_param(table, row, tensors, tensor, places, size, KIND: tl.constexpr, FULL: tl.constexpr,
               ALIGNED: tl.constexpr):  # fmt: skip
    """Parameters in float32, and where they and their low bits lie. `row`: that of the low bits."""
    if KIND == PLAIN:
        param_at = address(table, 0, tensors, tensor, tl.float32, ALIGNED)
        bits_at = param_at
        param = take(param_at, places, size, FULL)
    else:
        param_at = address(table, 0, tensors, tensor, tl.int16, ALIGNED)
        bits_at = param_at
        bits = take(param_at, places, size, FULL).to(tl.int32) << 16
        if KIND == SPLIT:
            bits_at = address(table, row, tensors, tensor, tl.int16, ALIGNED)
            bits = joined(bits, take(bits_at, places, size, FULL).to(tl.int32))
        if KIND == SPLIT24:
            bits_at = address(table, row, tensors, tensor, tl.int8, ALIGNED)
            bits = joined(bits, take(bits_at, places, size, FULL).to(tl.int32) << 8)
        param = bits.to(tl.float32, bitcast=True)
    return param, param_at, bits_at


@triton.jit
def put_param(scalars, table, row, tensors, tensor, param, param_at, bits_at, places, size, LOW: tl.constexpr,
              KIND: tl.constexpr, FULL: tl.constexpr, ALIGNED: tl.constexpr):  # fmt: skip
    """Store parameters, and their copies or low bits, which are in `row`. All loads come before, since a later one
    would have to wait for the stores.
    """
    if KIND == PLAIN:
        if LOW is not None:
            publish_at(address(table, row, tensors, tensor, LOW, ALIGNED), places, param, size, LOW, FULL)
        put(param_at, places, param, size, FULL)
    else:
        bits = one_nan(param.to(tl.int32, bitcast=True))
        if KIND == SPLIT:
            put(bits_at, places, bits.to(tl.int16), size, FULL)
            bits = bits + 0x8000
        else:
            key = tl.load(scalars + KEY).to(tl.uint32, bitcast=True)
            spot = row if KIND == STOCHASTIC else row + 1  # after the low bits
            chance = chances(key, tl.load(table + spot * tensors + tensor), places)
            if KIND == SPLIT24:
                bits = rounded_to_24(bits, chance)
                put(bits_at, places, (bits << 16 >> 24).to(tl.int8), size, FULL)
                bits = bits + 0x8000
            else:
                bits = bits + (chance >> 16).to(tl.int32)
        put(param_at, places, (bits >> 16).to(tl.int16), size, FULL)


@triton.jit
def adam_chunk(
    scalars, table, tensors, tensor, start, size, one_beta1, beta2, one_beta2, eps, decay,
    GRAD: tl.constexpr, LOW: tl.constexpr, KIND: tl.constexpr, DECAY: tl.constexpr, AMSGRAD: tl.constexpr,
    FULL: tl.constexpr, ALIGNED: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Step one chunk. Rows: parameters, gradients, moments 1 and 2, their maxima if any, copies or low bits if any."""
    places = start + tl.arange(0, CHUNK)
    f32: tl.constexpr = tl.float32
    extra: tl.constexpr = 5 if AMSGRAD else 4
    grad = take(address(table, 1, tensors, tensor, GRAD, ALIGNED), places, size, FULL).to(f32)
    param, param_at, bits_at = take_param(table, extra, tensors, tensor, places, size, KIND, FULL, ALIGNED)
    first_at = address(table, 2, tensors, tensor, f32, ALIGNED)
    second_at = address(table, 3, tensors, tensor, f32, ALIGNED)
    first = take(first_at, places, size, FULL)
    second = take(second_at, places, size, FULL)

    grad = grad * tl.load(scalars + FACTOR)
    if DECAY == 1:
        grad = grad + decay * param
    if DECAY == 2:
        param = param * tl.load(scalars + KEEP)
    first = first + one_beta1 * (grad - first)
    second = beta2 * second + one_beta2 * (grad * grad)
    most = second
    if AMSGRAD:
        most_at = address(table, 4, tensors, tensor, f32, ALIGNED)
        most = tl.maximum(take(most_at, places, size, FULL), second, propagate_nan=tl.PropagateNan.ALL)
    below = tl.sqrt_rn(most) * tl.load(scalars + ROOT) + eps
    param = param - tl.load(scalars + RATE) * tl.div_rn(first, below)

    put_param(scalars, table, extra, tensors, tensor, param, param_at, bits_at, places, size, LOW, KIND, FULL, ALIGNED)
    put(first_at, places, first, size, FULL)
    put(second_at, places, second, size, FULL)
    if AMSGRAD:
        put(most_at, places, most, size, FULL)


@triton.jit(do_not_specialize=["tensors"])
def adam_kernel(
    scalars, tensor_of, block_of, sizes, table, tensors, one_beta1, beta2, one_beta2, eps, decay,
    GRAD: tl.constexpr, LOW: tl.constexpr, KIND: tl.constexpr, DECAY: tl.constexpr, AMSGRAD: tl.constexpr,
    ALIGNED: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Adam or AdamW; `DECAY`: 0 none, 1 in the gradient, 2 decoupled."""
    if tl.load(scalars + GO) > 0:
        tensor, start, size = chunk_of(tensor_of, block_of, sizes, CHUNK)
        for whole in tl.static_range(2):  # whole chunks need no masks
            if (start + CHUNK <= size) == (whole == 1):
                adam_chunk(
                    scalars, table, tensors, tensor, start, size, one_beta1, beta2, one_beta2, eps, decay,
                    GRAD, LOW, KIND, DECAY, AMSGRAD, whole == 1, ALIGNED, CHUNK,
                )  # fmt: skip


@triton.jit
def simple_chunk(
    scalars, table, tensors, tensor, start, size, decay, momentum, blend, eps,
    GRAD: tl.constexpr, LOW: tl.constexpr, KIND: tl.constexpr, RULE: tl.constexpr, NESTEROV: tl.constexpr,
    FULL: tl.constexpr, ALIGNED: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Step one chunk. Rows: parameters, gradients, the state if there is one, copies or low bits if any."""
    places = start + tl.arange(0, CHUNK)
    f32: tl.constexpr = tl.float32
    extra: tl.constexpr = 2 if RULE == 0 else 3
    param, param_at, bits_at = take_param(table, extra, tensors, tensor, places, size, KIND, FULL, ALIGNED)
    grad = take(address(table, 1, tensors, tensor, GRAD, ALIGNED), places, size, FULL).to(f32)
    grad = grad * tl.load(scalars + FACTOR)
    if decay != 0:
        grad = grad + decay * param
    if RULE != 0:
        state_at = address(table, 2, tensors, tensor, f32, ALIGNED)
        if RULE == 1:
            state = grad
        else:
            state = take(state_at, places, size, FULL)
            if RULE == 2:
                state = momentum * state + blend * grad
            else:
                state = state + grad * grad
        if RULE == 3:
            grad = tl.div_rn(grad, tl.sqrt_rn(state) + eps)
        else:
            grad = grad + momentum * state if NESTEROV else state
    param = param - tl.load(scalars + RATE) * grad
    put_param(scalars, table, extra, tensors, tensor, param, param_at, bits_at, places, size, LOW, KIND, FULL, ALIGNED)
    if RULE != 0:
        put(state_at, places, state, size, FULL)


@triton.jit(do_not_specialize=["tensors"])
def simple_kernel(
    scalars, tensor_of, block_of, sizes, table, tensors, decay, momentum, blend, eps,
    GRAD: tl.constexpr, LOW: tl.constexpr, KIND: tl.constexpr, RULE: tl.constexpr, NESTEROV: tl.constexpr,
    ALIGNED: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Gradient descent without momentum (`RULE` 0), with it at the first step (1) and later (2); Adagrad (3)."""
    if tl.load(scalars + GO) > 0:
        tensor, start, size = chunk_of(tensor_of, block_of, sizes, CHUNK)
        for whole in tl.static_range(2):  # whole chunks need no masks
            if (start + CHUNK <= size) == (whole == 1):
                simple_chunk(
                    scalars, table, tensors, tensor, start, size, decay, momentum, blend, eps,
                    GRAD, LOW, KIND, RULE, NESTEROV, whole == 1, ALIGNED, CHUNK,
                )  # fmt: skip
