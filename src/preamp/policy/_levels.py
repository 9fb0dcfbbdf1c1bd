"""The levels: named policies, as rows of one table; and which of them suits a device."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ._policy import Policy


@dataclass(frozen=True, slots=True)
class Level:
    """A row of the table of levels."""

    name: str
    alias: str
    policy: Policy
    summary: str


_FP32, _FP16, _BF16 = torch.float32, torch.float16, torch.bfloat16

LEVELS: tuple[Level, ...] = (
    Level("O0", "fp32", Policy(), "float32 throughout: the yardstick"),
    Level(
        "O1", "fp16-mixed", Policy(compute=_FP16, scale="dynamic"),
        "float32 parameters, float16 where it is safe, by operator rules; loss scaling",
    ),
    Level(
        "O2", "fp16-master",
        Policy(params=_FP16, compute=_FP16, norms=_FP32, output=_FP32, masters=True, scale="dynamic"),
        "float16 parameters and activations, float32 norms and master weights; loss scaling",
    ),
    Level(
        "O3", "fp16", Policy(params=_FP16, compute=_FP16, norms=_FP16, output=_FP32, ops=None),
        "float16 throughout, no masters, no scaling: the speed of light, rarely a way to train",
    ),
    Level("O4", "bf16-mixed", Policy(compute=_BF16), "as O1 in bfloat16, whose range needs no loss scaling"),
    Level(
        "O5", "bf16-master", Policy(params=_BF16, compute=_BF16, norms=_FP32, output=_FP32, masters=True),
        "as O2 in bfloat16, whose range needs no loss scaling",
    ),
)  # fmt: skip

LEVEL_BY_NAME = {name.lower(): level for level in LEVELS for name in (level.name, level.alias)}


def level_names() -> tuple[str, ...]:
    """Every name that `policy` and `prepare(level=...)` take."""
    return (*(level.name for level in LEVELS), *(level.alias for level in LEVELS), "auto")


def auto_level(device_type: str | None = None) -> tuple[str, str]:
    """The level that suits a device type best, and the reason. Asks the driver about a CUDA device."""
    if device_type is None:
        device_type = "cuda" if torch.cuda.is_available() else "cpu"
    if device_type == "cuda":
        major, minor = torch.cuda.get_device_capability()
        if major >= 8:
            return (
                "O4",
                f"compute capability {major}.{minor} multiplies bfloat16 as fast as float16; no loss scaling",
            )
        if major >= 7:
            return "O1", f"compute capability {major}.{minor} has tensor cores for float16 only"
        return (
            "O0",
            f"compute capability {major}.{minor} has no tensor cores: 16 bits would save memory, not time",
        )
    if device_type == "cpu":
        if cpu_has_bf16():
            return "O4", "this CPU multiplies bfloat16 in hardware"
        return "O0", "this CPU has no 16-bit arithmetic: mixed precision would be slower than float32"
    if device_type == "xpu":
        return "O4", "XPU devices multiply bfloat16 in hardware"
    return (
        "O0",
        f"nothing is known about 16-bit arithmetic on {device_type!r} devices; name a level to use one",
    )


def cpu_has_bf16() -> bool:
    """Whether this CPU has instructions that multiply bfloat16 (AVX512-BF16 or AMX)."""
    probes = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    return any(bool(getattr(torch.cpu, name, bool)()) for name in probes)
