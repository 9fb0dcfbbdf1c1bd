"""Kernels in Triton: one launch over hundreds of tensors.

A kernel gets a table of addresses and a plan that cuts every tensor into chunks, one chunk a program. Plans are kept
for each list of sizes and tables for each list of addresses, so that a step which finds its tensors where they were
uploads nothing. Only this module and `tables` can be imported without Triton.
"""

from __future__ import annotations

import importlib
import os
from functools import cache

import torch


def triton_runs_on(device: torch.device) -> bool:
    """Whether kernels written in Triton can work on tensors of `device`, here and now.

    That is so if Triton can be imported, and the device is a GPU or `TRITON_INTERPRET=1` was set when the first
    kernel was about to be made: Triton's interpreter then runs them on the CPU, slowly, for tests.
    `PREAMP_NO_TRITON=1` in the environment says no everywhere. The answer is remembered for the process.
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
