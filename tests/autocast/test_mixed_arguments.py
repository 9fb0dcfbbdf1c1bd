"""Functions whose tensors differ in dtype: what works in float32 works in a region."""

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
BAGS = torch.tensor([[0, 1], [2, 2], [1, 3]])

IN_PLACE: dict[str, tuple[Callable[..., Tensor], tuple[tuple[int, ...], ...]]] = {
    "addmm_": (lambda x, a, b: x.addmm_(a, b, beta=0.5), ((3, 4), (3, 5), (5, 4))),
    "addmv_": (lambda x, a, b: x.addmv_(a, b), ((3,), (3, 5), (5,))),
    "addr_": (lambda x, a, b: x.addr_(a, b), ((3, 4), (3,), (4,))),
    "addbmm_": (lambda x, a, b: x.addbmm_(a, b, alpha=2), ((3, 4), (2, 3, 5), (2, 5, 4))),
    "baddbmm_": (lambda x, a, b: x.baddbmm_(a, b), ((2, 3, 4), (2, 3, 5), (2, 5, 4))),
    "addcmul_": (lambda x, a, b: x.addcmul_(a, b), ((3, 4), (3, 4), (3, 4))),
    "atan2_": (lambda x, a: x.atan2_(a), ((3, 4), (3, 4))),
    "hypot_": (lambda x, a: x.hypot_(a), ((3, 4), (3, 4))),
}
"""A call, and the shapes of its tensors, the first of which is written."""

WIDEST: dict[str, tuple[Callable[..., Any], tuple[tuple[int, ...], ...]]] = {
    "meshgrid": (lambda a, b: torch.stack(torch.meshgrid(a, b, indexing="xy")), ((3,), (4,))),
    "cartesian_prod": (torch.cartesian_prod, ((3,), (4,))),
    "addcmul": (torch.addcmul, ((3, 4), (3, 4), (3, 4))),
    "hypot": (torch.hypot, ((3, 4), (3, 4))),
}

IN_FLOAT32: dict[str, tuple[Callable[..., Any], tuple[tuple[int, ...], ...]]] = {
    "complex": (torch.complex, ((3,), (3,))),
    "lu_solve": (lambda a, b: torch.linalg.lu_solve(*torch.linalg.lu_factor(a), b), ((3, 3), (3, 2))),
    "solve_triangular": (
        lambda a, b: torch.linalg.solve_triangular(a + 4 * torch.eye(3), b, upper=True),
        ((3, 3), (3, 2)),
    ),
    "pinv": (torch.linalg.pinv, ((3, 3),)),
    "det": (torch.linalg.det, ((3, 3),)),
    "slogdet": (lambda a: torch.linalg.slogdet(a)[1], ((3, 3),)),
    "logdet": (lambda a: torch.logdet(a @ a.mT), ((3, 3),)),
    "matrix_exp": (torch.linalg.matrix_exp, ((3, 3),)),
    "matrix_norm of singular values": (lambda a: torch.linalg.matrix_norm(a, "nuc"), ((3, 3),)),
    "norm of singular values": (lambda a: torch.linalg.norm(a, 2), ((3, 3),)),
    "log_ndtr": (torch.special.log_ndtr, ((3,),)),
}


def made(shapes: tuple[tuple[int, ...], ...], dtypes: tuple[torch.dtype, ...]) -> tuple[list[Tensor], list[Tensor]]:
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


def dtypes_of(count: int) -> list[tuple[torch.dtype, ...]]:
    return [p for p in itertools.product((FP32, BF16), repeat=count) if count == 1 or len(set(p)) > 1]


@over(name=IN_PLACE, backend=[None, "aot_eager"])
def test_what_is_written_keeps_its_dtype(name: str, backend: str | None) -> None:
    function, shapes = IN_PLACE[name]

    def written(x: Tensor, *others: Tensor) -> Tensor:
        return function(x.clone(), *others)

    call = torch.compile(written, backend=backend, fullgraph=True) if backend else written
    every = [*dtypes_of(len(shapes)), (FP16, *[BF16] * (len(shapes) - 1))]
    for dtypes in every if backend is None else (every[0], every[-2]):  # float32 written, and 16 bits
        torch._dynamo.reset()
        given, exact = made(shapes, dtypes)
        with preamp.autocast("cpu", dtype=BF16):
            seen = call(*given)
        assert seen.dtype is dtypes[0]
        check(seen, written(*exact), given, exact)


@over(name=WIDEST, backend=[None, "aot_eager"])
def test_the_widest_wins(name: str, backend: str | None) -> None:
    if name == "cartesian_prod" and TORCH < (2, 7):
        backend = None  # which torch 2.6 does not trace
    function, shapes = WIDEST[name]
    call = torch.compile(function, backend=backend) if backend else function
    for dtypes in dtypes_of(len(shapes))[: None if backend is None else 1]:
        torch._dynamo.reset()
        given, exact = made(shapes, dtypes)
        with preamp.autocast("cpu", dtype=BF16):
            seen = call(*given)
        assert seen.dtype is FP32
        check(seen, function(*exact), given, exact)


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


@pytest.mark.parametrize("name", IN_FLOAT32)
def test_without_a_16_bit_kernel(name: str) -> None:
    function, shapes = IN_FLOAT32[name]
    for dtypes in [*dtypes_of(len(shapes)), (BF16,) * len(shapes)]:
        given, exact = made(shapes, dtypes)
        with preamp.autocast("cpu", dtype=BF16):
            seen = function(*given)
        torch.testing.assert_close(seen, function(*exact), rtol=1e-2, atol=2e-2)
        seen.abs().sum().backward()
        assert all(t.grad is not None and t.grad.dtype is t.dtype for t in given)


@pytest.mark.parametrize("dtypes", dtypes_of(2), ids=str)
def test_comparisons(dtypes: tuple[torch.dtype, ...]) -> None:
    x, y = torch.tensor([-1.0, 0.0, 2.0], dtype=dtypes[0]), torch.tensor([-1.0, 0.5, 2.0], dtype=dtypes[1])
    with preamp.autocast("cpu", dtype=BF16):
        assert torch.isclose(x, y).tolist() == [True, False, True]
        assert not torch.allclose(x, y) and torch.allclose(x, y, atol=1.0)
        step, written = torch.heaviside(x, y), x.clone().heaviside_(y)
    assert step.dtype is FP32 and step.tolist() == [0, 0.5, 1]
    assert written.dtype is dtypes[0] and written.tolist() == [0, 0.5, 1]


@pytest.mark.parametrize("dtypes", dtypes_of(2), ids=str)
def test_weighted_bags_of_embeddings_have_the_dtype_of_the_table(dtypes: tuple[torch.dtype, ...]) -> None:
    given, exact = made(((4, 3), (3, 2)), dtypes)
    with preamp.autocast("cpu", dtype=BF16):
        seen = F.embedding_bag(BAGS, given[0], per_sample_weights=given[1], mode="sum")
    assert seen.dtype is dtypes[0]
    check(seen, F.embedding_bag(BAGS, exact[0], per_sample_weights=exact[1], mode="sum"), given, exact)


class Mixes(nn.Module):
    """Writes products of 16-bit weights into a float32 stream, and back."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 2)
        self.more = nn.Parameter(torch.randn(4, 4) / 2)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        stream = self.norm(y).addmm_(y, self.more)
        out: Tensor = self.last(self.first(stream).addmm_(stream, self.more))
        return out


@pytest.mark.parametrize(
    ("level", "backend"),
    [*((level, None) for level in ("O1", "O2", "O3", "O4", "O5")), ("O2", "aot_eager"), ("O4", "aot_eager")],
)
def test_in_sessions(level: str, backend: str | None) -> None:
    torch.manual_seed(0)
    model, x = Mixes(), torch.randn(6, 4)
    wanted = model(x)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with preamp.prepare(model, optimizer, level=level, scale=1.0) as session:
        run: Any = torch.compile(model, backend=backend) if backend else model
        with session.autocast():
            seen = run(x).float()
        torch.testing.assert_close(seen, wanted, rtol=5e-2, atol=5e-2)
        session.backward(seen.square().sum())
        assert not session.step().skipped
