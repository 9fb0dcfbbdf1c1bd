"""torch's own tables of what autocast does on CUDA, run on the CPU in preamp's regions: the dtypes are CUDA's.

What the values are is checked in `test_torch_keeps_its_lists`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import preamp

from ..rows import check_rows

pytest.importorskip("expecttest", reason="torch's test lists need it")
lists = pytest.importorskip("torch.testing._internal.autocast_test_lists")

FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32
EACH = pytest.mark.parametrize("low", [FP16, BF16], ids=str)


class Entry(NamedTuple):
    """One line of torch's lists."""

    list: str
    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    module: Any


SKIPPED = {
    ("torch_fp16", "cudnn_convolution"): "only CUDA has it",
    ("torch_fp16", "cudnn_convolution_transpose"): "only CUDA has it",
}
"""Entries that cannot run on a CPU, by list and operator."""

MODULES = {
    "nn_fp16": torch._C._nn, "nn_fp32": torch._C._nn, "nn_16": torch._C._nn, "linalg_fp16": torch._C._linalg,
    "methods_fp16": None, "methods_fp32": None,
    "methods_expect_builtin_promote": None,
}  # fmt: skip

torch.manual_seed(0)
CUDA_LISTS = lists.AutocastTestLists(torch.device("cpu"))


def entries(*names: str) -> Iterator[tuple[Entry]]:
    for name in names:
        for row in getattr(CUDA_LISTS, name):
            kwargs = next((part for part in row[2:] if isinstance(part, dict)), {})
            args, method = row[1], row[0]
            if isinstance(args, str):  # einsum: the equation stands where the others have arguments
                continue
            if (name, method) not in SKIPPED:
                yield (Entry(name, method, args, kwargs, MODULES.get(name, torch)),)


def cast(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, (list, tuple)):
        return type(value)(cast(item, dtype) for item in value)
    return value


def call(entry: Entry, args: tuple[Any, ...]) -> list[Any]:
    """Results of the function and of the method of that name, whichever exist."""
    results = []
    name = entry.name
    if entry.module is not None and hasattr(entry.module, name):
        results.append(getattr(entry.module, name)(*args, **entry.kwargs))
    if isinstance(args[0], Tensor) and hasattr(Tensor, name):
        results.append(getattr(args[0], name)(*args[1:], **entry.kwargs))
    assert results, f"torch has no {entry.name}"
    return results


def check(entry: Entry, args: tuple[Any, ...], low: torch.dtype, wanted: torch.dtype) -> None:
    with preamp.autocast("cpu", dtype=low):
        results = call(entry, args)
    for result in results:
        first = result[0] if isinstance(result, (list, tuple)) else result
        if isinstance(first, Tensor):
            assert first.dtype is wanted


@EACH
@pytest.mark.filterwarnings("ignore:.*chain_matmul is deprecated")
def test_what_cuda_runs_low(low: torch.dtype) -> None:
    def runs_low(entry: Entry) -> None:
        check(entry, entry.args, low, low)
        check(entry, cast(entry.args, low), low, low)

    check_rows(entries("torch_fp16", "nn_fp16", "linalg_fp16", "methods_fp16"), runs_low)


@EACH
def test_einsum_runs_low(low: torch.dtype) -> None:
    a, b = torch.randn(2, 3, 2, 4), torch.randn(2, 3, 2, 4)
    with preamp.autocast("cpu", dtype=low):
        assert torch.einsum("bkhd,bqhd->bqkh", a, b).dtype is low


@EACH
def test_what_cuda_runs_full(low: torch.dtype) -> None:
    every = entries("torch_fp32", "nn_fp32", "methods_fp32")
    check_rows(every, lambda entry: check(entry, cast(entry.args, low), low, FP32))


@EACH
@pytest.mark.filterwarnings("ignore:(?s).*torch.cross without specifying the dim")
def test_what_cuda_promotes(low: torch.dtype) -> None:
    every = entries("torch_need_autocast_promote")
    check_rows(every, lambda entry: check(entry, mixed(entry.args, low), low, FP32))


@EACH
def test_what_torch_promotes_by_itself(low: torch.dtype) -> None:
    def promotes(entry: Entry) -> None:
        name, promised = next((row[0], row[-1]) for row in getattr(CUDA_LISTS, entry.list) if row[0] == entry.name)
        if name == "__div__":
            entry = entry._replace(name="__truediv__")
        check(entry, mixed(entry.args, low), low, promised or FP32)

    check_rows(entries("torch_expect_builtin_promote", "methods_expect_builtin_promote"), promotes)


def mixed(args: Any, low: torch.dtype) -> Any:
    """The arguments with their float16 tensors in the region's dtype; float32 stays."""
    if isinstance(args, Tensor):
        return args.to(low) if args.dtype is FP16 else args
    return type(args)(mixed(item, low) for item in args) if isinstance(args, (list, tuple)) else args


def test_every_list_of_torch_is_used() -> None:
    used = {
        "torch_fp16", "nn_fp16", "linalg_fp16", "methods_fp16", "torch_fp32", "nn_fp32", "methods_fp32",
        "torch_need_autocast_promote", "torch_expect_builtin_promote", "methods_expect_builtin_promote",
    }  # fmt: skip
    assert set(vars(CUDA_LISTS)) == {*used, "banned"}  # which `test_regions` has
