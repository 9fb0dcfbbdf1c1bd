"""Where kernels run in these tests: Triton's interpreter on the CPU, or the emulator on the fake CUDA device."""

from __future__ import annotations

import os
import sys

import pytest

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
EMULATED = "tests.emulator.driver" in sys.modules

inside = pytest.mark.skipif(
    not (INTERPRETED or EMULATED), reason="run in processes of their own: test_in_the_interpreter, tests/emulator"
)
