"""Has products of 16-bit tensors go through float32, or not, whatever the CPU is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from preamp.autocast import PRODUCTS, REGISTRY, _products
from preamp.formats import cpu_multiplies

BY_TORCH, BY_FLOAT32 = "bf16,fp16", ""
"""Values of PREAMP_CPU_MULTIPLIES: a CPU that has arithmetic for both dtypes, and one for neither."""


@contextmanager
def cpu_that_multiplies(dtypes: str) -> Iterator[pytest.MonkeyPatch]:
    """Inside, the CPU counts as one with arithmetic for these dtypes. No session may be open as it begins or ends."""
    REGISTRY.uninstall()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PREAMP_CPU_MULTIPLIES", dtypes)
        cpu_multiplies.cache_clear()
        try:
            yield patch
        finally:
            REGISTRY.uninstall()
            assert not PRODUCTS._libraries
            patch.undo()
            cpu_multiplies.cache_clear()


@contextmanager
def counted() -> Iterator[list[bool]]:
    """A list that gets an entry for each 16-bit product of the CPU from now on: whether it goes through float32."""
    asked: list[bool] = []

    def telling(applies: Callable[[], bool]) -> Callable[[], bool]:
        def told() -> bool:
            asked.append(applies())
            return asked[-1]

        return told

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_products, "_applies", telling(_products._applies))
        yield asked
