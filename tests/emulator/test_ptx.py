"""The emulator itself: instructions written by hand, and what it refuses."""

from __future__ import annotations

import shutil
import sys

import pytest
import torch
from torch import Tensor

from .ptx import Kernel

pytestmark = [
    pytest.mark.slow,  # as all that needs the emulator: its C++ is compiled
    pytest.mark.skipif(
        sys.platform != "linux" or shutil.which("c++") is None, reason="no C++ compiler, or none that links as on Linux"
    ),
]

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


def test_what_is_read_unwritten_is_not_zero() -> None:
    out = torch.zeros(2, dtype=torch.int32)
    lines = ["mov.b32 %r2, global_smem;", "ld.shared.b32 %r3, [%r2];", "st.global.v2.b32 [%rd2], {%r3, %r9};"]
    run(kernel(*lines), out, out)
    assert out.tolist() == [-0x54545455] * 2
