"""Kernels in Triton: one launch over hundreds of tensors.

A kernel gets a table of addresses, and the chunks into which every tensor is cut, one chunk a program. Chunks are
cached by the list of sizes and tables by the list of addresses, so a step whose tensors have not moved uploads nothing.
Only this module and `tables` can be imported without Triton.
"""

from __future__ import annotations

import importlib
import os
from functools import cache

import torch


def triton_runs_on(device: torch.device) -> bool:
    """Whether Triton kernels can run on tensors of `device`.

    They can if Triton can be imported, and the device is a GPU or `TRITON_INTERPRET=1` was set before the first kernel
    was made: Triton's interpreter then runs them on the CPU, slowly, for tests. `PREAMP_NO_TRITON=1` in the environment
    turns kernels off everywhere. The answer is cached for the process.
    """
    return _runs_on(device.type)


@cache
def _runs_on(device_type: str) -> bool:
    if os.environ.get("PREAMP_NO_TRITON") == "1":
        return False
    if device_type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        return False
    if device_type not in ("cuda", "cpu"):
        return False
    try:
        importlib.import_module("triton")
    except ImportError:
        return False
    return True
