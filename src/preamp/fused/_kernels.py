"""The elementwise steps as Triton kernels: Adam on three kinds of masters, gradient descent, Adagrad.

`prepare` runs first, one program: it counts the step and turns hyper-parameters, loss scale and flag into the few
numbers below, so that the programs of the second launch all see the same ones. Numbers of eight bytes' precision
come as pairs of float32, which is what Triton makes of Python's floats. Fused multiply-add is off at the launch, so
that every device, and the interpreter, rounds alike.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..multi_tensor.device import address, put, start_of, take

GO = tl.constexpr(0)  # 1 if the step may write, else 0
FACTOR = tl.constexpr(1)  # what gradients are multiplied by; negative to go uphill
RATE = tl.constexpr(2)  # what updates are multiplied by
ROOT = tl.constexpr(3)  # 1 / sqrt(1 - beta2^t)
KEEP = tl.constexpr(4)  # 1 - lr * weight decay
FIRST = tl.constexpr(5)  # 1 / (1 - beta1^t)
KEY = tl.constexpr(6)  # the bits of what chances of this step are made from
SCALARS = 8

PLAIN = tl.constexpr(0)  # float32 parameters
SPLIT = tl.constexpr(1)  # bfloat16 weights and the 16 bits that make them float32
STOCHASTIC = tl.constexpr(2)  # bfloat16 weights, rounded up or down by chance


@triton.jit
def mix(value):
    """Scramble 32 bits, each of which then depends on all (the finalizer of MurmurHash3)."""
    value = value ^ (value >> 16)
    value = value * 0x85EBCA6B
    value = value ^ (value >> 13)
    value = value * 0xC2B2AE35
    return value ^ (value >> 16)


@triton.jit(do_not_specialize=["seed_high", "seed_low"])
def prepare(
    out, step, found, factor, rate, norm, rate_high, rate_low, slowing, decay, most,
    beta1_high, beta1_low, beta2_high, beta2_low, seed_high, seed_low,
    DRAWS: tl.constexpr, COUNTS: tl.constexpr, HAS_FOUND: tl.constexpr, HAS_FACTOR: tl.constexpr,
    HAS_RATE: tl.constexpr, CLIPS: tl.constexpr, UPHILL: tl.constexpr, CORRECTS: tl.constexpr, FOLDS: tl.constexpr,
):  # fmt: skip
    """Write the numbers a step needs to `out`, and count the step if it is taken."""
    go = tl.full((), 1.0, tl.float32)
    if HAS_FOUND:
        go = tl.where(tl.load(found).to(tl.float32) > 0, 0.0, go)
    tl.store(out + GO, go)
    times = tl.full((), 1.0, tl.float32)
    if HAS_FACTOR:
        times = tl.load(factor).to(tl.float32)
    if CLIPS:
        times = times / tl.maximum(tl.load(norm) / most, 1.0)
    if UPHILL:
        times = -times
    tl.store(out + FACTOR, times)
    lr = tl.full((), rate_high, tl.float64) + tl.full((), rate_low, tl.float64)
    if HAS_RATE:
        lr = tl.load(rate).to(tl.float64)
    tl.store(out + KEEP, (1.0 - lr * decay).to(tl.float32))
    first = tl.full((), 1.0, tl.float64)
    second = tl.full((), 1.0, tl.float64)
    if COUNTS:
        before = tl.load(step)
        if go > 0:
            tl.store(step, before + 1.0)
        if DRAWS:
            seed = mix(tl.full((), seed_low, tl.uint32) ^ mix(tl.full((), seed_high, tl.uint32)))
            key = mix(seed + (before + 1.0).to(tl.int32).to(tl.uint32))
            tl.store(out + KEY, key.to(tl.float32, bitcast=True))
        lr = lr / (1.0 + before.to(tl.float64) * slowing)
        if CORRECTS:
            left = before.to(tl.int64) + 1
            power1 = tl.full((), beta1_high, tl.float64) + tl.full((), beta1_low, tl.float64)
            power2 = tl.full((), beta2_high, tl.float64) + tl.full((), beta2_low, tl.float64)
            for _ in range(32):  # beta^t by squaring: exact to a few units of float64, on every device
                first = tl.where(left & 1 == 1, first * power1, first)
                second = tl.where(left & 1 == 1, second * power2, second)
                power1 = power1 * power1
                power2 = power2 * power2
                left = left >> 1
            first = 1.0 / (1.0 - first)
            second = 1.0 / tl.sqrt(1.0 - second)
    if FOLDS:
        lr = lr * first
    tl.store(out + RATE, lr.to(tl.float32))
    tl.store(out + ROOT, second.to(tl.float32))
    tl.store(out + FIRST, first.to(tl.float32))


@triton.jit
def chances(key, spot, places):
    """32 random bits for each element: a function of the key, the tensor's position and the element's place."""
    low = (places & 0xFFFFFFFF).to(tl.uint32)
    high = (places >> 32).to(tl.uint32)
    return mix(low ^ mix(mix(key + spot.to(tl.uint32) * 0x9E3779B9) + high))


@triton.jit
def joined(high, low):
    """The bits of a float32 number, of the upper half in place and the distance from it; a zero stays one."""
    return high + tl.where(((high << 1) == 0) & (low < 0), 0, low)


@triton.jit
def one_nan(bits):
    """Every NaN as the one that survives the loss of its low half."""
    return tl.where((bits & 0x7FFFFFFF) > 0x7F800000, 0x7FC00000, bits)


@triton.jit
def publish_at(pointer, places, values, size, LOW: tl.constexpr, FULL: tl.constexpr):
    """Round float32 values to nearest even; bfloat16 by integers, because the interpreter's own cast cuts bits off."""
    if tl.bfloat16 == LOW:
        bits = one_nan(values.to(tl.int32, bitcast=True))
        bits = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
        put(pointer.to(tl.pointer_type(tl.int16), bitcast=True), places, bits.to(tl.int16), size, FULL)
    else:
        put(pointer, places, values.to(LOW), size, FULL)


@triton.jit
def publish(table, row, tensors, tensor, places, values, size, LOW: tl.constexpr, FULL: tl.constexpr,
            ALIGNED: tl.constexpr):  # fmt: skip
    """Round float32 values into their twins."""
    publish_at(address(table, row, tensors, tensor, LOW, ALIGNED), places, values, size, LOW, FULL)


@triton.jit
def adam_chunk(
    scalars, table, tensors, tensor, start, size, one_beta1, beta2, one_beta2, eps, decay,
    GRAD: tl.constexpr, LOW: tl.constexpr, KIND: tl.constexpr, DECAY: tl.constexpr, AMSGRAD: tl.constexpr,
    FULL: tl.constexpr, ALIGNED: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Step one chunk. Rows: parameters, gradients, moments 1 and 2, their maxima if any, twins or low bits if any."""
    places = start + tl.arange(0, CHUNK)
    f32: tl.constexpr = tl.float32
    extra: tl.constexpr = 5 if AMSGRAD else 4
    grad = take(address(table, 1, tensors, tensor, GRAD, ALIGNED), places, size, FULL).to(f32)
    if KIND == PLAIN:
        param_at = address(table, 0, tensors, tensor, f32, ALIGNED)
        param = take(param_at, places, size, FULL)
    else:
        param_at = address(table, 0, tensors, tensor, tl.int16, ALIGNED)
        bits = take(param_at, places, size, FULL).to(tl.int32) << 16
        if KIND == SPLIT:
            bits_at = address(table, extra, tensors, tensor, tl.int16, ALIGNED)
            bits = joined(bits, take(bits_at, places, size, FULL).to(tl.int32))
        param = bits.to(f32, bitcast=True)
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

    if KIND == PLAIN:  # every load stands before the first store, which a later one would have to wait for
        if LOW is not None:
            publish(table, extra, tensors, tensor, places, param, size, LOW, FULL, ALIGNED)
        put(param_at, places, param, size, FULL)
    else:
        bits = one_nan(param.to(tl.int32, bitcast=True))
        if KIND == SPLIT:
            put(bits_at, places, bits.to(tl.int16), size, FULL)
            bits = bits + 0x8000
        else:
            key = tl.load(scalars + KEY).to(tl.uint32, bitcast=True)
            chance = chances(key, tl.load(table + extra * tensors + tensor), places)
            bits = bits + (chance >> 16).to(tl.int32)
        put(param_at, places, (bits >> 16).to(tl.int16), size, FULL)
    put(first_at, places, first, size, FULL)
    put(second_at, places, second, size, FULL)
    if AMSGRAD:
        put(most_at, places, most, size, FULL)


@triton.jit(do_not_specialize=["tensors"])
def adam(
    scalars, tensor_of, block_of, sizes, table, tensors, one_beta1, beta2, one_beta2, eps, decay,
    GRAD: tl.constexpr, LOW: tl.constexpr, KIND: tl.constexpr, DECAY: tl.constexpr, AMSGRAD: tl.constexpr,
    ALIGNED: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Adam or AdamW; `DECAY`: 0 none, 1 in the gradient, 2 decoupled."""
    if tl.load(scalars + GO) > 0:
        program = tl.program_id(0)
        tensor = tl.load(tensor_of + program)
        start = start_of(block_of, program, CHUNK)
        size = tl.load(sizes + tensor)
        if start + CHUNK <= size:
            adam_chunk(
                scalars, table, tensors, tensor, start, size, one_beta1, beta2, one_beta2, eps, decay,
                GRAD, LOW, KIND, DECAY, AMSGRAD, True, ALIGNED, CHUNK,
            )  # fmt: skip
        else:
            adam_chunk(
                scalars, table, tensors, tensor, start, size, one_beta1, beta2, one_beta2, eps, decay,
                GRAD, LOW, KIND, DECAY, AMSGRAD, False, ALIGNED, CHUNK,
            )  # fmt: skip


@triton.jit
def simple_chunk(
    scalars, table, tensors, tensor, start, size, decay, momentum, blend, eps,
    GRAD: tl.constexpr, LOW: tl.constexpr, RULE: tl.constexpr, NESTEROV: tl.constexpr, FULL: tl.constexpr,
    ALIGNED: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Step one chunk. Rows: parameters, gradients, the state if there is one, twins if any."""
    places = start + tl.arange(0, CHUNK)
    f32: tl.constexpr = tl.float32
    param_at = address(table, 0, tensors, tensor, f32, ALIGNED)
    param = take(param_at, places, size, FULL)
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
    if LOW is not None:
        publish(table, 2 if RULE == 0 else 3, tensors, tensor, places, param, size, LOW, FULL, ALIGNED)
    put(param_at, places, param, size, FULL)
    if RULE != 0:
        put(state_at, places, state, size, FULL)


@triton.jit(do_not_specialize=["tensors"])
def simple(
    scalars, tensor_of, block_of, sizes, table, tensors, decay, momentum, blend, eps,
    GRAD: tl.constexpr, LOW: tl.constexpr, RULE: tl.constexpr, NESTEROV: tl.constexpr,
    ALIGNED: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Gradient descent without momentum (`RULE` 0), with it at the first step (1) and later (2); Adagrad (3)."""
    if tl.load(scalars + GO) > 0:
        program = tl.program_id(0)
        tensor = tl.load(tensor_of + program)
        start = start_of(block_of, program, CHUNK)
        size = tl.load(sizes + tensor)
        if start + CHUNK <= size:
            simple_chunk(
                scalars, table, tensors, tensor, start, size, decay, momentum, blend, eps,
                GRAD, LOW, RULE, NESTEROV, True, ALIGNED, CHUNK,
            )  # fmt: skip
        else:
            simple_chunk(
                scalars, table, tensors, tensor, start, size, decay, momentum, blend, eps,
                GRAD, LOW, RULE, NESTEROV, False, ALIGNED, CHUNK,
            )  # fmt: skip
