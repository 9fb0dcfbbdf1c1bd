"""What torch can do only since some release; the supported range begins before."""

from __future__ import annotations

import pytest
import torch

TORCH = tuple(map(int, torch.__version__.split("+")[0].split(".")[:2]))

REGIONS_IN_COMPILED_CODE = pytest.mark.skipif(
    TORCH < (2, 7), reason="torch 2.6 traces no region of another class, nor guards compiled code on regions"
)
"""For regions inside of code compiled with `fullgraph`, and for code that is called in regions of several kinds."""
