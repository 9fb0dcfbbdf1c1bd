"""Compiles every kernel for a GPU that need not be there, and prints, as JSON, how each reads memory and what it takes.

Run as a script, without TRITON_INTERPRET: Triton's compiler needs no device, only the name of one.
"""

from __future__ import annotations

import json
import re
import subprocess
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from preamp.kernels.triton import eight_bit, elementwise, launch, read
from preamp.kernels.triton.read import BLOCK, KINDS, LONG

TARGET = GPUTarget("cuda", 90, 32)
POINTERS = {
    "tensor_of": "*i32", "block_of": "*i32", "sizes": "*i64", "table": "*i64", "first": "*i32",
    "squares": "*fp64", "flags": "*u8",
    **dict.fromkeys(
        ("scalars", "step", "out", "found", "factor", "rate", "tops", "floats"), "*fp32",
    ),
}  # fmt: skip
WHOLE = {"tensors": "i32", "seed_high": "i32", "seed_low": "i32", "base": "i32", "chunks": "i32"}
ADAM = {"DECAY": 2, "AMSGRAD": False, "ALIGNED": True, "CHUNK": 1024}
WARPS = 8
CASES: list[tuple[Any, dict[str, Any], int]] = [
    *[
        (elementwise.adam_kernel, {**ADAM, "AMSGRAD": maxima, "GRAD": grad, "LOW": low, "KIND": kind}, WARPS)
        for maxima in (False, True)
        for kind, grad, low in (
            (0, tl.float16, tl.float16), (0, tl.bfloat16, tl.bfloat16), (0, tl.float32, None), (1, tl.bfloat16, None),
            (2, tl.bfloat16, None), (3, tl.bfloat16, None),
        )
    ],
    *[
        (elementwise.simple_kernel, {"GRAD": tl.float16, "LOW": low, "KIND": kind, "RULE": rule,
                                     "NESTEROV": rule == 2, "ALIGNED": True, "CHUNK": 1024}, WARPS)
        for kind, low in ((0, tl.float16), (3, None))
        for rule in range(4)
    ],
    (launch.prepare_numbers, dict.fromkeys(
        ("DRAWS", "COUNTS", "HAS_FOUND", "HAS_FACTOR", "HAS_RATE", "UPHILL", "CORRECTS"), True), 1),
    *[
        (read.read_kernel, {"KIND": kind, "INTEGER": integer, "ALIGNED": True, "CHUNK": LONG,
                        "BLOCK": BLOCK}, warps)
        for kind, integer, warps in KINDS.values()
    ],
    (read.finish, {"BLOCK": 1024}, 8),
    *[
        (eight_bit.adam_8bit, {"GRAD": tl.bfloat16, "LOW": low, "KIND": kind, "DECAY": 2, "ALIGNED": True,
                                        "CHUNK": 1024}, eight_bit.WARPS)
        for kind, low in ((0, tl.bfloat16), (1, None), (2, None), (3, None), (4, tl.bfloat16))
    ],
]  # fmt: skip


def compiled(kernel: Any, constants: dict[str, Any], warps: int) -> Any:
    signature = {
        name: "constexpr" if name in constants else POINTERS.get(name) or WHOLE.get(name) or "fp32"
        for name in kernel.arg_names
    }
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
    limit = {"maxnreg": eight_bit.REGISTERS} if kernel is eight_bit.adam_8bit else {}
    return triton.compile(source, target=TARGET, options={"num_warps": warps, "enable_fp_fusion": False, **limit})


def accesses(ptx: str) -> dict[str, int]:
    """How often each kind of global load and store stands in the code that is not masked."""
    plain = [line.strip() for line in ptx.splitlines() if not line.strip().startswith("@")]
    return Counter(m[0] for line in plain if (m := re.match(r"(ld|st)\.global\S*", line)))


def resources(cubin: bytes) -> dict[str, int]:
    """What a thread takes of registers, and of local memory, to which it spills: bytes."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        told = subprocess.run([tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True)
    return {name.lower(): int(re.findall(rf"{name}:(\d+)", told.stdout)[-1]) for name in ("REG", "STACK", "LOCAL")}


def row(kernel: Any, constants: dict[str, Any], warps: int) -> dict[str, Any]:
    made = compiled(kernel, constants, warps)
    ptx = str(made.asm["ptx"])
    return {
        "name": kernel.__name__, "constants": {name: str(value) for name, value in constants.items()},
        "accesses": accesses(ptx), "barriers": ptx.count("bar.sync"), "shared": made.metadata.shared,
        **resources(made.asm["cubin"]),
    }  # fmt: skip


if __name__ == "__main__":
    print(json.dumps([row(*case) for case in CASES]))
