"""Functions whose tensors differ in dtype: what they give, and its gradients, in compiled code and in sessions.

Of every operator with a rule `test_torch_keeps_its_lists` looks at the result; here are some of each kind.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import preamp

from ..releases import TORCH
from ..rows import over

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
ROWS, MASK = torch.tensor([0, 1]), torch.tensor([True, True, False])
BAGS = torch.tensor([[0, 1], [2, 2], [1, 3]])
Shapes = tuple[tuple[int, ...], ...]


def places(source: Tensor) -> Tensor:
    return ROWS[:, None].expand_as(source)


def by_mask(x: Tensor, y: Tensor) -> Tensor:
    x[MASK] = y
    return x


def by_number(x: Tensor, y: Tensor) -> Tensor:
    x[ROWS, :] += y
    return x


INTO: Shapes = ((3, 4), (2, 4))
ALIKE: Shapes = ((3, 4), (3, 4))
IN_PLACE: dict[str, tuple[Callable[..., Tensor], Shapes]] = {
    "x[mask] = y": (by_mask, INTO),
    "x[rows] += y": (by_number, INTO),
    "index_add_": (lambda x, y: x.index_add_(0, ROWS, y), INTO),
    "scatter_": (lambda x, y: x.scatter_(0, places(y), y), INTO),
    "scatter_reduce_": (lambda x, y: x.scatter_reduce_(0, places(y), y, "sum"), INTO),
    "lerp_": (lambda x, y: x.lerp_(y, 0.3), ALIKE),
    "addmm_": (lambda x, a, b: x.addmm_(a, b, beta=0.5), ((3, 4), (3, 5), (5, 4))),
    "addbmm_": (lambda x, a, b: x.addbmm_(a, b, alpha=2), ((3, 4), (2, 3, 5), (2, 5, 4))),
    "addcmul_": (lambda x, a, b: x.addcmul_(a, b), ((3, 4), (3, 4), (3, 4))),
    "atan2_": (lambda x, a: x.atan2_(a), ALIKE),
    "hypot_": (lambda x, a: x.hypot_(a), ALIKE),
}
"""A call, and the shapes of its tensors, the first of which is written and keeps its dtype."""
WIDEST: dict[str, tuple[Callable[..., Tensor], Shapes]] = {
    "index_put": (lambda x, y: x.index_put((ROWS,), y), INTO),
    "scatter_add": (lambda x, y: x.scatter_add(0, places(y), y), INTO),
    "masked_scatter": (lambda x, y: x.masked_scatter(MASK[:, None], y), INTO),
    "select_scatter": (lambda x, y: x.select_scatter(y[0], 0, 1), INTO),
    "lerp": (lambda x, y: torch.lerp(x, y, 0.3), ALIKE),
    "addcmul": (torch.addcmul, ((3, 4), (3, 4), (3, 4))),
    "hypot": (torch.hypot, ALIKE),
    "meshgrid": (lambda a, b: torch.stack(torch.meshgrid(a, b, indexing="xy")), ((3,), (4,))),
}
CALLS = {**IN_PLACE, **WIDEST}


def made(shapes: Shapes, dtypes: tuple[torch.dtype, ...]) -> tuple[list[Tensor], list[Tensor]]:
    """Tensors of these dtypes, and the same in float32."""
    torch.manual_seed(0)
    drawn = [torch.randn(shape).bfloat16().float() for shape in shapes]
    given = [t.to(dtype).requires_grad_() for t, dtype in zip(drawn, dtypes, strict=True)]
    return given, [t.detach().float().requires_grad_() for t in given]


def check(seen: Tensor, wanted: Tensor, given: list[Tensor], exact: list[Tensor]) -> None:
    torch.testing.assert_close(seen.float(), wanted, rtol=2e-2, atol=5e-2)
    seen.float().square().sum().backward()
    wanted.square().sum().backward()
    for ours, theirs in zip(given, exact, strict=True):
        assert ours.grad is not None and theirs.grad is not None and ours.grad.dtype is ours.dtype
        size = float(theirs.grad.abs().max())
        torch.testing.assert_close(ours.grad.float(), theirs.grad, rtol=4e-2, atol=2e-2 * size + 4e-2)


@over(name=CALLS, backend=[None, "aot_eager"])
def test_results_and_gradients(name: str, backend: str | None) -> None:
    function, shapes = CALLS[name]
    if backend and name == "x[mask] = y" and TORCH < (2, 7):
        pytest.skip("torch 2.6 traces no gradient of a write by mask, of any dtypes")

    def called(x: Tensor, *others: Tensor) -> Tensor:
        return function(x.clone(), *others)

    call: Any = torch.compile(called, backend=backend, fullgraph=True) if backend else called
    mixtures = [each for each in itertools.product((FP32, BF16), repeat=len(shapes)) if len(set(each)) > 1]
    mixtures.append((FP16, *[BF16] * (len(shapes) - 1)))
    for dtypes in mixtures if backend is None else (mixtures[0], mixtures[-2]):  # float32 first, and 16 bits
        torch._dynamo.reset()
        given, exact = made(shapes, dtypes)
        with preamp.autocast("cpu", dtype=BF16):
            seen = call(*given)
        assert seen.dtype is (dtypes[0] if name in IN_PLACE else FP32)
        check(seen, called(*exact), given, exact)


@over(layout=["coo", "csr"], learns=["matrix", "features", "both"], dtype=[FP32, BF16])
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
def test_products_with_sparse_matrices(layout: str, learns: str, dtype: torch.dtype) -> None:
    """As graph networks have them: of an adjacency and of features, either of which may be 16-bit already."""
    if layout == "csr" and learns != "features":
        return  # torch itself has no gradient of the matrix
    (dense, x), exact = made(((6, 6), (6, 3)), (FP32, dtype))
    results = []
    for d, f in ((dense, x), exact):
        d.requires_grad_(learns != "features"), f.requires_grad_(learns != "matrix")
        with preamp.autocast("cpu", dtype=BF16, enabled=d is dense):
            matrix = d.to_sparse() if layout == "coo" else d.to_sparse_csr()
            results.append(torch.sparse.mm(matrix, f))
    torch.testing.assert_close(*results, rtol=1e-2, atol=2e-2)
    for result in results:
        result.float().square().sum().backward()
    for ours, theirs in zip((dense, x), exact, strict=True):
        assert (ours.grad is None) == (theirs.grad is None)
        if ours.grad is not None and theirs.grad is not None:
            torch.testing.assert_close(ours.grad.float(), theirs.grad, rtol=4e-2, atol=0.1)


def test_what_is_written_is_the_tensor_itself() -> None:
    x, y = torch.zeros(3, 4), torch.ones(2, 4, dtype=BF16)
    with preamp.autocast("cpu", dtype=BF16):
        assert x.index_add_(0, ROWS, y) is x
        x[2, :2] = y[0, :2]
        x.view(-1)[MASK.repeat(4)] = torch.full((8,), 2.0, dtype=BF16)
    assert x.view(-1)[:3].tolist() == [2, 2, 1] and x[2, 1] == 2


@pytest.mark.parametrize("order", ["nuc", 2])
def test_norms_of_singular_values_are_float32(order: Any) -> None:
    matrix = torch.randn(3, 3).bfloat16().requires_grad_()
    with preamp.autocast("cpu", dtype=BF16):
        norm = torch.linalg.norm(matrix, order)
    torch.testing.assert_close(norm, torch.linalg.norm(matrix.float(), order))
    norm.backward()
    assert matrix.grad is not None and matrix.grad.dtype is BF16


@pytest.mark.parametrize("dtypes", [(FP32, BF16), (BF16, FP32)], ids=str)
def test_weighted_bags_of_embeddings_have_the_dtype_of_the_table(dtypes: tuple[torch.dtype, ...]) -> None:
    given, exact = made(((4, 3), (3, 2)), dtypes)
    with preamp.autocast("cpu", dtype=BF16):
        seen = F.embedding_bag(BAGS, given[0], per_sample_weights=given[1], mode="sum")
    assert seen.dtype is dtypes[0]
    check(seen, F.embedding_bag(BAGS, exact[0], per_sample_weights=exact[1], mode="sum"), given, exact)


class Mixes(nn.Module):
    """Adds features to embeddings, and writes products of 16-bit weights into a float32 stream, and back."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.first, self.norm = nn.Embedding(8, 4), nn.Linear(4, 4), nn.LayerNorm(4)
        self.last, self.more = nn.Linear(4, 2), nn.Parameter(torch.randn(4, 4) / 2)

    def forward(self, tokens: Tensor, image: Tensor) -> Tensor:
        x = self.words(tokens)
        x = x.index_add(0, ROWS, self.norm(self.first(image)))
        y = self.first(x)
        stream = self.norm(y).addmm_(y, self.more).masked_scatter(MASK[:, None], self.first(image))
        out: Tensor = self.last(self.first(stream).addmm_(stream, self.more))
        return out


@pytest.mark.parametrize(
    ("level", "backend"),
    [*((level, None) for level in ("O1", "O2", "O3", "O4", "O5")), ("O2", "aot_eager"), ("O4", "aot_eager")],
)
def test_in_sessions(level: str, backend: str | None) -> None:
    torch.manual_seed(0)
    model, arguments = Mixes(), (torch.tensor([1, 2, 3]), torch.randn(2, 4))
    wanted = model(*arguments)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with preamp.prepare(model, optimizer, level=level, scale=1.0) as session:
        run: Any = torch.compile(model, backend=backend) if backend else model
        with session.autocast():
            seen = run(*arguments).float()
        torch.testing.assert_close(seen, wanted, rtol=5e-2, atol=5e-2)
        session.backward(seen.square().sum())
        assert not session.step().skipped
