"""Writes into a tensor of another dtype, as of features of an image into embeddings of a text."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import preamp

from ..rows import check_rows

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
ROWS, MASK = torch.tensor([0, 1]), torch.tensor([True, True, False])


def places(source: Tensor) -> Tensor:
    return ROWS[:, None].expand_as(source)


def by_mask(x: Tensor, y: Tensor) -> Tensor:
    x = x.clone()
    x[MASK] = y
    return x


def by_number(x: Tensor, y: Tensor) -> Tensor:
    x = x.clone()
    x[ROWS, :] += y
    return x


OUT_OF_PLACE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "index_add": lambda x, y: x.index_add(0, ROWS, y),
    "index_copy": lambda x, y: x.index_copy(0, ROWS, y),
    "index_put": lambda x, y: x.index_put((ROWS,), y),
    "index_reduce": lambda x, y: x.index_reduce(0, ROWS, y, "mean"),
    "scatter": lambda x, y: x.scatter(0, places(y), y),
    "scatter_add": lambda x, y: x.scatter_add(0, places(y), y),
    "scatter_reduce": lambda x, y: x.scatter_reduce(0, places(y), y, "sum"),
    "masked_scatter": lambda x, y: x.masked_scatter(MASK[:, None], y),
    "put": lambda x, y: x.put(torch.arange(8), y),
    "select_scatter": lambda x, y: x.select_scatter(y[0], 0, 1),
    "slice_scatter": lambda x, y: x.slice_scatter(y, 0, 0, 2),
    "diagonal_scatter": lambda x, y: x.diagonal_scatter(y[0, :3]),
    "lerp": lambda x, y: torch.lerp(x[:2], y, 0.3),
}
IN_PLACE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "x[mask] = y": by_mask,
    "x[rows] += y": by_number,
    "index_add_": lambda x, y: x.clone().index_add_(0, ROWS, y),
    "index_copy_": lambda x, y: x.clone().index_copy_(0, ROWS, y),
    "index_put_": lambda x, y: x.clone().index_put_((ROWS,), y),
    "scatter_": lambda x, y: x.clone().scatter_(0, places(y), y),
    "scatter_add_": lambda x, y: x.clone().scatter_add_(0, places(y), y),
    "scatter_reduce_": lambda x, y: x.clone().scatter_reduce_(0, places(y), y, "sum"),
    "masked_scatter_": lambda x, y: x.clone().masked_scatter_(MASK[:, None], y),
    "put_": lambda x, y: x.clone().put_(torch.arange(8), y),
    "lerp_": lambda x, y: x[:2].clone().lerp_(y, 0.3),
}


@pytest.mark.filterwarnings("ignore:index_reduce:UserWarning")
@pytest.mark.parametrize(("into", "what"), [(FP32, BF16), (BF16, FP32), (FP16, BF16), (FP32, FP16)], ids=str)
def test_values_dtypes_and_gradients(into: torch.dtype, what: torch.dtype) -> None:
    check_rows({**OUT_OF_PLACE, **IN_PLACE}.items(), lambda name, write: check_write(name, write, into, what))


def check_write(name: str, write: Callable[[Tensor, Tensor], Tensor], into: torch.dtype, what: torch.dtype) -> None:
    x, y = (torch.randn(n, 4).to(dtype).requires_grad_() for n, dtype in ((3, into), (2, what)))
    a, b = (t.detach().float().requires_grad_() for t in (x, y))
    with preamp.autocast("cpu", dtype=BF16):
        written = write(x, y)
    assert written.dtype is (into if name in IN_PLACE else FP32)
    written.float().square().sum().backward()
    wanted = write(a, b)
    wanted.square().sum().backward()
    torch.testing.assert_close(written.float(), wanted, rtol=2e-2, atol=2e-2)
    for ours, theirs in ((x.grad, a.grad), (y.grad, b.grad)):
        assert ours is not None and theirs is not None
        torch.testing.assert_close(ours.float(), theirs, rtol=4e-2, atol=4e-2)
    assert x.grad is not None and y.grad is not None and (x.grad.dtype, y.grad.dtype) == (into, what)


def test_what_is_written_is_the_tensor_itself() -> None:
    x, y = torch.zeros(3, 4), torch.ones(2, 4, dtype=BF16)
    with preamp.autocast("cpu", dtype=BF16):
        assert x.index_add_(0, ROWS, y) is x
        x[2, :2] = y[0, :2]
        x.view(-1)[MASK.repeat(4)] = torch.full((8,), 2.0, dtype=BF16)
    assert x.view(-1)[:3].tolist() == [2, 2, 1] and x[2, 1] == 2


class Writes(nn.Module):
    """Writes features into embeddings, in each way around."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.seen = nn.Embedding(8, 4), nn.Linear(4, 4)
        self.norm, self.last = nn.LayerNorm(4), nn.Linear(4, 2)

    def forward(self, tokens: Tensor, image: Tensor) -> Tensor:
        x, y = self.words(tokens).clone(), self.norm(self.seen(image))
        x[MASK] = y
        x = self.norm(x).index_add(0, ROWS, self.seen(image)).masked_scatter(MASK[:, None], self.seen(image))
        return self.last(x)


@pytest.mark.parametrize("level", ["O1", "O2", "O4", "O5"])
def test_in_sessions(level: str) -> None:
    torch.manual_seed(0)
    model = Writes()
    arguments: Any = (torch.tensor([1, 2, 3]), torch.randn(2, 4))
    wanted = model(*arguments)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with preamp.prepare(model, optimizer, level=level, scale=1.0) as session:
        with session.autocast():
            seen = model(*arguments).float()
        torch.testing.assert_close(seen, wanted, rtol=3e-2, atol=3e-2)
        session.backward(seen.sum())
        assert not session.step().skipped
