"""Which level suits a device."""

from __future__ import annotations

import torch

from ..formats import cpu_multiplies


def auto_level(device_type: str | None = None) -> tuple[str, str]:
    """The level that suits a device type best, and the reason. Asks the driver about a CUDA device."""
    if device_type is None:
        device_type = "cuda" if torch.cuda.is_available() else "cpu"
    if device_type == "cuda":
        major, minor = torch.cuda.get_device_capability()
        this = f"compute capability {major}.{minor}"
        if major >= 8:
            return "O4", f"{this} multiplies bfloat16 as fast as float16; no loss scaling"
        if major >= 7:
            return "O1", f"{this} has tensor cores for float16 only"
        return "O0", f"{this} has no tensor cores: 16 bits would save memory, not time"
    if device_type == "cpu":
        if cpu_multiplies(torch.bfloat16):
            return "O4", "this CPU multiplies bfloat16 in hardware"
        return "O0", "this CPU has no bfloat16 arithmetic: 16 bits save memory and no time; name a level to use one"
    if device_type == "xpu":
        return "O4", "XPU devices multiply bfloat16 in hardware"
    return "O0", f"nothing is known about 16-bit arithmetic on {device_type!r} devices; name a level to use one"


def cpu_arithmetic() -> str:
    """Which 16-bit products this CPU computes, and how it computes the others, in a sentence or two."""
    native = [name for name, dtype in _LOW.items() if cpu_multiplies(dtype)]
    others = [name for name in _LOW if name not in native]
    told = f"multiplies {' and '.join(native)} in hardware." if native else "has no 16-bit arithmetic."
    if others:
        told += (
            f" Products of {' and '.join(others)} are computed in float32 and rounded once: they take somewhat "
            "longer than float32, and tensors that are kept for backward take half its memory."
        )
    else:
        told += " Convolutions and attention in float16 are computed in float32 even so: torch has slow loops for them."
    return f"This CPU {told}"


_LOW = {"bfloat16": torch.bfloat16, "float16": torch.float16}
