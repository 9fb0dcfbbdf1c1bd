"""L2 norms of tensors of any length, against float64."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from preamp.kernels import global_norm, l2_norms, read
from preamp.kernels import norms as long_norms

from ..rows import over


def exact(tensor: Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor.abs().double()))


def test_of_long_tensors_is_as_right_as_of_short_ones() -> None:
    """As torch adds them up on a CPU the first is off by 1e-4, and by a thousandth with five times the entries."""
    torch.manual_seed(0)
    tensors = [torch.randn(n) for n in (5_000_000, long_norms.LONG, long_norms.LONG - 1, long_norms.ROW, 7, 1)]
    for tensor, norm in zip(tensors, l2_norms(tensors), strict=True):
        assert float(norm) == pytest.approx(exact(tensor), rel=5e-6)
    whole = exact(torch.cat(tensors))
    assert float(read(tensors).norm) == pytest.approx(whole, rel=1e-6)
    assert float(global_norm(tensors)) == pytest.approx(whole, rel=1e-6)
    assert l2_norms([]) == [] and float(l2_norms([torch.zeros(0)])[0]) == 0


@pytest.mark.parametrize("kind", ["transposed", "channels_last", "part", "every other", "offset", "complex", "float64"])
def test_of_any_layout(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every entry once, and none beside them."""
    monkeypatch.setattr(long_norms, "LONG", 50)
    monkeypatch.setattr(long_norms, "ROW", 16)
    torch.manual_seed(1)
    tensor = {
        "transposed": torch.randn(9, 14).t(),
        "channels_last": torch.randn(3, 5, 4, 4).to(memory_format=torch.channels_last),
        "part": torch.randn(12, 40)[:, 3:17],
        "every other": torch.randn(300)[::2],
        "offset": torch.randn(200)[61:],
        "complex": torch.randn(7, 9, dtype=torch.complex64),
        "float64": torch.randn(8, 16, dtype=torch.float64),
    }[kind]
    (norm,) = l2_norms([tensor])
    assert norm.dim() == 0 and norm.dtype is (torch.float64 if kind == "float64" else torch.float32)
    assert float(norm) == pytest.approx(exact(tensor), rel=1e-6)
    short = torch.randn(3).to(tensor.dtype)
    assert [float(n) for n in l2_norms([short, tensor, short])] == pytest.approx(
        list(map(exact, [short, tensor, short]))
    )


@over(value=[math.inf, math.nan, 1e30], place=[0, long_norms.ROW, long_norms.LONG, long_norms.LONG + 4])
def test_what_is_not_finite_is_seen_wherever_it_is(value: float, place: int) -> None:
    tensor = torch.zeros(long_norms.LONG + 5)
    tensor[place] = value
    reading = read([tensor])
    assert bool(reading.found) is (not math.isfinite(value)) and reading.nonfinite.tolist() == [bool(reading.found)]
    assert not math.isfinite(float(reading.norm)) if reading.found else float(reading.norm) == pytest.approx(1e30)


def test_threads_change_no_bit() -> None:
    torch.manual_seed(2)
    tensor, threads = torch.randn(1_000_003), torch.get_num_threads()
    try:
        norms = []
        for number in (1, 2, 3):
            torch.set_num_threads(number)
            norms.append(l2_norms([tensor])[0])
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(norms[0], norms[1]) and torch.equal(norms[0], norms[2])


class Wrapped(Tensor):
    """A kind of tensor that says itself how it is computed with, and cannot be looked at by strides."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func is not Tensor.as_strided
        return super().__torch_function__(func, types, args, kwargs)


def test_other_kinds_of_tensors_are_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(long_norms, "LONG", 50)
    values = torch.randn(100)
    norms = l2_norms([values.as_subclass(Wrapped), torch.nn.Parameter(values, requires_grad=False)])
    assert [float(norm) for norm in norms] == pytest.approx([exact(values)] * 2)
