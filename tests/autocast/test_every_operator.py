"""Every operator of torch's own list of tests, with tensors that differ in dtype: what float32 does, a region does."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import islice
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

import preamp

pytest.importorskip("expecttest", reason="torch's test lists need it")
methods = pytest.importorskip("torch.testing._internal.common_methods_invocations")

FP32, BF16 = torch.float32, torch.bfloat16
SAMPLES = 3

PARTS = r"native_\w+|_native_\w+|_batch_norm_with_update|_softmax_backward_data|grid_sampler_[23]d|_chunk_cat"
LEFT = {
    PARTS: "the kernels under functions that are ruled",
    r"special\.\w+_polynomial_\w+": "torch has no 16-bit kernel, and no gradient",
    r"nn\.functional\.(batch|instance)_norm": "weights and statistics have one dtype: sessions see to it in modules",
    r"nn\.functional\.linear_cross_entropy": "in chunks it is a function of its own, with one dtype",
    r"nn\.functional\.binary_cross_entropy": "banned",
    r"sparse\.\w+": "products of sparse matrices, which have one dtype",
}
"""Those that fail, and why."""


def floats(value: Any) -> list[Tensor]:
    return [t for t in pytree.tree_leaves(value) if isinstance(t, Tensor) and t.dtype is FP32]


def mixed(value: Any, dtypes: Iterator[torch.dtype]) -> Any:
    """A copy whose float32 tensors have these dtypes, in order."""

    def made(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        return leaf.detach().clone().to(next(dtypes) if leaf.dtype is FP32 else leaf.dtype)

    return pytree.tree_map(made, value)


def failures(function: Any, sample: Any, in_place: bool) -> Iterator[str]:
    given = ((sample.input, *sample.args), sample.kwargs)
    count = len(floats(given))
    if not 2 <= count <= 6 or (in_place and sample.broadcasts_input):
        return
    try:
        args, kwargs = mixed(given, iter([FP32] * count))
        function(*args, **kwargs)
    except Exception:
        return  # of what fails in float32 nothing is asked
    for one, others in ((BF16, FP32), (FP32, BF16)):
        for at in range(count):
            dtypes = [others] * count
            dtypes[at] = one
            args, kwargs = mixed(given, iter(dtypes))
            try:
                with preamp.autocast("cpu", dtype=BF16):
                    function(*args, **kwargs)
            except Exception as error:
                yield f"{dtypes}: {error}"
            else:
                if in_place and args[0].dtype is not dtypes[0]:
                    yield f"{dtypes}: what is written became {args[0].dtype}"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("in_place", [False, True], ids=["op", "in place"])
def test_mixed_dtypes(in_place: bool) -> None:
    found: dict[str, str] = {}
    for info in methods.op_db:
        function = info.inplace_variant if in_place else info.op
        if function is None or FP32 not in info.dtypes:
            continue
        for sample in islice(info.sample_inputs("cpu", FP32), SAMPLES):
            for failure in failures(function, sample, in_place):
                found.setdefault(info.name, failure)
    assert not {name: why for name, why in found.items() if not any(re.fullmatch(left, name) for left in LEFT)}
