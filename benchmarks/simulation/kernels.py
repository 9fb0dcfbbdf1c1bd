"""The kernels that are simulated, compiled for a GPU that need not be there, with memory for one block of threads."""

from __future__ import annotations

import functools
import struct
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from tests.kernels.compile_kernels import POINTERS, WHOLE, compiled, resources

from preamp.kernels.triton import eight_bit, elementwise, launch, read

from .block import Event, run_block
from .memory import Array, Memory
from .sass import read_sass

_FULL, _SHORT, _CODE = "f", "h", "b"
_BYTES = {_FULL: np.float32, _SHORT: np.uint16, _CODE: np.uint8}
SCALARS = np.array([1, 1, 1e-3, 30, 0.999, 1, 0, 0], np.float32)
"""What `prepare` writes, with which a step is taken."""


@dataclass(frozen=True, slots=True)
class Case:
    """A kernel as a step launches it."""

    name: str
    kernel: Any
    constants: dict[str, Any]
    warps: int
    rows: str
    """What each row of the table points to: float32 (f), 16 bits (h), 8 bits (b), a scale for 256 elements (s)."""

    @property
    def elements(self) -> int:
        """Of one program."""
        return int(self.constants["CHUNK"])


@dataclass(frozen=True, slots=True)
class Made:
    """What a kernel became: its warps' instructions, and what it takes of a processor."""

    traces: list[list[Event]]
    registers: int
    """Of a thread."""
    shared: int
    """Bytes of shared memory of a block."""


def _step(name: str, kernel: Any, rows: str, warps: int = launch.WARPS, **constants: Any) -> Case:
    return Case(name, kernel, {**constants, "ALIGNED": True, "CHUNK": launch.CHUNK}, warps, rows)


def _adam(name: str, rows: str, kind: int, grad: Any, low: Any = None, amsgrad: bool = False) -> Case:
    return _step(name, elementwise.adam_kernel, rows, GRAD=grad, LOW=low, KIND=kind, DECAY=2, AMSGRAD=amsgrad)


def _adam_8bit(name: str, rows: str, kind: int, grad: Any, low: Any = None) -> Case:
    constants = {"GRAD": grad, "LOW": low, "KIND": kind, "DECAY": 2}
    return _step(name, eight_bit.adam_8bit, rows, eight_bit.WARPS, **constants)


def _simple(name: str, rows: str, rule: int) -> Case:
    return _step(name, elementwise.simple_kernel, rows, GRAD=tl.float16, LOW=tl.float16, RULE=rule, NESTEROV=False)


def _read(name: str, row: str, dtype: torch.dtype) -> Case:
    kind, integer, warps = read.KINDS[dtype]
    constants = {"KIND": kind, "INTEGER": integer, "ALIGNED": True, "CHUNK": read.LONG, "BLOCK": read.BLOCK}
    return Case(name, read.read_kernel, constants, warps, row)


_HALF, _BRAIN, _FLOAT = tl.float16, tl.bfloat16, tl.float32
CASES = [
    _adam("Adam: float32 masters, float16 gradients and weights", "fhffh", 0, _HALF, _HALF),
    _adam("Adam: float32 masters, bfloat16 gradients and weights", "fhffh", 0, _BRAIN, _BRAIN),
    _adam("Adam: float32", "ffff", 0, _FLOAT),
    _adam("Adam: split bfloat16 masters", "hhffh", 1, _BRAIN),
    _adam("Adam: bfloat16, stochastic rounding", "hhff", 2, _BRAIN),
    _adam("Adam, AMSGrad: float32 masters, float16", "fhfffh", 0, _HALF, _HALF, amsgrad=True),
    _adam_8bit("8-bit Adam: float32 masters, float16 gradients and weights", "fhbbssh", 0, _HALF, _HALF),
    _adam_8bit("8-bit Adam: float32 masters, bfloat16 gradients and weights", "fhbbssh", 0, _BRAIN, _BRAIN),
    _adam_8bit("8-bit Adam: float32", "ffbbss", 0, _FLOAT),
    _adam_8bit("8-bit Adam: split bfloat16 masters", "hhbbssh", 1, _BRAIN),
    _adam_8bit("8-bit Adam: bfloat16, stochastic rounding", "hhbbss", 2, _BRAIN),
    _adam_8bit("8-bit Adam: bfloat16, rounded to nearest", "hhbbss", 3, _BRAIN, _BRAIN),
    _simple("SGD: float32 masters, float16", "fhh", 0),
    _simple("SGD with momentum: float32 masters, float16", "fhfh", 2),
    _simple("Adagrad: float32 masters, float16", "fhfh", 3),
    *[
        _read(f"reading {dtype} gradients".replace("torch.", ""), row, dtype)
        for dtype, row in ((torch.float16, _SHORT), (torch.bfloat16, _SHORT), (torch.float32, _FULL))
    ],
]  # fmt: skip


@functools.cache
def _tool() -> Path:
    return Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"


def disassembled(cubin: bytes) -> str:
    """The SASS of a compiled kernel, by the `cuobjdump` that Triton brings."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([_tool(), "-sass", file.name], capture_output=True, text=True, check=True).stdout


def make(case: Case) -> tuple[Made, Memory]:
    """Compile a kernel and run a block of it; returns what it became, and the memory as it left it."""
    kernel = compiled(case.kernel, case.constants, case.warps)
    memory = Memory()
    arguments = _arguments(case, memory)
    traces = run_block(read_sass(disassembled(kernel.asm["cubin"])), memory, arguments, case.warps)
    taken = resources(kernel.asm["cubin"])
    return Made(traces, taken["reg"], kernel.metadata.shared), memory


def _arguments(case: Case, memory: Memory) -> bytes:
    """Fill `memory` with one tensor of one chunk, and return the kernel's arguments as they lie in constant memory."""
    rows = [memory.add(f"row {i}", before(case, i)) for i in range(len(case.rows))]
    held: dict[str, Array] = {
        "scalars": SCALARS, "table": np.array([*rows, 0], np.int64), "sizes": np.array([case.elements], np.int64),
        **{name: np.zeros(1, np.int32) for name in ("tensor_of", "block_of")},
    }  # fmt: skip
    numbers = {"one_beta1": 0.1, "one_beta2": 0.001, "beta2": 0.999, "eps": 1e-8, "decay": 0.01,
               "momentum": 0.9, "blend": 1.0}  # fmt: skip
    packed = b""
    for name in case.kernel.arg_names:
        if name in case.constants:
            continue
        if name in POINTERS:
            value = struct.pack("Q", memory.add(name, held.get(name, np.ones(8, np.float32))))
        elif name in WHOLE:
            value = struct.pack("i", name == "tensors")
        else:
            value = struct.pack("f", numbers.get(name, 0.0))
        packed += bytes(-len(packed) % len(value)) + value
    return packed + bytes(64)  # and null pointers, of which releases of Triton append one or two


def before(case: Case, row: int) -> Array:
    """What lies in a row of the table before the step: ordinary numbers of every kind."""
    kind, spread = case.rows[row], np.random.default_rng(row)
    if kind == "s":
        return np.full(case.elements // 256, 0.01, np.float32)
    if kind == _CODE:
        return spread.integers(8, 100, case.elements).astype(np.uint8)
    values = spread.uniform(0.25, 1.0, case.elements).astype(np.float32)
    if kind == _FULL:
        return values
    if _BRAIN in case.constants.values() or case.constants.get("KIND") == 1:
        return (values.view(np.uint32) >> 16).astype(np.uint16)
    return values.astype(np.float16)
