"""A driver for Triton: it compiles kernels for a GPU down to PTX, and runs them on the fake CUDA device's memory."""

from __future__ import annotations

import os
import struct
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.backends.driver import GPUDriver
from triton.runtime import driver

from ..pretend.building import cache
from .ptx import Kernel

TARGET = GPUTarget("cuda", 90, 32)


class Driver(GPUDriver):  # type: ignore[misc]
    """Answers what Triton asks CUDA's driver, for the fake CUDA device."""

    def __init__(self, native: Any, computes: bool) -> None:
        super().__init__()
        self.utils = Utilities(native)
        run = started if computes else skipped
        self.launcher_cls = lambda source, metadata: Launcher(native, source, run)
        self.get_current_stream = lambda device: 0

    @classmethod
    def is_active(cls) -> bool:
        return True

    def map_python_to_cpp_type(self, ty: str) -> str:
        return ty

    def get_current_target(self) -> GPUTarget:
        return TARGET

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cuda", torch.cuda.current_device())

    def get_benchmarker(self) -> Any:
        return None


class Utilities:
    """Properties of the device, and the loading of kernels."""

    def __init__(self, native: Any) -> None:
        self._native = native

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": 232448, "multiprocessor_count": 132, "max_num_regs": 65536, "warpSize": 32}

    def load_binary(self, name: str, ptx: bytes, shared: int, device: int) -> tuple[Any, Kernel, int, int, int]:
        """Load a kernel; `RuntimeError` during a capture, like drivers that load no code during a capture."""
        if self._native.is_capturing():
            raise RuntimeError(
                f"Triton Error [CUDA]: operation not permitted when stream is capturing: the module of {name} is loaded"
            )
        kernel = Kernel(ptx.decode(), shared)
        return kernel, kernel, 0, 0, 1024

    def unload_module(self, kernel: Kernel) -> None:
        """Release a kernel; Python owns its memory."""


class Launcher:
    """Launches one kernel; during a capture it records the launch for every replay."""

    def __init__(self, native: Any, source: Any, run: Callable[..., None]) -> None:
        self._native, self._run = native, run
        self._types = [source.signature[name] for name in source.fn.arg_names]

    def __call__(self, x: int, y: int, z: int, stream: int, kernel: Kernel, *rest: Any) -> None:
        assert y == z == 1, "the kernels have grids of one dimension"
        given = rest[len(rest) - len(self._types) :]
        pairs = [(v, kind) for v, kind in zip(given, self._types, strict=True) if kind != "constexpr"]
        arguments = [bits(value, kind) for value, kind in pairs]
        self._native.launch(partial(self._run, kernel, arguments, x, given))


def started(kernel: Kernel, arguments: list[int], programs: int, held: Any) -> None:
    """Run a kernel. `held`: its arguments, so that tensors of a graph keep their memory until it is replayed."""
    kernel.run(arguments, programs)


def skipped(kernel: Kernel, arguments: list[int], programs: int, held: Any) -> None:
    """Replaces `started` when only the host's part of a launch is measured."""


def bits(value: Any, kind: str) -> int:
    """An argument as the 8 bytes of a kernel's parameter."""
    if isinstance(value, torch.Tensor):
        return value.data_ptr()
    if kind in ("fp32", "fp64"):
        return int.from_bytes(struct.pack("<f" if kind == "fp32" else "<d", value), "little")
    return int(value) & 0xFFFFFFFFFFFFFFFF


def install(native: Any, *, computes: bool = True) -> None:
    """Let Triton compile for the target and run kernels here, for the rest of this process.

    `computes=False`: kernels are launched, but do nothing.
    """

    def stop_at_ptx(backend: Any = None, stages: Any = None, *_: Any) -> tuple[str, str] | None:
        if stages is None:
            return "ptx", "ptx"  # part of the cache keys of compiled kernels
        stages["cubin"] = lambda ptx, metadata: ptx.encode()
        return None

    knobs.runtime.add_stages_inspection_hook = stop_at_ptx
    # apart from the cache of real kernels: Triton 3.6 would confuse the two
    knobs.cache.dir = str(Path(os.environ.get("TRITON_CACHE_DIR") or cache()) / f"ptx-{triton.__version__}")
    driver.set_active(Driver(native, computes))
