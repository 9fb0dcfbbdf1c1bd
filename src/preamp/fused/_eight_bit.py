"""Adam with moments in 8 bits: a step reads them, moves on in float32, and writes them back by chance."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..multi_tensor import laid_out_like, same_walk
from ._adam import adam_step
from ._bits import chances_like, join, mix, round_by_chance, split
from ._choice import kernels_take, walks
from ._eight_bit_codes import BLOCK, dequantize, flat, quantize
from ._lists import LOW, Gate, gate_of
from ._options import AdamOptions, Lists, Lows

PIECE = 2**16
"""Elements that are stepped together on a CPU, whole blocks: their float32 states stay in its caches."""


def adam_8bit_(
    params: list[Tensor], grads: Sequence[Tensor], exp_avgs: list[Tensor], exp_avg_scales: list[Tensor],
    exp_avg_sqs: list[Tensor], exp_avg_sq_scales: list[Tensor], lows: Lows, step: Tensor, *, lr: float | Tensor,
    beta1: float, beta2: float, eps: float, weight_decay: float, decoupled: bool, maximize: bool, seed: int = 0,
    bits: list[Tensor] | None = None, by_chance: bool = False,
    factor: Tensor | None = None, found: Tensor | None = None,
) -> None:  # fmt: skip
    """One step of `adam_` (without AMSGrad), in place, its moments kept in 8 bits.

    `exp_avgs`: int8, `exp_avg_sqs`: uint8, of the shapes of `params` and dense in memory; `exp_avg_scales`,
    `exp_avg_sq_scales`: float32 (blocks,), one number for each 256 elements in memory order; all zeros at first.
    `dequantize` says what they mean. A step is that of `adam_` on the numbers they mean; the new moments go to one of
    the two codes around them, by chances that keep the mean right. Chances are a function of `seed`, the step's
    number, the tensor's position in `params` and the element's place in memory: a run can be repeated, with kernels
    or without.

    `params`: float32 with twins in `lows` or none; or bfloat16 upper halves of float32 masters, whose lower ones are
    `bits` (see `split`); or 16-bit weights that are all there is, rounded to nearest, or (bfloat16) `by_chance`. The
    rest is as in `adam_`. Where Triton runs it is one launch for each dtype of gradients, which reads and writes 4
    bytes a parameter of states; elsewhere the states of one tensor at a time, or of a part of it, are float32.
    """
    if not params:
        return
    o = AdamOptions(
        lr=lr, beta1=beta1, beta2=beta2, eps=eps, weight_decay=weight_decay, decoupled=decoupled, amsgrad=False,
        maximize=maximize, factor=factor, found=found,
    )  # fmt: skip
    lists = [params, grads, exp_avgs, exp_avg_sqs, exp_avg_scales, exp_avg_sq_scales]
    in_order = walks([params, grads, exp_avgs, exp_avg_sqs, *([bits] if bits else [])], lows) is None
    if in_order and kernels_take([params, grads, exp_avg_scales, exp_avg_sq_scales], low=True):
        from . import _eight_bit_triton

        lists[1] = laid_out_like(params, grads)
        _eight_bit_triton.adam(
            [*lists, bits] if bits else lists, lows, step, o, seed, by_chance, split=bits is not None
        )
    else:
        _adam(lists, lows, step, o, seed, bits, by_chance)


def _adam(
    lists: Lists, lows: Lows, step: Tensor, o: AdamOptions, seed: int, bits: list[Tensor] | None, by_chance: bool
) -> None:
    gate = gate_of(lists[0][0].device, o.found)
    if gate is None:
        return
    taken = step + 1
    for i, row in enumerate(zip(*lists, strict=True)):
        twin = bits[i] if bits else lows[i] if lows else None
        for start, piece in _pieces(row, twin):
            chances = chances_like(flat(piece.first), seed, taken, i, start)
            _one(piece, step.clone(), o, chances, gate, split_master=bool(bits), by_chance=by_chance)
    gate.bump(step)
    gate.settle(step)


@dataclass(frozen=True, slots=True)
class _Piece:
    """A tensor with all that belongs to it, or some blocks of each."""

    param: Tensor
    grad: Tensor
    first: Tensor
    second: Tensor
    first_scales: Tensor
    second_scales: Tensor
    twin: Tensor | None
    """The low twin, or the lower half."""


def _pieces(row: Sequence[Tensor], twin: Tensor | None) -> Iterator[tuple[int, _Piece]]:
    """On a CPU what fits in its caches, if all lie in one order; else the whole."""
    param, grad, first, second, *scales = row
    beside = [grad, first, second, *([] if twin is None else [twin])]
    if param.device.type != "cpu" or not all(same_walk(param, other) for other in beside):
        yield 0, _Piece(param, grad, first, second, scales[0], scales[1], twin)
        return
    tensors = [flat(tensor).split(PIECE) for tensor in (param, grad, first, second)]
    scale = [tensor.split(PIECE // BLOCK) for tensor in scales]
    twins = [None] * len(tensors[0]) if twin is None else flat(twin).split(PIECE)
    for number, parts in enumerate(zip(*tensors, *scale, twins, strict=True)):
        yield number * PIECE, _Piece(*parts)


def _one(
    piece: _Piece, step: Tensor, o: AdamOptions, chances: Tensor, gate: Gate, *, split_master: bool, by_chance: bool
) -> None:
    first = dequantize(piece.first, piece.first_scales)
    second = dequantize(piece.second, piece.second_scales)
    param, twin = piece.param, piece.twin
    wide, low = param, twin
    if split_master:
        assert twin is not None
        wide, low = join(param, twin), None
    elif param.dtype in LOW:
        wide, low = param.to(torch.float32), None if by_chance else param
    adam_step([[wide], [piece.grad], [first], [second], []], [low] if low is not None else None, step, o)
    if split_master:
        assert twin is not None
        gate.write([param, twin], split(wide))
    elif by_chance:
        gate.write([param], [round_by_chance(wide, _like(param, mix(chances)))])
    gate.write([piece.first, piece.first_scales], quantize(first, torch.int8, chances >> 16))
    gate.write([piece.second, piece.second_scales], quantize(second, torch.uint8, chances & 0xFFFF))


def _like(tensor: Tensor, values: Tensor) -> Tensor:
    """Values in memory order as a tensor of the shape and order of another."""
    ordered = torch.empty_like(tensor, dtype=values.dtype)
    flat(ordered).copy_(values)
    return ordered
