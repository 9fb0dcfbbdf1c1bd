"""Which level suits a device."""

from __future__ import annotations

import torch


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
