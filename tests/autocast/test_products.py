"""Products of 16-bit tensors through float32: what they are worth, whose they are, and that nothing else notices."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from functorch.compile import make_boxed_func
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import preamp
from preamp.autocast import PRODUCTS
from preamp.formats import format_of

from ..products import BY_FLOAT32, BY_TORCH, counted, cpu_that_multiplies
from ..releases import TORCH
from ..rows import over

BF16, FP16 = torch.bfloat16, torch.float16
LOW = (BF16, FP16)
LONG = 300
"""The length of sums: long enough that sums in 16 bits are off by more than a rounding."""

Factors = tuple[Tensor, ...]


@pytest.fixture(autouse=True)
def through_float32() -> Iterator[None]:
    with cpu_that_multiplies(BY_FLOAT32):
        yield


def some(*shapes: tuple[int, ...]) -> Factors:
    generator = torch.Generator().manual_seed(len(shapes))
    return tuple(torch.randn(shape, generator=generator) for shape in shapes)


IMAGE, WEIGHT = (2, 8, 9, 9), (4, 8, 3, 3)
HEADS = ((2, 3, 9, 16),) * 3

PRODUCTS_OF: dict[str, tuple[Callable[..., Tensor], tuple[tuple[int, ...], ...]]] = {
    "mm": (torch.mm, ((7, LONG), (LONG, 5))),
    "matmul of stacks": (torch.matmul, ((2, 3, 7, LONG), (2, 3, LONG, 5))),
    "matmul of vectors": (torch.matmul, ((LONG,), (LONG,))),
    "matmul by a vector": (torch.matmul, ((5, LONG), (LONG,))),
    "bmm": (torch.bmm, ((3, 7, LONG), (3, LONG, 5))),
    "vecdot": (torch.linalg.vecdot, ((7, LONG), (7, LONG))),
    "vecdot of columns": (lambda x, y: torch.linalg.vecdot(x, y, dim=0), ((LONG, 7), (LONG, 7))),
    "einsum": (lambda x, y: torch.einsum("bik,bkj->ij", x, y), ((2, 7, LONG), (2, LONG, 5))),
    "addmm": (torch.addmm, ((7, 5), (7, LONG), (LONG, 5))),
    "addmv": (torch.addmv, ((7,), (7, LONG), (LONG,))),
    "addr": (torch.addr, ((7, 5), (7,), (5,))),
    "addbmm": (torch.addbmm, ((7, 5), (3, 7, LONG), (3, LONG, 5))),
    "baddbmm": (lambda *f: torch.baddbmm(*f, beta=0.5, alpha=0.25), ((3, 7, 5), (3, 7, LONG), (3, LONG, 5))),
    "linear": (F.linear, ((2, 7, LONG), (5, LONG), (5,))),
    "linear of a vector": (F.linear, ((LONG,), (5, LONG), (5,))),
    "conv1d": (F.conv1d, ((2, 8, 20), (4, 8, 5), (4,))),
    "conv2d": (F.conv2d, (IMAGE, WEIGHT, (4,))),
    "conv2d, padded": (lambda x, w: F.conv2d(x, w, padding="same"), (IMAGE, WEIGHT)),
    "conv2d, of each channel": (lambda x, w: F.conv2d(x, w, groups=8, dilation=2), (IMAGE, (8, 1, 3, 3))),
    "conv3d": (F.conv3d, ((2, 4, 5, 5, 5), (4, 4, 3, 3, 3), (4,))),
    "conv_transpose1d": (F.conv_transpose1d, ((2, 4, 9), (4, 3, 3))),
    "conv_transpose2d": (F.conv_transpose2d, ((2, 4, 5, 5), (4, 3, 3, 3))),
    "conv_transpose3d": (F.conv_transpose3d, ((2, 4, 5, 5, 5), (4, 3, 3, 3, 3))),
    "conv_tbc": (torch.conv_tbc, ((5, 2, 8), (3, 8, 4), (4,))),
    "attention": (F.scaled_dot_product_attention, HEADS),
    "attention to the past": (lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True), HEADS),
}


def rounding(exact: Tensor, dtype: torch.dtype, magnitude: Tensor) -> Tensor:
    """How far a product may be off: one rounding of the result, and float32's own errors in a sum of `magnitude`."""
    format = format_of(dtype)
    return exact.abs() * format.epsilon / 2 * 1.001 + magnitude * 2.0**-21 + format.smallest_subnormal


@over(name=PRODUCTS_OF, dtype=LOW)
def test_a_product_is_off_by_one_rounding_and_its_gradients_by_few(name: str, dtype: torch.dtype) -> None:
    function, shapes = PRODUCTS_OF[name]
    low = [factor.to(dtype).requires_grad_() for factor in some(*shapes)]
    exact = [factor.detach().double().requires_grad_() for factor in low]
    with counted() as through, preamp.autocast("cpu", dtype):
        result = function(*low)
    wanted = function(*exact)
    magnitude = torch.full_like(wanted, 8.0) if "attention" in name else function(*(f.abs() for f in exact))
    assert through and all(through)
    assert result.dtype is dtype
    assert torch.all((result.double() - wanted).abs() <= rounding(wanted, dtype, magnitude))
    start = some(tuple(result.shape))[0].to(dtype)
    result.backward(start)
    wanted.backward(start.double())
    assert all(through)
    for ours, its in zip(low, exact, strict=True):
        assert ours.grad is not None and its.grad is not None and ours.grad.dtype is dtype
        assert (ours.grad.double() - its.grad).abs().max() <= 2 * format_of(dtype).epsilon * its.grad.abs().max()


@given(
    st.integers(1, 40), st.integers(1, 400), st.integers(1, 40), st.sampled_from(LOW), st.integers(-30, 12),
    st.booleans(), st.integers(0, 2**32),
)  # fmt: skip
@settings(max_examples=60, deadline=None)
def test_any_matrix_product(
    rows: int, inner: int, columns: int, dtype: torch.dtype, exponent: int, transposed: bool, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = (torch.randn(rows, inner, generator=generator) * 2.0**exponent).to(dtype)
    y = torch.randn(inner, columns, generator=generator).to(dtype)
    if transposed:
        y = y.T.contiguous().T
    with preamp.autocast("cpu", dtype):
        ours = x @ y
    wanted = x.double() @ y.double()
    magnitude = x.double().abs() @ y.double().abs()
    finite = wanted.abs() <= format_of(dtype).max
    assert torch.all(((ours.double() - wanted).abs() <= rounding(wanted, dtype, magnitude)) | ~finite)


class Squared(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return (x @ w).square()

    @staticmethod
    def backward(ctx: Any, start: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        inner = start.to(x.dtype) * 2 * (x @ w)
        return inner @ w.T, x.T @ inner


class WithFunction(nn.Sequential):
    """Its last layer's work is done by a function of its own."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self[:-1]:
            x = layer(x)
        w = self[-1].weight.T
        return Squared.apply(x.to(w.dtype), w)


def net(dtype: torch.dtype = torch.float32, kind: type[nn.Sequential] = nn.Sequential) -> nn.Sequential:
    torch.manual_seed(0)
    layers = nn.Linear(24, 40), nn.GELU(), nn.Linear(40, 16), nn.Unflatten(1, (1, 4, 4)), nn.Conv2d(1, 4, 3)
    return kind(*layers, nn.Flatten(), nn.Linear(16, 1)).to(dtype)


def batch(dtype: torch.dtype = torch.float32) -> Tensor:
    return some((8, 24))[0].to(dtype).requires_grad_()


def gradients(model: nn.Module) -> Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def kept_bytes(dtype: torch.dtype, cpu: str) -> int:
    kept: dict[tuple[int, int], int] = {}

    def pack(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr(), tensor.storage_offset()] = tensor.untyped_storage().nbytes()
        return tensor

    with cpu_that_multiplies(cpu):
        model = net()
        heads = nn.MultiheadAttention(24, 2, batch_first=True)
        with preamp.autocast("cpu", dtype), torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            x = batch()
            loss = model(x + heads(x[None], x[None], x[None])[0][0]).float().square().sum()
        assert loss.requires_grad
    return sum(kept.values())


@pytest.mark.parametrize("dtype", LOW)
def test_backward_keeps_the_same_bytes(dtype: torch.dtype) -> None:
    assert kept_bytes(dtype, BY_FLOAT32) == kept_bytes(dtype, BY_TORCH)


class Seen(TorchDispatchMode):
    """Records the operators and the dtypes of what they give."""

    def __init__(self) -> None:
        super().__init__()
        self.operators: list[tuple[str, torch.dtype]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor):
            self.operators.append((str(func), result.dtype))
        return result


@pytest.mark.parametrize("dtype", LOW)
def test_dispatch_modes_see_what_they_would_see(dtype: torch.dtype) -> None:
    def seen(cpu: str) -> list[tuple[str, torch.dtype]]:
        with cpu_that_multiplies(cpu), Seen() as mode, preamp.autocast("cpu", dtype):
            net()(batch()).float().sum().backward()
        return mode.operators

    assert seen(BY_FLOAT32) == seen(BY_TORCH)


@pytest.mark.parametrize("level", ["O1", "O2", "O3", "O4", "O5"])
def test_a_dispatch_mode_changes_no_bit(level: str) -> None:
    """As a counter of operations, or the doctor: torch hides from it that autocast is on, in the forward pass."""

    def trained(mode: Any) -> tuple[int, Tensor]:
        model = net()
        with preamp.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), level=level, scale=1.0) as session:
            with counted() as through, mode:
                with session.autocast():
                    loss = model(batch()).float().square().sum()
                session.backward(loss)
            session.unscale_()
            return len(through), gradients(model).float()

    (plain, exact), (under, seen) = trained(nullcontext()), trained(Seen())
    assert plain == under >= 8
    assert torch.equal(exact, seen)


@pytest.mark.parametrize("dtype", LOW)
def test_plain_torch_stays_bit_for_bit(dtype: torch.dtype) -> None:
    def plain() -> Iterator[Tensor]:
        model, x = net(dtype), batch(dtype)
        loss = model(x).float().square().sum()
        loss.backward()
        yield from (loss, gradients(model))
        model = net()
        with torch.autocast("cpu", dtype):
            loss = model(batch()).float().square().sum()
        loss.backward()
        yield from (loss, gradients(model))
        yield torch.baddbmm(*(f.to(dtype) for f in some((3, 7, 5), (3, 7, 30), (3, 30, 5))))

    before = list(plain())
    model = net()
    with preamp.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), level="O2" if dtype is FP16 else "O5") as s:
        with counted() as through:
            assert all(map(torch.equal, before, plain()))
            assert not any(through)
            inside = s.autocast()
            with inside:
                loss = model(batch()).sum()
            assert all(map(torch.equal, before, plain()))
            s.backward(loss)
        elsewhere: list[Tensor] = []
        with s.autocast():
            thread = threading.Thread(target=lambda: elsewhere.extend(plain()))
            thread.start()
            thread.join()
        assert all(map(torch.equal, before, elsewhere))
    assert all(map(torch.equal, before, plain()))
    assert not PRODUCTS._libraries


def by(way: str, model: nn.Module, x: Tensor) -> Tensor:
    """A loss of the model in one of many ways of computing it."""
    if way == "checkpoint":
        return checkpoint(model, x, use_reentrant=False).float().square().sum()
    if way == "reentrant checkpoint":
        return checkpoint(model, x, use_reentrant=True).float().square().sum()
    if way == "double backward":
        (slope,) = torch.autograd.grad(model(x).float().sum(), x, create_graph=True)
        return slope.float().square().sum() * 10
    if way == "vmap":
        return torch.vmap(model)(x.unflatten(0, (4, 2))).float().square().sum()
    if way == "functional gradient":
        parameters = dict(model.named_parameters())
        slopes = torch.func.grad(lambda p: torch.func.functional_call(model, p, (x,)).float().square().sum())(
            parameters
        )
        return sum(slope.float().square().sum() for slope in slopes.values()) / 10
    return model(x).float().square().sum()


WAYS = (
    "plain", "checkpoint", "reentrant checkpoint", "double backward", "custom function", "vmap", "functional gradient",
)  # fmt: skip


@over(way=WAYS, where=["in a region", "outside"], level=["O1", "O2", "O3", "O4", "O5"])
def test_every_way_of_computing(way: str, where: str, level: str) -> None:
    if where == "outside" and level in ("O1", "O4"):
        return  # nothing is in 16 bits there
    kind = WithFunction if way == "custom function" else nn.Sequential
    wanted = net(kind=kind)
    by(way, wanted, batch()).backward()
    model, x = net(kind=kind), batch()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with counted() as through, preamp.prepare(model, optimizer, level=level, scale=1.0) as session:
        with session.autocast() if where == "in a region" else nullcontext():
            loss = by(way, model, x)
        session.backward(loss)
        session.unscale_()
        ours = gradients(model).float()
        assert len(through) >= 8
        assert all(through)
    limit = 0.1 if level in ("O4", "O5") else 0.02
    assert (ours - gradients(wanted)).norm() < limit * gradients(wanted).norm()


@pytest.mark.parametrize(("backend", "where", "level"), [
    ("aot_eager", "inside", "O2"), ("aot_eager", "inside", "O4"), ("aot_eager", "around", "O1"),
    ("aot_eager", "around", "O5"), ("aot_eager", "nowhere", "O3"), ("aot_eager", "nowhere", "O5"),
    ("inductor", "inside", "O2"), ("inductor", "around", "O4"),
])  # fmt: skip
@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")  # inductor's own
@pytest.mark.filterwarnings("ignore:Skipping serialization of")  # inductor's own, of torch 2.6
def test_compiled_code_has_float32_products_in_both_directions(backend: str, where: str, level: str) -> None:
    if where == "inside" and TORCH < (2, 7):
        pytest.skip("torch 2.6 traces no region of another class")
    torch._dynamo.reset()
    products: list[torch.dtype] = []

    def noting(graph: torch.fx.GraphModule, _: Any) -> Any:
        for node in graph.graph.nodes:
            if any(word in str(node.target) for word in ("mm", "convolution")):
                products.extend(a.meta["val"].dtype for a in node.args if isinstance(a, torch.fx.Node))
        return make_boxed_func(graph.forward)

    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with preamp.prepare(model, optimizer, level=level, scale=1.0) as session:

        def loss_of(x: Tensor) -> Tensor:
            with session.autocast() if where == "inside" else nullcontext():
                return model(x).float().square().sum()

        noted = aot_autograd(fw_compiler=noting, bw_compiler=noting)
        run = torch.compile(loss_of, fullgraph=True, backend=noted if backend == "aot_eager" else backend)
        with session.autocast() if where == "around" else nullcontext():
            loss = run(batch())
        session.backward(loss)
        session.unscale_()
        ours = gradients(model).float()
    if backend == "aot_eager":
        assert len(products) >= 20 and set(products) == {torch.float32}
    wanted = net()
    wanted(batch()).square().sum().backward()
    assert (ours - gradients(wanted)).norm() < 0.1 * gradients(wanted).norm()
    torch._dynamo.reset()


def test_distributed_data_parallel_and_a_backward_in_another_thread() -> None:
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = nn.parallel.DistributedDataParallel(net())
        with counted() as through, preamp.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), level="O4") as s:
            with s.autocast():
                loss = model(batch()).float().sum()
            forward = len(through)
            thread = threading.Thread(target=s.backward, args=(loss,))
            thread.start()
            thread.join()
            assert all(through) and len(through) >= 2 * forward
        del model, loss
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("level", ["O1", "O2", "O3", "O4", "O5"])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
@pytest.mark.parametrize("kind, options", [
    (nn.LSTM, {}), (nn.LSTM, {"proj_size": 3}), (nn.GRU, {}), (nn.RNN, {}), (nn.RNN, {"nonlinearity": "relu"}),
])  # fmt: skip
def test_recurrent_layers(kind: type[nn.RNNBase], options: dict[str, Any], packed: bool, level: str) -> None:
    def layer() -> nn.RNNBase:
        torch.manual_seed(0)
        return kind(6, 5, num_layers=2, bidirectional=True, batch_first=True, **options)

    def loss_of(layer: nn.Module) -> Tensor:
        x: Any = some((3, 7, 6))[0]
        if packed:
            x = nn.utils.rnn.pack_padded_sequence(x, [7, 5, 2], batch_first=True)
        result = layer(x)[0]
        return (result.data if packed else result).float().square().mean()

    wanted = layer()
    loss_of(wanted).backward()
    ours = layer()
    with preamp.prepare(ours, torch.optim.SGD(ours.parameters(), lr=0.1), level=level, scale=128.0) as session:
        with session.autocast(), counted() as through:
            loss = loss_of(ours)
        session.backward(loss)
        session.unscale_()
        off = gradients(ours).float() - gradients(wanted)
    assert all(through)
    assert off.norm() < 0.03 * gradients(wanted).norm()


@over(cell=[nn.LSTMCell, nn.GRUCell, nn.RNNCell], dtype=LOW)
def test_recurrent_cells(cell: type[nn.RNNCellBase], dtype: torch.dtype) -> None:
    layer, x = cell(6, 5), some((3, 6))[0]
    with counted() as through, preamp.autocast("cpu", dtype):
        result = layer(layer_out := x)
        first = result[0] if isinstance(result, tuple) else result
        first.float().sum().backward()
    assert layer_out is x and through and all(through)


@pytest.mark.parametrize("dtype", LOW)
def test_fast_paths_of_evaluation(dtype: torch.dtype) -> None:
    layer = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 2).eval()
    x = some((3, 5, 16))[0]
    with counted() as through, torch.no_grad(), preamp.autocast("cpu", dtype):
        ours = layer(x)
    assert len(through) > 10 and all(through)
    with torch.no_grad():
        assert (ours.float() - layer(x)).abs().max() < 0.1
    with counted() as through, torch.inference_mode(), preamp.autocast("cpu", dtype):
        layer(x)
    assert len(through) > 10 and all(through)


def test_what_writes_into_a_tensor_keeps_it() -> None:
    target, x, y = (f.to(BF16) for f in some((7, 5), (7, LONG), (LONG, 5)))
    wanted = torch.addmm(target.double(), x.double(), y.double())
    kept = target.clone()
    out = torch.empty(0, dtype=BF16)
    with preamp.autocast("cpu", BF16), torch.no_grad():
        version = kept._version
        assert kept.addmm_(x, y) is kept and kept._version == version + 1
        assert torch.mm(x, y, out=out) is out and out.shape == (7, 5)
        with pytest.raises(RuntimeError):
            torch.mm(x, y, out=torch.empty(7, 5))  # torch's own error for another dtype
    assert torch.equal(kept, wanted.to(BF16))
    assert torch.equal(out, (x.double() @ y.double()).to(BF16))


@pytest.mark.parametrize("cpu", [BY_FLOAT32, BY_TORCH])
def test_what_no_cpu_computes_in_16_bits_goes_through_float32_on_each(cpu: str) -> None:
    volumes = some((1, 2, 4, 4, 4))[0]
    with cpu_that_multiplies(cpu):
        model = nn.Sequential(nn.AvgPool3d(2), nn.Flatten(), nn.Linear(16, 1))
        with preamp.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), level="O5") as session:
            loss = model(volumes).sum()  # outside of a region, where torch has no such kernel
            session.backward(loss)
        lstm = nn.LSTM(4, 3)
        with preamp.autocast("cpu", FP16):
            assert lstm(volumes.view(-1, 8, 4))[0].dtype is FP16


BACKWARD_OF: dict[str, tuple[Callable[..., Tensor], tuple[tuple[int, ...], ...], set[torch.dtype]]] = {
    "convolution": (F.conv2d, (IMAGE, WEIGHT), {FP16}),
    "transposed convolution": (F.conv_transpose1d, ((2, 4, 9), (4, 3, 3)), {FP16}),
    "short attention": (F.scaled_dot_product_attention, HEADS, {FP16, BF16}),
    "long attention": (F.scaled_dot_product_attention, ((1, 1, 520, 16),) * 3, {FP16}),
    "matrix product": (torch.mm, ((7, 5), (5, 3)), set()),
}
"""Operators whose backward goes through float32 also on a CPU with arithmetic for both dtypes, and for which dtypes."""


@over(name=BACKWARD_OF, dtype=LOW)
def test_where_torch_leaves_a_cpus_arithmetic_unused(name: str, dtype: torch.dtype) -> None:
    function, shapes, through_float32 = BACKWARD_OF[name]
    factors = [factor.to(dtype).requires_grad_() for factor in some(*shapes)]
    exact = [factor.detach().float().requires_grad_() for factor in factors]
    with cpu_that_multiplies(BY_TORCH), counted() as through, preamp.autocast("cpu", dtype):
        result = function(*factors)
        del through[:]
        result.backward(torch.ones_like(result))
    assert bool(through) == (dtype in through_float32)
    function(*exact).sum().backward()
    for ours, its in zip(factors, exact, strict=True):
        assert ours.grad is not None and its.grad is not None and ours.grad.dtype is dtype
        assert (ours.grad.float() - its.grad).abs().max() <= 4 * format_of(dtype).epsilon * its.grad.abs().max()


def test_mixed_dtypes_stay_torchs_error() -> None:
    with preamp.autocast("cpu", BF16, enabled=False), pytest.raises(RuntimeError, match="dtype"):
        torch.mm(torch.ones(2, 3, dtype=BF16), torch.ones(3, 2))
    with preamp.autocast("cpu", BF16, enabled=False), pytest.raises(RuntimeError, match=r"dtype|type"):
        torch.mm(torch.ones(2, 3, dtype=BF16), torch.ones(3, 2, dtype=FP16))


def test_overflow_is_infinite_as_on_a_tensor_core() -> None:
    x = torch.full((2, 64), 200.0)
    with preamp.autocast("cpu", FP16):
        assert torch.isinf(x @ x.T).all()
        with_cancellation = torch.cat([x, x], 1) @ torch.cat([x, -x], 1).T
        assert not with_cancellation.any()  # sums are float32's: 40000 * 64 never was a float16


def test_the_dispatcher_is_empty_after_close_and_with_arithmetic_there_are_no_kernels() -> None:
    model = net()
    with preamp.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), level="O3"):
        assert PRODUCTS._libraries
    assert not PRODUCTS._libraries
    with cpu_that_multiplies(BY_TORCH), counted() as through, preamp.autocast("cpu", BF16):
        net()(batch()).float().sum().backward()
    assert not through


def test_a_session_that_is_lost_gives_its_kernels_back() -> None:
    model = net()
    session = preamp.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), level="O3")
    del session, model
    import gc

    gc.collect()
    assert not PRODUCTS._libraries
