"""A pytest plugin: `pytest -p tests.pretend.plugin -m gpu` runs GPU tests on the fake CUDA device."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

import torch
from benchmarks import counting, lists, measures

from .device import pretend

NATIVE = pretend(int(os.environ.get("PRETEND_CUDA_DEVICES", "1")))


def launches(work: Callable[[], Any]) -> int:
    """The number of kernels launched by one call of `work`; torch's profiler cannot see them here."""
    before = NATIVE.kernels()
    work()
    return int(NATIVE.kernels() - before)


for module in (counting, lists, measures):
    module.launches = launches
torch.compile = functools.partial(torch.compile, backend="aot_eager")  # Inductor would write kernels for a GPU
