"""torch's own tables of what autocast does on CUDA, run on the CPU in preamp's regions."""

from __future__ import annotations

import collections.abc
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


def equal(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return a.dtype == b.dtype and torch.equal(a.nan_to_num(), b.nan_to_num())
    if isinstance(a, collections.abc.Iterable):
        return all(equal(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b)


def near(low: Any, exact: Any) -> bool:
    """Whether 16-bit results are the exact ones but for roundings."""
    if isinstance(low, Tensor):
        atol = 0.02 * max(1.0, float(exact.double().abs().nan_to_num(0).max())) if exact.numel() else 0.0
        return torch.allclose(low.double(), exact.double(), rtol=0.02, atol=atol, equal_nan=True)
    if isinstance(low, collections.abc.Iterable):
        return all(near(x, y) for x, y in zip(low, exact, strict=True))
    return bool(low == exact)


def check(entry: Entry, args: tuple[Any, ...], low: torch.dtype, run_as: torch.dtype, out: torch.dtype | None) -> None:
    with preamp.autocast("cpu", dtype=low):
        results = call(entry, args)
    # how a CPU multiplies 16-bit tensors is its own affair: what it should come to is known from float64
    controls = call(entry, cast(cast(args, run_as), torch.float64) if run_as is low else cast(args, run_as))
    for result, control in zip(results, controls, strict=True):
        first = result[0] if isinstance(result, (list, tuple)) else result
        if isinstance(first, Tensor):
            assert first.dtype is (out or run_as)
        assert near(result, control) if run_as is low else equal(result, control), (result, control)


@EACH
@pytest.mark.filterwarnings("ignore:.*chain_matmul is deprecated")
def test_what_cuda_runs_low(low: torch.dtype) -> None:
    def runs_low(entry: Entry) -> None:
        check(entry, entry.args, low, low, None)
        check(entry, cast(entry.args, low), low, low, None)

    check_rows(entries("torch_fp16", "nn_fp16", "linalg_fp16", "methods_fp16"), runs_low)


@EACH
def test_einsum_runs_low(low: torch.dtype) -> None:
    a, b = torch.randn(2, 3, 2, 4), torch.randn(2, 3, 2, 4)
    equation = "bkhd,bqhd->bqkh"
    with preamp.autocast("cpu", dtype=low):
        result = torch.einsum(equation, a, b)
    assert result.dtype is low
    assert near(result, torch.einsum(equation, a.to(low).double(), b.to(low).double()))


@EACH
def test_what_cuda_runs_full(low: torch.dtype) -> None:
    every = entries("torch_fp32", "nn_fp32", "methods_fp32")
    check_rows(every, lambda entry: check(entry, cast(entry.args, low), low, FP32, None))


@EACH
@pytest.mark.filterwarnings("ignore:(?s).*torch.cross without specifying the dim")
def test_what_cuda_promotes(low: torch.dtype) -> None:
    every = entries("torch_need_autocast_promote")
    check_rows(every, lambda entry: check(entry, mixed(entry.args, low), low, FP32, None))


@EACH
def test_what_torch_promotes_by_itself(low: torch.dtype) -> None:
    def promotes(entry: Entry) -> None:
        name, promised = next((row[0], row[-1]) for row in getattr(CUDA_LISTS, entry.list) if row[0] == entry.name)
        if name == "__div__":
            entry = entry._replace(name="__truediv__")
        check(entry, mixed(entry.args, low), low, FP32, promised)

    check_rows(entries("torch_expect_builtin_promote", "methods_expect_builtin_promote"), promotes)


def mixed(args: Any, low: torch.dtype) -> Any:
    """The arguments with their float16 tensors in the region's dtype; float32 stays."""
    if isinstance(args, Tensor):
        return args.to(low) if args.dtype is FP16 else args
    return type(args)(mixed(item, low) for item in args) if isinstance(args, (list, tuple)) else args


@EACH
@pytest.mark.parametrize("name, args", [(row[0], row[1]) for row in CUDA_LISTS.banned])
def test_what_cuda_bans(name: str, args: tuple[Tensor, ...], low: torch.dtype) -> None:
    function = getattr(torch._C._nn, name)
    with preamp.autocast("cpu", dtype=low):
        for which in ((low, low), (low, FP32), (FP32, low)):
            with pytest.raises(RuntimeError, match="BCEWithLogitsLoss"):
                function(*(a.to(d) for a, d in zip(args, which, strict=True)))
        assert function(*args).dtype is FP32  # float32 probabilities are in no danger
    assert function(*args).dtype is FP32


@EACH
def test_the_two_tables_of_torch_differ(low: torch.dtype) -> None:
    """Where the CPU's lists and CUDA's disagree, preamp's regions follow CUDA's."""
    image = torch.randn(1, 2, 4, 4, 4).to(low)
    with torch.autocast("cpu", dtype=low):
        assert torch.nn.functional.avg_pool3d(image, 2).dtype is FP32
        assert torch.nn.functional.pad(image[0, 0], (1, 1), "reflect").dtype is FP32
        assert image.softmax(-1).dtype is low
    with preamp.autocast("cpu", dtype=low):
        assert torch.nn.functional.avg_pool3d(image, 2).dtype is low
        assert torch.nn.functional.pad(image[0, 0], (1, 1), "reflect").dtype is low
        assert image.softmax(-1).dtype is FP32


def test_every_list_of_torch_is_used() -> None:
    used = {
        "torch_fp16", "nn_fp16", "linalg_fp16", "methods_fp16", "torch_fp32", "nn_fp32", "methods_fp32", "banned",
        "torch_need_autocast_promote", "torch_expect_builtin_promote", "methods_expect_builtin_promote",
    }  # fmt: skip
    assert set(vars(CUDA_LISTS)) == used
