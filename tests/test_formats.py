"""The facts about formats, held against torch.finfo and against real casts."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from preamp.formats import FORMATS, FP64, LOW_DTYPES, Format, dtype_of, format_of, name_of

EACH = pytest.mark.parametrize("fmt", FORMATS, ids=lambda f: f.name)
NARROW = pytest.mark.parametrize("fmt", [f for f in FORMATS if f.bits <= 16], ids=lambda f: f.name)


def cast(value: float, fmt: Format) -> float:
    """`value`, a float32 number for formats narrower than that, rounded once."""
    wide = torch.float32 if fmt.bits <= 16 else torch.float64
    return float(torch.tensor(value, dtype=wide).to(fmt.dtype).to(torch.float64))


def after(value: float) -> float:
    return float(np.nextafter(np.float32(value), np.float32(np.inf)))


def test_every_format_is_there() -> None:
    assert [f.name for f in FORMATS] == ["fp64", "fp32", "fp16", "bf16", "fp8-e4m3", "fp8-e5m2"]
    assert {torch.float16, torch.bfloat16} == LOW_DTYPES


@EACH
def test_torch_agrees(fmt: Format) -> None:
    info = torch.finfo(fmt.dtype)
    assert fmt.max == info.max == -info.min
    assert fmt.smallest_normal == info.tiny
    assert fmt.epsilon == info.eps
    assert fmt.bits == info.bits
    assert fmt.smallest_subnormal == info.tiny * info.eps


@EACH
def test_the_limits_are_numbers_of_the_format(fmt: Format) -> None:
    for value in (fmt.max, fmt.smallest_normal, fmt.smallest_subnormal, 1 + fmt.epsilon):
        assert cast(value, fmt) == value
    assert cast(1 + fmt.epsilon / 2, fmt) == 1  # ties to even
    assert fmt.multiple * fmt.bits == 128


@NARROW
def test_the_flush_threshold_is_where_real_casts_become_zero(fmt: Format) -> None:
    threshold = fmt.flush_threshold
    assert threshold > 0
    assert cast(threshold, fmt) == 0 == cast(-threshold, fmt)
    assert cast(after(threshold), fmt) == fmt.smallest_subnormal
    assert cast(-after(threshold), fmt) == -fmt.smallest_subnormal


def test_the_flush_threshold_of_float32_from_float64() -> None:
    fmt = format_of(torch.float32)
    assert cast(fmt.flush_threshold, fmt) == 0
    assert cast(math.nextafter(fmt.flush_threshold, 1), fmt) == fmt.smallest_subnormal
    assert FP64.flush_threshold == 0  # nothing of a Python float is smaller


@NARROW
def test_subnormals_have_a_fixed_step_and_normals_do_not(fmt: Format) -> None:
    step = fmt.smallest_subnormal
    assert cast(2.5 * step, fmt) == 2 * step  # a bit is lost below the normals
    half_way = fmt.smallest_normal - step / 2
    assert cast(half_way, fmt) == fmt.smallest_normal


def test_fp8_by_casting() -> None:
    e4m3, e5m2 = format_of(torch.float8_e4m3fn), format_of(torch.float8_e5m2)
    assert [cast(v, e4m3) for v in (448.0, 463.0, 0.1, 3.3)] == [448.0, 448.0, 0.1015625, 3.25]
    assert [cast(v, e5m2) for v in (57344.0, 61439.0, 3.3)] == [57344.0, 57344.0, 3.5]
    assert len({float(v) for v in torch.arange(256).to(torch.uint8).view(torch.float8_e4m3fn).float()} - {448.0}) > 250
    finite = torch.arange(256).to(torch.uint8).view(torch.float8_e5m2).float()
    assert finite[finite.isfinite()].max() == e5m2.max
    assert finite[finite > 0].min() == e5m2.smallest_subnormal


@pytest.mark.parametrize(
    ("names", "dtype"),
    [
        (("fp64", "float64", "double", "torch.float64"), torch.float64),
        (("fp32", "float32", "float", "f32", "full", "torch.float32", " FP32 "), torch.float32),
        (("fp16", "float16", "half", "f16", "torch.float16", "Half", "torch.half"), torch.float16),
        (("bf16", "bfloat16", "torch.bfloat16", "BF16"), torch.bfloat16),
        (("fp8-e4m3",), torch.float8_e4m3fn),
        (("fp8-e5m2",), torch.float8_e5m2),
    ],
)
def test_names_of_dtypes(names: tuple[str, ...], dtype: torch.dtype) -> None:
    for name in (*names, dtype):
        assert dtype_of(name) is dtype
    assert dtype_of(name_of(dtype)) is dtype
    assert name_of(dtype) == names[0]
    assert format_of(dtype).dtype is dtype


@pytest.mark.parametrize("name", ["fp17", "", "int8", "torch.", "fp8", "float 16", None, 16])
def test_an_unknown_name_is_an_error_that_lists_the_known(name: str) -> None:
    with pytest.raises(ValueError, match="fp64, fp32, fp16, bf16, fp8-e4m3, fp8-e5m2") as caught:
        dtype_of(name)
    assert repr(name) in str(caught.value)


def test_dtypes_outside_the_formats() -> None:
    assert name_of(torch.int64) == "int64"
    assert name_of(torch.complex64) == "complex64"
    with pytest.raises(KeyError):
        format_of(torch.int64)
