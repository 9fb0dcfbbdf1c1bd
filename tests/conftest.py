"""What every test may rely on: one thread, fixed seeds, and torch found again as it was."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import nullcontext

import pytest
import torch
import torch.compiler.config

from preamp.autocast import REGISTRY
from preamp.formats import cpu_multiplies

from .products import BY_FLOAT32, cpu_that_multiplies

BOTH_WAYS = {"autocast": (), "session": (), "compat": pytest.mark.slow}
"""Rooms whose tests run twice on a CPU that multiplies bfloat16: by it, and through float32; and with which marks.

A file whose fixture `through_float32` sees to that runs once.
"""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    room = metafunc.definition.path.parent.name
    chosen = "through_float32" in metafunc.fixturenames
    if room in BOTH_WAYS and not chosen and cpu_multiplies(torch.bfloat16):
        metafunc.fixturenames.insert(0, "products")
        ways = ["by this CPU", pytest.param("through float32", marks=BOTH_WAYS[room])]
        metafunc.parametrize("products", ways, indirect=True)


@pytest.fixture
def products(request: pytest.FixtureRequest) -> Iterator[None]:
    """How the CPU multiplies 16-bit tensors."""
    with cpu_that_multiplies(BY_FLOAT32) if request.param == "through float32" else nullcontext():
        yield


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()  # torch, the frameworks and 10,000 tests: what collects garbage later need not look at them


def pytest_sessionfinish() -> None:
    gc.unfreeze()  # else what lives in modules outlives them, of which some libraries complain


@pytest.fixture(autouse=True)
def torch_stays_as_it_was() -> Iterator[None]:
    REGISTRY.uninstall()  # a fixture of wider scope may have entered regions
    torch.set_num_threads(1)  # two workers on two cores
    torch.manual_seed(0)
    tag = torch.compiler.config.cache_key_tag
    yield
    assert not torch.is_autocast_enabled("cpu")
    assert not torch.is_autocast_enabled("ipu")
    assert torch.get_autocast_dtype("cpu") is torch.bfloat16
    assert torch.get_autocast_dtype("ipu") is torch.float16
    assert torch.get_default_dtype() is torch.float32
    assert torch.is_grad_enabled()
    left_open = list(REGISTRY._holders)
    for holder in left_open:  # else every test after this one would fail with it
        REGISTRY.release(holder)
    REGISTRY.uninstall()
    assert not left_open, f"{len(left_open)} sessions were left open"
    assert torch.compiler.config.cache_key_tag == tag
