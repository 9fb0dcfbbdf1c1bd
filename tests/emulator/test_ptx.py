"""The emulator itself: instructions written by hand, and what it refuses."""

from __future__ import annotations

import math
import shutil
import sys

import pytest
import torch
from torch import Tensor

from .ptx import Kernel

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or shutil.which("c++") is None, reason="no C++ compiler, or none that links as on Linux"
)

THREADS = 64


def kernel(*lines: str, shared: int = 64) -> Kernel:
    """A kernel of two pointers, of which the first is in %rd1 and the second in %rd2; %r1 is the thread."""
    begin = ["ld.param.b64 %rd1, [k_param_0];", "ld.param.b64 %rd2, [k_param_1];", "mov.u32 %r1, %tid.x;"]
    body = "\n".join(
        ["\t.reg .b64 \t%rd<9>;", "\t.loc\t1 7 5                          // k.py:7:5", *begin, *lines, "ret;"]
    )
    parameters = ".param .u64 .ptr .global .align 1 k_param_0,\n.param .u64 k_param_1\n"
    return Kernel(f".visible .entry k(\n{parameters})\n.reqntid {THREADS}\n{{\n{body}\n}}\n", shared)


def run(made: Kernel, *tensors: Tensor, blocks: int = 1) -> None:
    made.run([tensor.data_ptr() for tensor in tensors], blocks)


def bits_of(values: Tensor) -> Tensor:
    """Values as 8 bytes each, the rest of a register filled with arbitrary bytes."""
    size = values.element_size()
    slots = torch.full((len(values), 8), 0xCD, dtype=torch.uint8)
    slots[:, :size] = values.view(torch.uint8).view(-1, size)
    return slots.view(torch.int64).flatten()


def computed(instruction: str, *values: Tensor) -> Tensor:
    """The low bytes of %rd0 after an instruction on %rd3, %rd4, ... that hold the values of each thread."""
    given = torch.stack([bits_of(v.repeat(-(-THREADS // len(v)))[:THREADS].contiguous()) for v in values])
    out = torch.zeros(THREADS, dtype=torch.int64)
    loads = [f"ld.global.b64 %rd{3 + i}, [%rd5+{8 * THREADS * i}];" for i in range(len(values))]
    loads = ["mad.wide.u32 %rd5, %r1, 8, %rd1;", "mad.wide.u32 %rd6, %r1, 8, %rd2;", *loads]
    run(kernel(*loads, f"{instruction};", "st.global.b64 [ %rd6 + 0 ], { %rd0 };"), given, out)
    return out[: max(map(len, values))]


def shown(bits: Tensor, dtype: torch.dtype) -> Tensor:
    size = torch.empty((), dtype=dtype).element_size()
    return bits.view(torch.uint8).view(-1, 8)[:, :size].contiguous().view(dtype).flatten()


FLOATS = torch.tensor([0.0, -0.0, 1.0, -2.5, 1e-41, 3e38, math.inf, -math.inf, math.nan, 65519.9, 65520.0, 1e-8, 0.1])
OTHERS = FLOATS.roll(4)


@pytest.mark.parametrize(("instruction", "wanted"), [
    ("add.rn.f32 %rd0, %rd3, %rd4", FLOATS + OTHERS),
    ("mul.rn.f32 %rd0, %rd3, %rd4", FLOATS * OTHERS),
    ("div.rn.f32 %rd0, %rd3, %rd4", FLOATS / OTHERS),
    ("sqrt.rn.f32 %rd0, %rd3", FLOATS.double().sqrt().float()),
    ("max.NaN.f32 %rd0, %rd3, %rd4", FLOATS.maximum(OTHERS)),
    ("max.f32 %rd0, %rd3, %rd4", FLOATS.fmax(OTHERS)),
    ("min.f32 %rd0, %rd3, %rd4", FLOATS.fmin(OTHERS)),
    ("abs.f32 %rd0, %rd3", FLOATS.abs()),
    ("cvt.rmi.f32.f32 %rd0, %rd3", FLOATS.floor()),
    ("cvt.rn.f16.f32 %rd0, %rd3", FLOATS.half()),
    ("cvt.rn.bf16.f32 %rd0, %rd3", FLOATS.bfloat16()),
    ("cvt.f64.f32 %rd0, %rd3", FLOATS.double()),
    ("cvt.rzi.s32.f32 %rd0, %rd3", FLOATS.nan_to_num(0.0).double().clamp(-(2**31), 2**31 - 1).int()),
    ("setp.lt.f32 %rd0, %rd3, %rd4", (FLOATS < OTHERS)),
    ("setp.geu.f32 %rd0, %rd3, %rd4", ~(FLOATS < OTHERS)),
    ("setp.neu.f32 %rd0, %rd3, %rd4", FLOATS != OTHERS),
])  # fmt: skip
def test_floating_point(instruction: str, wanted: Tensor) -> None:
    got = shown(computed(instruction, FLOATS, OTHERS), wanted.dtype)
    assert torch.equal(got.isnan(), wanted.isnan()) and torch.equal(got[~got.isnan()], wanted[~wanted.isnan()])


WHOLE = torch.tensor([0, 1, -1, 7, -8, 2**31 - 1, -(2**31), 0x12345678], dtype=torch.int32)
AMOUNTS = torch.tensor([0, 1, 31, 32, 40, 3, 4, 8], dtype=torch.int32)


@pytest.mark.parametrize(("instruction", "wanted"), [
    ("add.s32 %rd0, %rd3, 1", WHOLE + 1),
    ("sub.s32 %rd0, 0, %rd3", -WHOLE),
    ("mul.lo.s32 %rd0, %rd3, -1640531527", (WHOLE.long() * -1640531527).int()),
    ("mul.wide.s32 %rd0, %rd3, 4", WHOLE.long() * 4),
    ("mad.wide.u32 %rd0, %rd3, 8, 5", (WHOLE.long() & 0xFFFFFFFF) * 8 + 5),
    ("cvt.s64.s32 %rd0, %rd3", WHOLE.long()),
    ("cvt.u64.u32 %rd0, %rd3", WHOLE.long() & 0xFFFFFFFF),
    ("cvt.rn.f32.s32 %rd0, %rd3", WHOLE.float()),
    ("xor.b32 %rd0, %rd3, -2147483648", WHOLE ^ -(2**31)),
    ("bfe.u32 %rd0, %rd3, 16, 1", WHOLE >> 16 & 1),
    ("prmt.b32 %rd0, %rd3, 0, 0x9991U", (WHOLE << 16 >> 24 >> 7 << 8) | (WHOLE << 16 >> 24 & 0xFF)),
    ("shr.s32 %rd0, %rd3, %rd4", (WHOLE.long() >> AMOUNTS).int()),
    ("shr.u32 %rd0, %rd3, %rd4", ((WHOLE.long() & 0xFFFFFFFF) >> AMOUNTS).int()),
    ("shl.b32 %rd0, %rd3, %rd4", (WHOLE.long() << AMOUNTS).int()),
    ("setp.lt.u32 %rd0, %rd3, 8", (WHOLE.long() & 0xFFFFFFFF) < 8),
    ("setp.gt.s32 %rd0, %rd3, -1", WHOLE > -1),
    ("cvt.s16.s8 %rd0, %rd3", WHOLE.to(torch.int8).short()),
    ("mov.b32 {%rd0, _}, %rd3", WHOLE.short()),
    ("mov.b32 %rd0, {%rd4, %rd3}", WHOLE << 16 | AMOUNTS & 0xFFFF),
])  # fmt: skip
def test_whole_numbers(instruction: str, wanted: Tensor) -> None:
    assert torch.equal(shown(computed(instruction, WHOLE, AMOUNTS), wanted.dtype), wanted)


@pytest.mark.parametrize(("instruction", "wanted"), [
    ("shfl.sync.bfly.b32 %rd0, %rd3, 16, 31, -1", torch.arange(THREADS) ^ 16),
    ("redux.sync.max.s32 %rd0, %rd3, -1", torch.tensor([31, 63]).repeat_interleave(32)),
    ("redux.sync.add.s32 %rd0, %rd3, -1", torch.tensor([31 * 16, 31 * 16 + 32 * 32]).repeat_interleave(32)),
])  # fmt: skip
def test_threads_of_a_warp_exchange(instruction: str, wanted: Tensor) -> None:
    assert torch.equal(shown(computed(instruction, torch.arange(THREADS).int()), torch.int32), wanted.int())


def test_a_narrow_number_fills_its_register() -> None:
    """Whatever it held before."""
    values, out = torch.arange(-64, 64).to(torch.int8), torch.zeros(THREADS, 2, dtype=torch.int64)
    lines = ["mad.wide.u32 %rd3, %r1, 1, %rd1;", "mad.wide.u32 %rd4, %r1, 16, %rd2;", "mov.b64 %rd5, -1;"]
    lines += ["mov.b64 %rd6, -1;", "ld.global.s8 %rd5, [%rd3+32];", "ld.global.b8 %rd6, [%rd3+32];"]
    run(kernel(*lines, "st.global.v2.b64 [%rd4], {%rd5, %rd6};"), values, out)
    wanted = values[32 : 32 + THREADS].long()
    assert torch.equal(out, torch.stack([wanted, wanted & 0xFF], 1))


def test_programs_of_a_grid_and_memory_that_threads_share() -> None:
    """Each program turns its 64 numbers round, through shared memory."""
    values = torch.arange(3 * THREADS, dtype=torch.int32)
    out = torch.zeros_like(values)
    turned = kernel(
        "mov.u32 %r2, %ctaid.x;", "mad.lo.s32 %r3, %r2, 64, %r1;", "mad.wide.u32 %rd3, %r3, 4, %rd1;",
        "mad.wide.u32 %rd4, %r3, 4, %rd2;", "ld.global.b32 %r4, [%rd3];", "mov.b32 %r5, global_smem;",
        "mad.lo.s32 %r6, %r1, 4, %r5;", "st.shared.b32 [%r6+8], %r4;", "bar.sync 0;", "sub.s32 %r7, 63, %r1;",
        "mad.lo.s32 %r8, %r7, 4, %r5;", "ld.shared.b32 %r9, [%r8+8];", "st.global.b32 [%rd4], %r9;", shared=264,
    )  # fmt: skip
    run(turned, values, out, blocks=3)
    assert torch.equal(out, values.view(3, THREADS).flip(1).flatten())


def test_a_loop_that_all_threads_take() -> None:
    out = torch.zeros(1, dtype=torch.int32)
    loop = ["$L__BB0_1:", "add.s32 %r2, %r2, 3;", "setp.lt.s32 %p1, %r2, 30;", "@%p1 bra $L__BB0_1;"]
    run(kernel("mov.b32 %r2, 0;", *loop, "st.global.b32 [%rd2], %r2;"), out, out)
    assert out.item() == 30


@pytest.mark.parametrize(("lines", "why"), [
    (["ld.global.v4.b32 {%r2, %r3, %r4, %r5}, [%rd1+8];"], "misaligned address: thread 0 takes 16 bytes"),
    (["st.global.b64 [%rd1+4], %rd1;"], "misaligned address"),
    (["setp.eq.b32 %p1, %r1, 5;", "@%p1 ld.global.b16 %rs1, [%rd1+1];"], "misaligned address: thread 5"),
    (["mov.b32 %r2, global_smem;", "ld.shared.b32 %r3, [%r2+64];"], "an illegal memory access"),
    (["mov.b64 %rd3, 0;", "ld.global.b32 %r3, [%rd3];"], "an illegal memory access"),
    (["setp.lt.u32 %p1, %r1, 40;", "@%p1 bra $L__BB0_1;", "$L__BB0_1:"], "divergent branch.*threads 0 and 40"),
    (["setp.lt.u32 %p1, %r1, 40;", "@%p1 shfl.sync.bfly.b32 %r2, %r1, 1, 31, -1;"], "not some"),
])  # fmt: skip
def test_a_run_refuses(lines: list[str], why: str) -> None:
    memory = torch.zeros(64, dtype=torch.int64)
    assert memory.data_ptr() % 16 == 0
    with pytest.raises(RuntimeError, match=rf"{why}.*at: .*\(k\.py:7:5\), in the kernel k$"):
        run(kernel(*lines), memory, memory)


@pytest.mark.parametrize(("line", "why"), [
    ("frob.b32 %r2, %r1;", r"no instruction of the emulator is called frob\.b32"),
    ("add.f32 %r2, %r1, %r1;", r"called add\.f32"),  # which may be contracted with a product, and rounded once
    ("ld.global.v4.b32 {%r2, %r3}, [%rd1];", "other operands"),
    ("add.s32 %r2, %r1;", "other operands"),
    ("ld.global.b32 %r2, [%rd1+%r1];", "address that the emulator does not know"),
    ("atom.global.add.u32 %r2, [%rd1], 1;", "invalid literal|no instruction"),
])  # fmt: skip
def test_a_kernel_that_cannot_be_read_is_refused(line: str, why: str) -> None:
    with pytest.raises(RuntimeError, match=rf"(?:{why}).*\(k\.py:7:5\), in the kernel k$"):
        kernel(line)


def test_what_no_thread_does_is_not_checked() -> None:
    memory = torch.zeros(64, dtype=torch.int64)
    run(kernel("setp.gt.u32 %p1, %r1, 64;", "@%p1 ld.global.b64 %rd3, [%rd1+1];"), memory, memory)


def test_what_is_read_unwritten_is_not_zero() -> None:
    out = torch.zeros(2, dtype=torch.int32)
    lines = ["mov.b32 %r2, global_smem;", "ld.shared.b32 %r3, [%r2];", "st.global.v2.b32 [%rd2], {%r3, %r9};"]
    run(kernel(*lines), out, out)
    assert out.tolist() == [-0x54545455] * 2
