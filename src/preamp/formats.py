"""Facts about floating-point formats: range, precision, names.

Source of the numbers: IEEE 754-2019 for binary16/32/64; bfloat16 is binary32 with 16 bits of significand cut
off; the OCP 8-bit specification (rev. 1.0, 2023) for the fp8 formats. `torch.finfo` agrees where it is defined,
and a test holds that.
"""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # torch is imported when one of its dtypes is asked for: `preamp doctor` reports without it
    import torch

    LOW_DTYPES: frozenset[torch.dtype]
    """The 16-bit compute dtypes that the design calls *low*."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Format:
    """One floating-point format; all limits are positive numbers of that format, as Python floats."""

    name: str
    torch_name: str
    """Of its dtype, without "torch."."""
    bits: int
    max: float
    """Largest finite number."""
    smallest_normal: float
    smallest_subnormal: float
    epsilon: float
    """Distance from 1 to the next larger number."""
    multiple: int
    """Matrix dimensions divisible by this run on tensor cores at full speed (16 bytes, NVIDIA)."""

    @property
    def dtype(self) -> torch.dtype:
        """The torch dtype of this format."""
        import torch

        found: torch.dtype = getattr(torch, self.torch_name)
        return found

    @property
    def flush_threshold(self) -> float:
        """Magnitudes at or below this round to zero (round to nearest, ties to even)."""
        return self.smallest_subnormal / 2


FP32 = Format(
    name="fp32", torch_name="float32", bits=32,
    max=(2 - 2**-23) * 2.0**127, smallest_normal=2.0**-126, smallest_subnormal=2.0**-149, epsilon=2.0**-23, multiple=4,
)  # fmt: skip
FP16 = Format(
    name="fp16", torch_name="float16", bits=16,
    max=65504.0, smallest_normal=2.0**-14, smallest_subnormal=2.0**-24, epsilon=2.0**-10, multiple=8,
)  # fmt: skip
BF16 = Format(
    name="bf16", torch_name="bfloat16", bits=16,
    max=(2 - 2**-7) * 2.0**127, smallest_normal=2.0**-126, smallest_subnormal=2.0**-133, epsilon=2.0**-7, multiple=8,
)  # fmt: skip
FP64 = Format(
    name="fp64", torch_name="float64", bits=64,
    max=(2 - 2**-52) * 2.0**1023, smallest_normal=2.0**-1022, smallest_subnormal=2.0**-1074, epsilon=2.0**-52,
    multiple=2,
)  # fmt: skip
FP8_E4M3 = Format(
    name="fp8-e4m3", torch_name="float8_e4m3fn", bits=8,
    max=448.0, smallest_normal=2.0**-6, smallest_subnormal=2.0**-9, epsilon=2.0**-3, multiple=16,
)  # fmt: skip
FP8_E5M2 = Format(
    name="fp8-e5m2", torch_name="float8_e5m2", bits=8,
    max=57344.0, smallest_normal=2.0**-14, smallest_subnormal=2.0**-16, epsilon=2.0**-2, multiple=16,
)  # fmt: skip

FORMATS: tuple[Format, ...] = (FP64, FP32, FP16, BF16, FP8_E4M3, FP8_E5M2)

_BY_TORCH_NAME = {f"torch.{f.torch_name}": f for f in FORMATS}
_BY_NAME = {f.name: f for f in FORMATS} | {f.torch_name: f for f in FORMATS if f.bits > 8} | {
    "float": FP32, "f32": FP32, "full": FP32, "half": FP16, "f16": FP16, "double": FP64,
}  # fmt: skip


def __getattr__(name: str) -> Any:
    if name != "LOW_DTYPES":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = frozenset({FP16.dtype, BF16.dtype})
    return globals()[name]


def format_of(dtype: torch.dtype) -> Format:
    """The facts of `dtype`; raises `KeyError` for a dtype that is not one of `FORMATS`."""
    return _BY_TORCH_NAME[str(dtype)]


def dtype_of(name: str | torch.dtype) -> torch.dtype:
    """The dtype called `name` ("fp16", "float16", "half", "torch.float16", ...); a dtype is returned as it is.

    Raises `ValueError` naming the legal names.
    """
    import torch

    if isinstance(name, torch.dtype):
        return name
    key = str(name).strip().lower().removeprefix("torch.")
    if key not in _BY_NAME:
        raise ValueError(f"{name!r} is not a dtype preamp knows; write one of {', '.join(f.name for f in FORMATS)}")
    return _BY_NAME[key].dtype


def name_of(dtype: torch.dtype) -> str:
    """The short name of a dtype ("fp16"); torch's own name for dtypes outside `FORMATS`."""
    found = _BY_TORCH_NAME.get(str(dtype))
    return found.name if found else str(dtype).removeprefix("torch.")


@lru_cache
def cpu_multiplies(dtype: torch.dtype) -> bool:
    """Whether this CPU has arithmetic for a dtype, and torch uses it.

    Bfloat16: AVX512-BF16, AMX, or what torch asks of other architectures; AVX512 alone emulates it. Float16:
    AVX512-FP16, AMX-FP16, or the like. The environment variable PREAMP_CPU_MULTIPLIES says it in place of the CPU, as
    a list: "bf16,fp16", or "" for neither.
    """
    import torch

    said = os.environ.get("PREAMP_CPU_MULTIPLIES")
    if dtype is torch.float32 or dtype is torch.float64:
        return True
    if said is not None:
        return dtype in {dtype_of(name) for name in said.split(",") if name.strip()}
    if dtype is torch.bfloat16 and platform.machine().lower() in ("x86_64", "amd64"):
        probes = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
        return any(bool(getattr(torch.cpu, name, bool)()) for name in probes)
    probe = {torch.bfloat16: "_is_mkldnn_bf16_supported", torch.float16: "_is_mkldnn_fp16_supported"}.get(dtype)
    try:
        return probe is not None and bool(getattr(torch.ops.mkldnn, probe)())
    except AttributeError:  # a torch without oneDNN
        return False
