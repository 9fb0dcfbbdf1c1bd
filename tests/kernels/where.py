"""Where kernels run in these tests: a GPU, Triton's interpreter on the CPU, or the emulator on the fake CUDA device."""

from __future__ import annotations

import os
import sys

import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
ON_DEVICE = torch.cuda.is_available() and (
    "tests.pretend.plugin" not in sys.modules or "tests.emulator.driver" in sys.modules
)

inside = pytest.mark.skipif(
    not (INTERPRETED or ON_DEVICE), reason="run in processes of their own: test_in_the_interpreter, tests/emulator"
)

KERNEL_FILES = ("test_kernels", "test_read_kernel", "test_eight_bit_kernels")
"""The files that have such tests."""
