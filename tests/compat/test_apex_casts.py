"""O1 and O4: what functions cast, torch as it was afterwards, and that a step has no cast that none by hand has."""

from __future__ import annotations

import itertools
from collections import Counter, namedtuple
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from preamp.compat.apex import amp
from preamp.compat.apex.amp import _amp_state
from preamp.compat.apex.amp.lists import functional_overrides, tensor_overrides, torch_overrides

from .toys import scaled_backward

HALF, FLOAT, DOUBLE, BF16 = torch.float16, torch.float32, torch.float64, torch.bfloat16
PLACES = (torch, F, torch.Tensor, torch.fft, torch.linalg, torch.sparse, nn.RNNBase, torch.nn.modules.rnn)


def names() -> dict[tuple[Any, str], Any]:
    return {(place, name): value for place in PLACES for name, value in vars(place).items()}


def positive(*shape: int, dtype: torch.dtype = HALF) -> Tensor:
    return torch.rand(shape).add_(0.5).to(dtype)


@pytest.fixture(params=[HALF, BF16], ids=["half", "bfloat16"])
def low(request: pytest.FixtureRequest) -> torch.dtype:
    amp.init(patch_type=request.param)
    return request.param  # type: ignore[no-any-return]


IMAGES = {1: (2, 4, 8), 2: (2, 4, 8, 8), 3: (2, 4, 4, 4, 4)}
LOW_CALLS = {
    "linear": lambda x: F.linear(x(3, 4), x(5, 4), x(5)),
    **{f"conv{n}d": lambda x, n=n: getattr(F, f"conv{n}d")(x(*IMAGES[n]), x(3, 4, *[3] * n)) for n in IMAGES},
    **{
        f"conv_transpose{n}d": lambda x, n=n: getattr(F, f"conv_transpose{n}d")(x(*IMAGES[n]), x(4, 3, *[3] * n))
        for n in IMAGES
    },
    "torch.conv2d": lambda x: torch.conv2d(x(*IMAGES[2]), x(3, 4, 3, 3)),
    "addmm": lambda x: torch.addmm(x(2, 3), x(2, 4), x(4, 3)),
    "addmv": lambda x: torch.addmv(x(2), x(2, 4), x(4)),
    "addr": lambda x: torch.addr(x(2, 4), x(2), x(4)),
    "matmul": lambda x: torch.matmul(x(2, 4), x(4, 3)),
    "mm": lambda x: x(2, 4).mm(x(4, 3)),
    "mv": lambda x: x(2, 4).mv(x(4)),
    "@": lambda x: x(2, 4) @ x(4, 3),
    "bmm": lambda x: torch.bmm(x(2, 3, 4), x(2, 4, 3)),
    "baddbmm": lambda x: torch.baddbmm(x(2, 3, 3), x(2, 3, 4), x(2, 4, 3)),
    "addbmm": lambda x: x(3, 3).addbmm(x(2, 3, 4), x(2, 4, 3)),
    "prelu": lambda x: torch.prelu(x(2, 3), x(1)),
}
FULL_CALLS = {
    **{name: lambda x, name=name: getattr(torch, name)(x(2, 3).clamp(0.6, 0.9)) for name in
       ("acos", "asin", "cosh", "erfinv", "exp", "expm1", "log", "log10", "log2", "reciprocal", "rsqrt", "sinh", "tan",
        "sum", "prod", "std", "var", "norm")},
    **{f"Tensor.{name}": lambda x, name=name: getattr(x(2, 3), name)() for name in ("exp", "sum", "norm", "cpu")},
    "cumsum": lambda x: torch.cumsum(x(2, 3), 0),
    "cumprod": lambda x: x(2, 3).cumprod(1),
    "dist": lambda x: torch.dist(x(3), x(3)),
    "renorm": lambda x: torch.renorm(x(3, 3), 2, 0, 1),
    "pow": lambda x: torch.pow(x(3), 2.0),
    "**": lambda x: x(3) ** 2,
    "2 **": lambda x: 2.0 ** x(3),
    **{name: lambda x, name=name: getattr(F, name)(x(2, 3)) for name in ("softplus", "gelu", "normalize")},
    **{name: lambda x, name=name: getattr(F, name)(x(2, 3), -1) for name in ("softmax", "log_softmax", "softmin")},
    **{name: lambda x, name=name: getattr(F, name)(x(2, 3), x(2, 3)) for name in
       ("cosine_similarity", "mse_loss", "l1_loss", "smooth_l1_loss", "binary_cross_entropy_with_logits",
        "poisson_nll_loss")},
    **{name: lambda x, name=name: getattr(F, name)(x(3, 4), torch.tensor([0, 1, 2])) for name in
       ("cross_entropy", "nll_loss")},
    "layer_norm": lambda x: F.layer_norm(x(2, 3), (3,)),
    "group_norm": lambda x: F.group_norm(x(2, 4, 3), 2),
    "local_response_norm": lambda x: F.local_response_norm(x(2, 4, 3), 2),
    "interpolate": lambda x: F.interpolate(x(1, 1, 4, 4), scale_factor=2.0),
    "grid_sample": lambda x: F.grid_sample(x(1, 1, 4, 4), x(1, 2, 2, 2), align_corners=True),
    "kl_div": lambda x: F.kl_div(x(3), x(3), reduction="sum"),
    "margin_ranking_loss": lambda x: F.margin_ranking_loss(x(3), x(3), torch.ones(3)),
}  # fmt: skip


@pytest.mark.parametrize("name", LOW_CALLS)
@pytest.mark.parametrize("given", [HALF, FLOAT, DOUBLE, BF16])
def test_functions_in_16_bits(name: str, given: torch.dtype, low: torch.dtype) -> None:
    leaves: list[Tensor] = []

    def make(*shape: int) -> Tensor:
        leaves.append(positive(*shape, dtype=given).requires_grad_())
        return leaves[-1]

    result = LOW_CALLS[name](make)
    assert result.dtype is low
    result.float().sum().backward()
    assert all(leaf.grad is not None and leaf.grad.dtype is given for leaf in leaves)


@pytest.mark.parametrize("name", FULL_CALLS)
@pytest.mark.parametrize("given", [HALF, FLOAT, BF16])
def test_functions_in_float32(name: str, given: torch.dtype, low: torch.dtype) -> None:
    result = FULL_CALLS[name](lambda *shape: positive(*shape, dtype=given).requires_grad_())
    assert result.dtype is FLOAT
    result.sum().backward()


@pytest.mark.parametrize("name", ["relu", "dropout", "tanh"])
def test_functions_in_no_list_follow_their_input(name: str, low: torch.dtype) -> None:
    for dtype in (low, FLOAT):
        assert getattr(F, name)(positive(3, dtype=dtype)).dtype is dtype


@pytest.mark.parametrize("function", ["add", "mul", "div", "atan2", "__add__", "__rmul__", "__truediv__"])
@pytest.mark.parametrize("pair", list(itertools.product([HALF, FLOAT], repeat=2)))
@pytest.mark.parametrize("scalar", [False, True], ids=["", "0-d"])
def test_widest_type(function: str, pair: tuple[torch.dtype, torch.dtype], scalar: bool) -> None:
    amp.init()
    a, b = positive(3, dtype=pair[0]), positive(*(() if scalar else (3,)), dtype=pair[1])
    result = getattr(a, function)(b)
    assert result.dtype is (FLOAT if FLOAT in pair else HALF)
    expected = getattr(a.float(), function)(b.float())
    torch.testing.assert_close(result.float(), expected, rtol=2e-3, atol=1e-3)


def test_widest_type_of_other_mixtures_is_torchs() -> None:
    amp.init()
    assert (positive(3, dtype=DOUBLE) * positive(3)).dtype is DOUBLE
    assert (positive(3, dtype=BF16) + positive(3)).dtype is FLOAT
    assert (torch.arange(3) + positive(3)).dtype is HALF
    assert (positive(3) + 1.0).dtype is HALF
    assert (positive(3) == positive(3, dtype=FLOAT)).dtype is torch.bool
    assert torch.equal(positive(3) * 0, torch.zeros(3))


@pytest.mark.parametrize("name", ["cat", "stack"])
def test_sequences_become_the_widest_type(name: str) -> None:
    amp.init()
    function = getattr(torch, name)
    assert hasattr(function, "__wrapped__")  # since torch widens here by itself as well
    for dtypes in itertools.product([HALF, FLOAT], repeat=3):
        given = [positive(2, dtype=dtype) for dtype in dtypes]
        expected = FLOAT if FLOAT in dtypes else HALF
        assert function(given).dtype is expected and function(tuple(given), dim=0).dtype is expected


@pytest.mark.parametrize("dtype", [HALF, FLOAT])
@pytest.mark.parametrize("name", ["matmul", "exp", "add", "cat", "normalize"])
def test_results_are_written_to_out(name: str, dtype: torch.dtype) -> None:
    """Whatever the function computes in, since scripts go on with what they gave."""
    amp.init()
    one, other = positive(3, 3), positive(3, 3, dtype=FLOAT)
    given: Any = {"exp": (one,), "normalize": (one,), "cat": ([one, other],)}
    arguments = given.get(name, (one, other))
    function = getattr(torch if hasattr(torch, name) else nn.functional, name)
    expected = function(*arguments)
    for out in (torch.full_like(expected, 7.0, dtype=dtype), torch.empty(0, dtype=dtype)):
        assert function(*arguments, out=out) is out
        torch.testing.assert_close(out, expected.to(dtype))


def test_in_place_operators() -> None:
    amp.init()
    half, full = positive(3), positive(3, dtype=FLOAT)
    kept = half
    half += full
    assert half.dtype is FLOAT and half is not kept and kept.dtype is HALF
    full_before = full
    full += kept
    assert full is full_before and full.dtype is FLOAT
    assert kept.add_(full) is kept and kept.dtype is HALF
    assert kept.mul_(positive(3, dtype=FLOAT)).dtype is HALF
    out = torch.zeros(2, 2)
    assert out.addmm_(positive(2, 3), positive(3, 2)).dtype is FLOAT


@pytest.mark.parametrize("name", ["exp_", "pow_", "log_", "rsqrt_", "cumsum_"])
def test_in_place_float_functions_refuse_16_bits(name: str) -> None:
    amp.init()
    arguments = {"pow_": (2,), "cumsum_": (0,)}.get(name, ())
    with pytest.raises(NotImplementedError, match=f"Cannot call in-place method {name} on fp16 Tensors"):
        getattr(positive(3), name)(*arguments)
    assert getattr(positive(3, dtype=FLOAT), name)(*arguments).dtype is FLOAT
    if hasattr(torch, name):
        with pytest.raises(NotImplementedError, match="with fp16 arguments"):
            getattr(torch, name)(positive(3), *arguments)


def test_banned() -> None:
    handle = amp.init()
    with pytest.raises(NotImplementedError, match="binary_cross_entropy_with_logits"):
        F.binary_cross_entropy(positive(3) / 2, torch.ones(3))
    with pytest.raises(NotImplementedError):
        nn.BCELoss()(torch.rand(3), positive(3) / 2)
    assert nn.BCELoss()(torch.rand(3), torch.ones(3)).dtype is FLOAT
    with amp.disable_casts(), pytest.raises(RuntimeError):
        F.binary_cross_entropy(positive(3) / 2, torch.ones(3))  # torch's own complaint
    handle._deactivate()
    amp.init(allow_banned=True)
    assert F.binary_cross_entropy(positive(3) / 2, torch.ones(3)).dtype is FLOAT


CELLS = {nn.LSTMCell: 2, nn.GRUCell: 1, nn.RNNCell: 1}


@pytest.mark.parametrize("cell", CELLS)
def test_cells(cell: Any, low: torch.dtype) -> None:
    one = cell(4, 5)
    state: Any = None
    for step in range(3):
        result = one(torch.randn(2, 4, dtype=low if step % 2 else FLOAT), state)
        first = result[0] if isinstance(result, tuple) else result
        assert first.dtype is low
        state = result
    first.float().sum().backward()
    assert all(p.grad is not None and p.grad.dtype is FLOAT for p in one.parameters())


@pytest.mark.parametrize("layer", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("bidirectional", [False, True])
def test_layers_and_packed_sequences(layer: Any, layers: int, bidirectional: bool, low: torch.dtype) -> None:
    torch.manual_seed(3)
    rnn = layer(4, 5, num_layers=layers, bidirectional=bidirectional)
    x = torch.randn(6, 3, 4)
    with amp.disable_casts():
        expected, _ = rnn(x)
    for dtype in (FLOAT, low):
        output, state = rnn(x.to(dtype))
        assert output.dtype is low and (state[0] if layer is nn.LSTM else state).dtype is low
        torch.testing.assert_close(output.float(), expected, atol=0.06, rtol=0.06)
    hidden = torch.zeros(layers * (1 + bidirectional), 3, 5)
    output, _ = rnn(x, (hidden, hidden.clone()) if layer is nn.LSTM else hidden)
    assert output.dtype is low
    packed = nn.utils.rnn.pack_padded_sequence(x, [6, 4, 2])
    output, _ = rnn(packed)
    assert output.data.dtype is low
    output.data.float().sum().backward()
    assert all(p.grad is not None and p.grad.dtype is FLOAT for p in rnn.parameters())


def test_rnn_still_checks_its_input() -> None:
    amp.init()
    with pytest.raises(RuntimeError):
        nn.LSTM(4, 5)(torch.randn(6, 3, 7))


def test_decorators_without_and_with_a_handle() -> None:
    seen: list[Any] = []

    def record(*args: Any, **kwargs: Any) -> Any:
        """What it was given."""
        seen[:] = [args, kwargs]
        return args[0]

    half, full, promote = amp.half_function(record), amp.float_function(record), amp.promote_function(record)
    assert half.__name__ == "record" and half.__doc__ == record.__doc__
    x, ints = torch.randn(2), torch.arange(2)
    assert half(x) is x
    amp.init()
    Pair = namedtuple("Pair", "a b")
    half(x, [x, (x.double(), ints)], pair=Pair(x, 1), word="w")
    args, kwargs = seen
    assert args[0].dtype is HALF and args[1][0].dtype is HALF and args[1][1][0].dtype is HALF and args[1][1][1] is ints
    assert kwargs["pair"].a.dtype is HALF and type(kwargs["pair"]) is Pair and kwargs["word"] == "w"
    full(x.half(), y=[x.double()])
    assert seen[0][0].dtype is FLOAT and seen[1]["y"][0].dtype is FLOAT
    promote(x.half(), x)
    assert {a.dtype for a in seen[0]} == {FLOAT}
    promote(x.half(), x.half())
    assert {a.dtype for a in seen[0]} == {HALF}
    promote([x.half(), x.double()], 3)
    assert [a.dtype for a in seen[0][0]] == [DOUBLE, DOUBLE]
    with amp.disable_casts():
        half(x)
        assert seen[0][0] is x


def test_registered_functions() -> None:
    class Library:
        @staticmethod
        def low(x: Tensor) -> Tensor:
            return x

        @staticmethod
        def full(x: Tensor) -> Tensor:
            return x

        @staticmethod
        def both(x: Tensor, y: Tensor) -> Tensor:
            return x + y.to(x.dtype)

    before = dict(vars(Library))
    amp.register_half_function(Library, "low")
    amp.register_float_function(Library, "full")
    amp.register_promote_function(Library, "both")
    amp.register_float_function(torch, "sigmoid")
    amp.register_float_function(torch, "mm")  # over the list that says otherwise
    amp.register_float_function(nn.Softsign, "forward")
    with pytest.raises(ValueError, match="No function named nowhere in module"):
        amp.register_half_function(Library, "nowhere")
    handle = amp.init()
    assert Library.low(torch.ones(1)).dtype is HALF and Library.full(positive(1)).dtype is FLOAT
    assert Library.both(positive(1), torch.ones(1)).dtype is FLOAT
    assert torch.sigmoid(positive(1)).dtype is FLOAT and positive(1).sigmoid().dtype is HALF
    assert torch.mm(positive(2, 2), positive(2, 2)).dtype is FLOAT
    assert nn.Softsign()(positive(1)).dtype is FLOAT
    handle._deactivate()
    assert dict(vars(Library)) == before
    amp.init()
    assert Library.low(torch.ones(1)).dtype is FLOAT  # registered for one init only


def test_lists_may_be_changed_before_initialize(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(functional_overrides, "FP32_FUNCS", [*functional_overrides.FP32_FUNCS, "relu"])
    functional_overrides.FP32_FUNCS.remove("softmax")
    monkeypatch.setattr(torch_overrides, "FP16_FUNCS", [*torch_overrides.FP16_FUNCS, "sigmoid"])
    amp.init()
    assert F.relu(positive(3)).dtype is FLOAT
    assert F.softmax(positive(3), 0).dtype is HALF
    assert torch.sigmoid(torch.ones(3)).dtype is HALF


def test_lists_have_the_names_that_apex_had() -> None:
    assert len(functional_overrides.FP16_FUNCS) == 8 and len(functional_overrides.FP32_FUNCS) == 29
    assert len(torch_overrides.FP16_FUNCS) == 17 and len(torch_overrides.FP32_FUNCS) == 23
    assert len(torch_overrides.CASTS) == 16 and torch_overrides.SEQUENCE_CASTS == ["cat", "stack"]
    for listed in (functional_overrides, torch_overrides, tensor_overrides):
        names = [*listed.FP16_FUNCS, *listed.FP32_FUNCS]
        assert len(set(names)) == len(names) and all(hasattr(listed.MODULE, name) for name in names)


def test_torch_is_as_it_was() -> None:
    before = names()
    handle = amp.init()
    assert names() != before
    handle._deactivate()
    handle._deactivate()
    assert names() == before
    amp.init()
    amp.init()  # takes the first one's place
    amp.close()
    amp.close()
    assert names() == before
    assert not handle.is_active()


def test_a_failing_init_leaves_torch_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    before = names()
    monkeypatch.setattr(torch_overrides, "BANNED_FUNCS", [("mm", "no"), 3])
    with pytest.raises(TypeError):
        amp.init()
    assert names() == before


def test_disable_casts_survives_an_exception() -> None:
    amp.init()
    with pytest.raises(KeyError), amp.disable_casts():
        assert torch.mm(torch.ones(1, 1), torch.ones(1, 1)).dtype is FLOAT
        raise KeyError
    assert torch.mm(torch.ones(1, 1), torch.ones(1, 1)).dtype is HALF


def test_verbosity_2_tells_of_every_cast(capsys: pytest.CaptureFixture[str]) -> None:
    model = amp.initialize(nn.Linear(2, 2), opt_level="O1", verbosity=2)
    F.softmax(model(torch.ones(1, 2)), -1)
    printed = capsys.readouterr().out
    assert "Float->Half (linear)" in printed and "Half->Float (softmax)" in printed


class Casts:
    """Counts the casts of one tensor."""

    def __init__(self, of: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        original = Tensor.to

        def to(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            self.count += tensor is of
            return original(tensor, *args, **kwargs)

        monkeypatch.setattr(Tensor, "to", to)


def test_weights_are_cast_once_an_iteration(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Linear(3, 3)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    amp.initialize(model, optimizer, opt_level="O1", verbosity=0, loss_scale=128.0)
    casts = Casts(model.weight, monkeypatch)
    for iteration in range(1, 4):
        loss = model(model(torch.ones(2, 3))).sum()
        scaled_backward(loss, optimizer)
        assert casts.count == iteration
        optimizer.step()
    assert not _amp_state.handle.cache


def test_a_thread_that_ends_a_backward_pass_takes_no_cast_from_another() -> None:
    """The cache is cleared between two looks of a forward pass at it: here by the cast's own question for a version."""
    amp.initialize(nn.Linear(1, 1), opt_level="O1", verbosity=0)

    class Seen(nn.Parameter):
        @property
        def _version(self) -> int:  # type: ignore[override]
            return Cleared(super()._version)

    class Cleared(int):
        def __eq__(self, other: object) -> bool:
            _amp_state.handle._clear_cache()
            return int(self) == other

        __hash__ = int.__hash__

    weight = Seen(torch.ones(2, 2))
    for _ in range(3):
        assert torch.mm(weight, weight).dtype is HALF


@pytest.mark.parametrize("how", ["backward", "grad"])
def test_weights_written_by_hand_after_a_backward_pass_are_the_ones_used(how: str) -> None:
    """Without `scale_loss`, and by way of `.data`, as an optimizer that amp has not seen may do it."""
    model = nn.Linear(3, 2, bias=False)
    amp.initialize(model, opt_level="O1", verbosity=0)
    x = torch.ones(1, 3)
    for _ in range(2):
        loss = model(x).float().pow(2).sum()
        if how == "backward":
            loss.backward()
        else:
            torch.autograd.grad(loss, [model.weight], create_graph=True)
        model.weight.data.sub_(0.5)
        assert torch.equal(model(x).float(), F.linear(x.half(), model.weight.half()).float())
    amp.close()
    assert torch.autograd._engine_run_backward is torch.autograd.graph._engine_run_backward


@pytest.mark.parametrize("change", ["step", "in place", "data", "assigned", "loaded"])
def test_train_eval_train_sees_every_change_of_a_weight(change: str) -> None:
    """Weights are cast anew after they change, and a cast from evaluation never serves training."""
    torch.manual_seed(0)
    model = nn.Linear(3, 2, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    amp.initialize(model, optimizer, opt_level="O1", verbosity=0, loss_scale=8.0)
    x = torch.ones(1, 3)

    def train() -> None:
        scaled_backward(model(x).float().pow(2).sum(), optimizer)
        assert model.weight.grad is not None and model.weight.grad.abs().sum() > 0
        model.weight.grad = model.weight.grad * 0 + 1

    def change_weight() -> None:
        if change == "step":
            optimizer.step()
        elif change == "in place":
            with torch.no_grad():
                model.weight.add_(1.0)
        elif change == "data":
            model.weight.data.add_(1.0)
        elif change == "assigned":
            model.weight.data = model.weight.data + 1.0
        else:
            model.load_state_dict({"weight": model.weight.detach() + 1})

    for _ in range(3):
        train()
        change_weight()
        for mode in (torch.no_grad, torch.enable_grad):
            with mode():
                assert torch.equal(model(x).float(), F.linear(x.half(), model.weight.half()).float())
        optimizer.zero_grad()


def test_weights_swapped_in_evaluation_are_the_ones_used() -> None:
    """As averages of weights are: through .data, between two passes of one evaluation."""
    model = nn.Linear(3, 2)
    amp.initialize(model, opt_level="O1", verbosity=0)
    x = torch.ones(1, 3)
    with torch.no_grad():
        model(x)
        model.weight.data.zero_()
        model.bias.data.zero_()
        assert not model(x).any()


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning", "ignore:.*torch.jit:FutureWarning")
def test_a_model_is_traced_with_its_weights_after_a_forward_pass() -> None:
    """As a writer of graphs traces it; what the pass before has cast is no constant of the graph."""
    model = nn.Linear(3, 2)
    amp.initialize(model, opt_level="O1", verbosity=0)
    x = torch.ones(1, 3)
    model(x)
    traced = torch.jit.trace(model, x)
    with torch.no_grad():
        model.weight.zero_()
    assert torch.equal(traced(x).flatten(), model.bias.half())


def test_a_frozen_weight_and_one_that_thaws() -> None:
    model = nn.Linear(3, 2)
    amp.initialize(model, opt_level="O1", verbosity=0)
    model.requires_grad_(False)
    model(torch.ones(1, 3))
    model.requires_grad_(True)
    model(torch.ones(1, 3)).sum().backward()
    assert model.weight.grad is not None


def test_checkpointing_recomputes_the_same() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    amp.initialize(model, optimizer, opt_level="O1", verbosity=0, loss_scale=64.0)
    gradients = []
    for how in (None, True, False):
        x = torch.ones(2, 4, requires_grad=True)
        optimizer.zero_grad()
        result = model(x) if how is None else checkpoint(model, x, use_reentrant=how)
        scaled_backward(result.float().sum(), optimizer)
        gradients.append([p.grad.clone() for p in model.parameters()])  # type: ignore[union-attr]
    for others in gradients[1:]:
        assert all(torch.equal(a, b) for a, b in zip(gradients[0], others, strict=True))


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_operators_are_compiled_by_torch_jit_while_casts_are_on() -> None:
    """Libraries do so when they are imported, torch when it first computes a directional derivative."""
    amp.init()

    def compiled(x: Tensor) -> Tensor:
        return torch.softmax(torch.exp(x), -1) + torch.mm(x, x).norm() + torch.cat([x, x])[:3].prod()

    def derivative(x: Tensor) -> Tensor:
        direction: Tensor = torch.func.jvp(lambda y: F.linear(y, x).float().sum(), (x,), (torch.ones_like(x),))[1]
        return direction

    x = torch.rand(3, 3)
    found = torch.jit.script(compiled)(x)
    assert float(derivative(x)) == pytest.approx(float(3 * x.sum()), rel=1e-2)
    amp.close()
    assert torch.equal(found, compiled(x))
    assert torch.equal(torch.jit.script(compiled_later)(x), compiled_later(x))


def compiled_later(x: Tensor) -> Tensor:
    return torch.exp(x).mm(x)


def test_attention_and_transformers() -> None:
    amp.init()
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    layer(torch.randn(2, 3, 8)).float().sum().backward()
    assert all(p.grad is not None and p.grad.dtype is FLOAT for p in layer.parameters())
    layer.eval()
    with torch.no_grad():
        assert layer(torch.randn(2, 3, 8)).isfinite().all()


class Rotated(torch.utils.data.Dataset[Tensor]):
    def __len__(self) -> int:
        return 2

    def __getitem__(self, i: int) -> Tensor:
        return torch.eye(3) @ torch.ones(3)


def test_data_in_workers_keeps_its_dtype() -> None:
    amp.init()
    assert Rotated()[0].dtype is HALF
    loader = torch.utils.data.DataLoader(Rotated(), num_workers=1, multiprocessing_context="fork")
    assert [x.dtype for x in loader] == [FLOAT, FLOAT]


def test_data_beside_a_model_on_an_accelerator_keeps_its_dtype() -> None:
    model = nn.Linear(2, 2, device="meta")  # stands for an accelerator: it is not the CPU
    amp.initialize(model, opt_level="O1", verbosity=0)
    assert model(torch.ones(1, 2, device="meta")).dtype is HALF
    assert torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype is FLOAT
    assert torch.ones(1, dtype=DOUBLE).sum().dtype is DOUBLE


class Mixed(nn.Module):
    """A 16-bit product meets something in float32: an embedding, a sum, a parameter."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.embedding, self.linear, self.function = nn.Embedding(8, 4), nn.Linear(4, 4), function
        self.weight = nn.Parameter(torch.eye(4))

    def forward(self, index: Tensor) -> Tensor:
        full = self.embedding(index)
        return self.function(self.linear(full), full, self.weight)  # type: ignore[no-any-return]


ROWS = torch.arange(4).repeat(2, 1)
MIXED: dict[str, Any] = {
    "prelu": lambda low, full, weight: F.prelu(low, weight[0]).sum(),
    "PReLU, one number": lambda low, full, weight: F.prelu(low, weight[0, :1]).sum(),
    "bilinear": lambda low, full, weight: F.bilinear(low, full, weight.expand(2, 4, 4)).sum(),
    "einsum": lambda low, full, weight: torch.einsum("bsd,dk->bk", low, weight).sum(),
    "einsum of a list": lambda low, full, weight: torch.einsum("bsd,btd->bst", [low.cumsum(1), low]).sum(),
    "einsum of an embedding": lambda low, full, weight: torch.einsum("bsd,bsd->bs", low, full).sum(),
    "tensordot": lambda low, full, weight: torch.tensordot(low, weight, dims=1).sum(),
    "inner": lambda low, full, weight: low.inner(weight).sum() + torch.inner(full, low[0]).sum(),
    "lerp": lambda low, full, weight: torch.lerp(low, full, 0.5).sum() + full.clone().lerp_(low, 0.5).sum(),
    "linalg.matmul": lambda low, full, weight: torch.linalg.matmul(low, weight).sum(),
    "multi_dot": lambda low, full, weight: torch.linalg.multi_dot([low[0], weight, full[0]]).sum(),
    "attention": lambda low, full, weight: F.scaled_dot_product_attention(low, full, full).sum(),
    "index_add": lambda low, full, weight: torch.zeros(4, 4).index_add_(0, ROWS[0], low[0]).square().sum(),
    "cdist": lambda low, full, weight: torch.cdist(low, full + 1).sum() + torch.cdist(low, low + 1, p=1.0).sum(),
    "pdist": lambda low, full, weight: torch.pdist(low[0]).sum() + F.pdist(low[1]).sum(),
    "scatter_add": lambda low, full, weight: torch.zeros(2, 4).scatter_add(0, ROWS * 0, low[:, 0]).square().sum(),
    "scatter_reduce": lambda low, full, weight: full[0].scatter_reduce(0, ROWS * 0, low[0, :2], "sum").sum(),
    "index_copy": lambda low, full, weight: torch.index_copy(full, 0, ROWS[0, :2], low).square().sum(),
    "index_copy_": lambda low, full, weight: (full * 1).index_copy_(0, ROWS[0, :2], low).square().sum(),
    "index_put": lambda low, full, weight: full.index_put((ROWS[0, :2],), low).square().sum(),
    "masked_scatter": lambda low, full, weight: full.masked_scatter(full > 0, low).square().sum(),
    "a sparse graph": lambda low, full, weight: torch.sparse.mm(GRAPH, low[0]).sum() + torch.spmm(GRAPH, low[1]).sum(),
    "embedding_bag": lambda low, full, weight: F.embedding_bag(ROWS, weight, mode="sum", per_sample_weights=low[0, :2]),
    "solve": lambda low, full, weight: torch.linalg.solve(weight, low).sum() + torch.inverse(weight + low[0, 0] * 0.1),
    "decomposition": lambda low, full, weight: torch.linalg.svdvals(low).sum() + (low[0] @ low[0].T).slogdet()[1],
    "fft": lambda low, full, weight: torch.fft.ifft(torch.fft.fft(low)).real.sum() + torch.fft.rfft2(low).abs().sum(),
    "quantile": lambda low, full, weight: low.quantile(0.3) + torch.isclose(low, full).sum(),
}  # fmt: skip
GRAPH = torch.eye(4).to_sparse()


@pytest.mark.parametrize("name", MIXED)
@pytest.mark.parametrize("level", ["O1", "O4"])
def test_functions_in_no_list_take_what_the_listed_ones_give(level: str, name: str) -> None:
    def trained(level: str) -> list[float]:
        torch.manual_seed(0)
        model = Mixed(MIXED[name])
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        scale = 64.0 if level == "O1" else None
        amp.initialize(model, optimizer, opt_level=level, verbosity=0, loss_scale=scale)
        losses = []
        for _ in range(4):
            optimizer.zero_grad()
            loss = (model(torch.tensor([[1, 2, 3, 4], [4, 3, 2, 1]])).sum() - 2).square()
            scaled_backward(loss * 2**-8, optimizer)
            optimizer.step()
            losses.append(float(loss.detach()))
        amp.close()
        return losses

    assert trained(level) == pytest.approx(trained("O0"), rel=0.05, abs=0.05)


# -- what it costs: the operators of a step are those of the same step with casts written by hand


LOW = torch.bfloat16


class Counting(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen[str(function)] += 1
        return function(*args, **(kwargs or {}))


class Network(nn.Module):
    """A layer of each kind: attention by hand, norm, activation, a weight used twice, a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out, self.norm = nn.Linear(8, 24), nn.Linear(8, 8), nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        x = x + self.out(F.softmax(q @ k.transpose(-1, -2), -1) @ v)
        x = x + self.out(F.gelu(x))
        return F.mse_loss(x, torch.zeros_like(x))


def by_hand(model: Network, x: Tensor) -> Tensor:
    """The same with every cast that the lists ask for, and no other."""
    weights = {name: p.to(LOW) for name, p in model.named_parameters() if "norm" not in name}

    def linear(name: str, given: Tensor) -> Tensor:
        return F.linear(given, weights[f"{name}.weight"], weights[f"{name}.bias"])

    q, k, v = linear("qkv", model.norm(x).to(LOW)).chunk(3, -1)
    attended = F.softmax((q @ k.transpose(-1, -2)).float(), -1).to(LOW) @ v
    x = x + linear("out", attended).float()
    x = x + linear("out", F.gelu(x).to(LOW)).float()
    return F.mse_loss(x, torch.zeros_like(x))


def counted(step: Callable[[], None]) -> Counter[str]:
    with Counting() as mode:
        step()
    return mode.seen


def test_a_step_dispatches_what_casts_by_hand_do() -> None:
    torch.manual_seed(0)
    model, x = Network(), torch.randn(2, 5, 8)

    def plain() -> None:
        by_hand(model, x).backward()

    expected = counted(plain)
    gradients = [p.grad.clone() for p in model.parameters()]  # type: ignore[union-attr]
    model.zero_grad()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    amp.initialize(model, optimizer, opt_level="O4", verbosity=0)

    def step() -> None:
        scaled_backward(model(x), optimizer)

    seen = counted(step)
    assert seen == expected
    assert seen["aten._to_copy.default"] == expected["aten._to_copy.default"] > 0
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        assert torch.equal(parameter.grad, gradient)  # type: ignore[arg-type]


def test_a_compiled_model_casts_as_it_does_uncompiled() -> None:
    """Wrappers are plain Python, which the compiler traces through."""
    torch.manual_seed(0)
    model, x = Network(), torch.randn(2, 5, 8)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    amp.initialize(model, optimizer, opt_level="O4", verbosity=0)
    expected = model(x)
    expected.backward()
    gradients = [p.grad.clone() for p in model.parameters()]  # type: ignore[union-attr]
    model.zero_grad()
    compiled: Any = torch.compile(model, backend="aot_eager")
    loss = compiled(x)
    loss.backward()
    torch.testing.assert_close(loss, expected)
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=2e-2, atol=2e-2)
