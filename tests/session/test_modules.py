"""Precision of modules: norms, RNNs, overrides, compilation, checkpointing."""

from __future__ import annotations

import copy
from collections import OrderedDict, namedtuple
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import preamp
from preamp.errors import PolicyError

from ..rows import over
from .toys import LEVELS, mlp


class Recorder:
    """The dtypes that modules were given and gave back."""

    def __init__(self, model: nn.Module) -> None:
        self.inputs: dict[str, torch.dtype] = {}
        self.outputs: dict[str, torch.dtype] = {}
        for name, module in model.named_modules():
            module.register_forward_hook(self._hook(name))

    def _hook(self, name: str):
        def hook(module, args, output):
            if args and isinstance(args[0], Tensor):
                self.inputs[name] = args[0].dtype
            if isinstance(output, Tensor):
                self.outputs[name] = output.dtype

        return hook


NORMS = {
    "batch": (lambda: nn.BatchNorm1d(8), (4, 8)),
    "batch2d": (lambda: nn.BatchNorm2d(8), (4, 8, 3, 3)),
    "batch-plain": (lambda: nn.BatchNorm1d(8, affine=False), (4, 8)),
    "instance": (lambda: nn.InstanceNorm1d(8, affine=True, track_running_stats=True), (4, 8, 5)),
    "layer": (lambda: nn.LayerNorm(8), (4, 8)),
    "group": (lambda: nn.GroupNorm(2, 8), (4, 8)),
    "rms": (lambda: nn.RMSNorm(8), (4, 8)),
}


@over(level=["O2", "O5"], name=NORMS)
def test_norms_keep_float32_and_pass_16_bits_on(level: str, name: str) -> None:
    make, shape = NORMS[name]
    model = nn.Sequential(nn.Identity(), make(), nn.Identity())
    seen = Recorder(model)
    low = preamp.policy(level).params
    x = torch.randn(*shape) * 300  # squares overflow float16
    expected = make()(x)
    with preamp.prepare(model, None, level=level) as session:
        assert all(t.dtype is torch.float32 for t in [*model.parameters(), *model.buffers()] if t.is_floating_point())
        with session.autocast():
            out = model(x)
    assert seen.inputs["1"] is low and seen.outputs["1"] is low
    assert out.dtype is torch.float32
    assert torch.allclose(out, expected, atol=0.05)


@pytest.mark.parametrize("name", NORMS)
@pytest.mark.parametrize(("level", "norms"), [("O2", torch.float16), ("O5", torch.bfloat16), ("O3", torch.float16)])
def test_norms_in_16_bits_take_what_is_float32(level: str, norms: torch.dtype, name: str) -> None:
    """Some operators give float32 in a region, and torch's batch norm takes no such input beside 16-bit weights."""

    class Squares(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.float().pow(2)

    make, shape = NORMS[name]
    model = nn.Sequential(Squares(), make(), nn.Identity())
    x = torch.randn(*shape)
    with preamp.prepare(model, None, level=level, norms=norms) as session, session.autocast():
        out = model(x)
    expected = make()(x.square())
    assert torch.allclose(out.float(), expected, atol=0.1)


@over(described=["O3", "params=bf16,compute=bf16,norms=bf16"], name=["batch", "batch2d", "batch-plain", "instance"])
def test_statistics_in_16_bits_are_those_of_training(described: str, name: str) -> None:
    """Batch norm writes its statistics without telling autograd, so that versions do not show who was written."""
    make, shape = NORMS[name]
    torch.manual_seed(0)
    model = nn.Sequential(make())
    model.register_buffer("constant", torch.tensor([1 / 3]))
    with preamp.prepare(model, None, policy=preamp.policy(described)) as session:
        with session.autocast():
            for _ in range(3):
                model(torch.randn(*shape) * 2 + 3)
        low = model[0].running_mean.clone()
        assert low.dtype in (torch.float16, torch.bfloat16) and float(low.float().min()) > 0.5
        with session.full_precision():
            assert torch.equal(model[0].running_mean, low.float())
            assert float(model.constant) == float(torch.tensor([1 / 3]))  # nobody wrote it: every bit
            model[0].running_var.fill_(1 / 3)
        assert torch.equal(model[0].running_mean, low)
        assert torch.equal(model[0].running_var, torch.full((8,), 1 / 3, dtype=low.dtype))
        with session.full_precision():
            assert float(model[0].running_var[0]) == float(torch.tensor([1 / 3]))
    assert torch.equal(model[0].running_mean, low.float())
    assert model[0].running_var.dtype is torch.float32


@pytest.mark.parametrize(
    ("kind", "packed", "level"),
    [
        *((nn.LSTM, packed, level) for level in LEVELS for packed in (False, True)),
        *((kind, level == "O2", level) for kind in (nn.GRU, nn.RNN) for level in ("O2", "O4")),
    ],
)
def test_rnns(level: str, kind: type[nn.RNNBase], packed: bool) -> None:
    class Tagger(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(7, 6), nn.Linear(10, 3)
            self.rnn = kind(6, 5, num_layers=2, bidirectional=True, batch_first=True)

        def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
            out = self.embed(x)
            if packed:
                out = nn.utils.rnn.pack_padded_sequence(out, lengths, batch_first=True, enforce_sorted=False)
            state = torch.zeros(4, len(x), 5)  # a float32 state, as scripts write it
            state = state if level == "O3" or kind is not nn.LSTM else (state, state.clone())
            out, _ = self.rnn(out, state if level != "O3" else None)
            if packed:
                out, _ = nn.utils.rnn.pad_packed_sequence(out, batch_first=True)
            return self.head(out)

    torch.manual_seed(0)
    model = Tagger()
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    x, lengths = torch.randint(0, 7, (6, 9)), torch.tensor([9, 3, 4, 9, 1, 7])
    losses = []
    with preamp.prepare(model, optimizer, level=level, scale=16.0) as session:
        for _ in range(8):
            with session.autocast():
                loss = F.cross_entropy(model(x, lengths).flatten(0, 1), (x % 3).flatten())
            session.backward(loss)
            session.step()
            session.zero_grad()
            losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.05


@over(level=["O1", "O2", "O4", "O5"], cell=[nn.LSTMCell, nn.GRUCell, nn.RNNCell])
def test_rnn_cells_give_16_bits(level: str, cell: type[nn.RNNCellBase]) -> None:
    model = cell(6, 5)
    low = preamp.policy(level).compute
    with preamp.prepare(model, None, level=level, output=None) as session, session.autocast():
        h = torch.zeros(2, 5)
        out = model(torch.randn(2, 6), (h, h) if cell is nn.LSTMCell else h)
        out = out[0] if cell is nn.LSTMCell else out
        assert out.dtype is low


@pytest.mark.parametrize("level", ["O1", "O2", "O3", "O4", "O5"])
def test_a_module_in_full_precision_inside_a_low_model(level: str) -> None:
    model = nn.Sequential(OrderedDict(a=nn.Linear(6, 6), block=mlp(), head=nn.Linear(3, 2)))
    seen = Recorder(model)
    policy = preamp.policy(level).override("block", "full").override(r"block\.3", "low")
    low = policy.compute
    with preamp.prepare(model, torch.optim.SGD(model.parameters(), 0.1), policy=policy, scale=8.0) as session:
        assert model.block[0].weight.dtype is torch.float32
        assert model.block[3].weight.dtype is policy.params
        with session.autocast():
            out = model(torch.randn(4, 6))
        session.backward(out.float().mean())
        assert not session.step().skipped
    assert seen.inputs["block.0"] is torch.float32 and seen.outputs["block.0"] is torch.float32
    assert seen.outputs["a"] is low and seen.outputs["head"] is low
    assert seen.outputs["block"] is (low if policy.params is low else torch.float32)


def test_one_layer_in_bfloat16_inside_a_float16_model() -> None:
    for level in ("O1", "O2"):
        model = mlp()
        seen = Recorder(model)
        with preamp.prepare(model, None, policy=preamp.policy(level).override("0", "bf16")) as session:
            with session.autocast():
                model(torch.randn(4, 6))
            assert model[0].weight.dtype is (torch.bfloat16 if level == "O2" else torch.float32)
        assert seen.outputs["3"] is torch.float16
        if level == "O1":
            assert seen.outputs["0"] is torch.bfloat16


def test_a_shared_parameter_wanted_in_two_precisions_is_refused() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight = model[0].weight
    with pytest.raises(PolicyError, match=r"0\.weight and 1\.weight are one shared parameter"):
        preamp.prepare(model, None, policy=preamp.policy("O2").override("1", "full"))
    assert model[0].weight.dtype is torch.float32


@pytest.mark.parametrize("level", ["O2", "O5"])
def test_containers_keep_their_types(level: str) -> None:
    Pair = namedtuple("Pair", "x y")

    @dataclass
    class Out:
        logits: Tensor
        name: str

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 3)

        def forward(self, pair, *, scale, ids):
            assert type(pair) is Pair and pair.x.dtype is low and ids.dtype is torch.long
            out = self.linear(pair.x) * scale["s"]
            return {"o": Out(out, "n"), "p": Pair(out, [out]), "m": OrderedDict(a=out), "i": ids, "d": pair.y}

    low = preamp.policy(level).params
    double = torch.randn(2, dtype=torch.float64)
    with preamp.prepare(model := Model(), None, level=level) as session, session.autocast():
        got = model(Pair(torch.randn(2, 3), double), scale={"s": torch.ones(())}, ids=torch.arange(2))
    assert type(got["o"]) is Out and got["o"].logits.dtype is torch.float32 and got["o"].name == "n"
    assert type(got["p"]) is Pair and got["p"].y[0].dtype is torch.float32
    assert type(got["m"]) is OrderedDict and got["m"]["a"].dtype is torch.float32
    assert got["i"].dtype is torch.long and got["d"].dtype is torch.float64


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("norm", "shape"),
    [
        (lambda: nn.LayerNorm(48), (5, 48)),
        (lambda: nn.GroupNorm(4, 16), (3, 16, 6, 6)),
        (lambda: nn.InstanceNorm2d(16, affine=True), (3, 16, 6, 6)),
        (lambda: nn.RMSNorm(48), (5, 48)),
    ],
    ids=["LayerNorm", "GroupNorm", "InstanceNorm2d", "RMSNorm"],
)
def test_norms_compute_in_float32_whether_they_cast_or_not(norm, shape, dtype) -> None:  # type: ignore[no-untyped-def]
    """Where torch's kernel takes mixed dtypes no activation is cast, and the numbers are those of a float32 norm."""
    torch.manual_seed(0)
    reference = norm()
    with torch.no_grad():
        for p in reference.parameters():
            p.copy_(torch.randn_like(p))
    model = nn.Sequential(nn.Identity(), copy.deepcopy(reference))
    level = "O2" if dtype is torch.float16 else "O5"
    x = (3 * torch.randn(shape) + 1).to(dtype)
    gradient = torch.randn(shape).to(dtype)
    wide = x.float().requires_grad_()
    expected = reference(wide)
    expected.backward(gradient.float())
    with preamp.prepare(model, None, level=level, output=None) as session:
        low = x.clone().requires_grad_()
        casts = 0

        class Counting(torch.utils._python_dispatch.TorchDispatchMode):
            def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
                nonlocal casts
                casts += "_to_copy" in str(func)
                return func(*args, **(kwargs or {}))

        with Counting(), session.autocast():
            result = model(low)
        result.backward(gradient)
        assert casts == (2 if isinstance(reference, nn.RMSNorm) else 0)
        assert result.dtype is dtype and low.grad.dtype is dtype
        ulp = torch.finfo(dtype).eps
        assert torch.allclose(result.float(), expected, rtol=ulp, atol=ulp)
        assert torch.allclose(low.grad.float(), wide.grad, rtol=4 * ulp, atol=4 * ulp)
        for mine, theirs in zip(model.parameters(), reference.parameters(), strict=True):
            assert mine.dtype is torch.float32
            assert torch.allclose(mine.grad, theirs.grad, rtol=1e-2, atol=1e-2)


@over(level=["O1", "O2", "O4", "O5"], ids=["as an argument", "by name", "inside"])
def test_a_module_in_full_precision_that_gets_no_floating_input(level: str, ids: str) -> None:
    """A text encoder takes token ids, and a table of weights nothing at all."""

    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.linear = nn.Embedding(5, 8), nn.Linear(8, 8)

        def forward(self, tokens: torch.Tensor | None = None) -> torch.Tensor:
            return self.linear(self.table(torch.arange(5) if tokens is None else tokens))

    tokens = {"as an argument": ((torch.arange(5),), {}), "by name": ((), {"tokens": torch.arange(5)})}
    args, kwargs = tokens.get(ids, ((), {}))
    model = nn.ModuleDict({"encoder": Encoder(), "head": nn.Linear(8, 2)})
    wanted = model["encoder"](*args, **kwargs).detach()
    with preamp.prepare(model, None, level=level, modules={"encoder": "full"}) as session, session.autocast():
        encoded = model["encoder"](*args, **kwargs)
        assert torch.equal(encoded, wanted.to(encoded.dtype))  # at O2 and O5 rounded as it leaves
        assert encoded.dtype is preamp.policy(level).params


@over(level=["O0", "O1", "O2", "O4", "O5"], masked=[True, False], inside=[True, False])
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_the_fast_path_of_a_transformer_in_eval_mode(level: str, masked: bool, inside: bool) -> None:
    """torch's fused kernels for inference take weights of one dtype; in a region they are off."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True)
    model = nn.Sequential(nn.Linear(8, 16), nn.TransformerEncoder(layer, 2), nn.Linear(16, 4)).eval()
    x, mask = torch.randn(6, 7, 8), torch.arange(7).expand(6, 7) >= torch.tensor([[5], [7], [2], [7], [7], [1]])

    def run() -> Tensor:
        hidden = model[1](model[0](x.to(model[0].weight.dtype)), src_key_padding_mask=mask if masked else None)
        return model[2](hidden.to(model[2].weight.dtype)).float()[~mask]  # type: ignore[no-any-return]

    with torch.no_grad():
        expected = run()
        with preamp.prepare(model, None, level=level) as session, session.autocast(enabled=inside):
            found = run()
    assert (found - expected).norm() / expected.norm() < 0.02


def test_a_sparse_embedding_that_shares_its_weight_is_like_the_other() -> None:
    table, head = nn.Embedding(9, 8, sparse=True), nn.Linear(8, 9, bias=False)
    head.weight = table.weight
    with preamp.prepare(nn.ModuleList([table, head]), None, level="O5"):
        assert head.weight.dtype is torch.bfloat16


class ComparedByElement(nn.Linear):
    """`==` gives a tensor, as that of tensordict's parameters, which are a module: it has no truth value."""

    __hash__ = nn.Module.__hash__

    def __eq__(self, other):
        return torch.zeros(2, dtype=torch.bool)


@pytest.mark.parametrize("level", LEVELS)
def test_modules_that_compare_by_element_train_and_load(level: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(ComparedByElement(4, 8), ComparedByElement(8, 1))
    twin = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 1))
    twin.load_state_dict(model.state_dict())
    for each in (model, twin):
        optimizer, x = torch.optim.SGD(each.parameters(), lr=0.1), torch.ones(2, 4)
        with preamp.prepare(each, optimizer, level=level) as session:
            for _ in range(2):
                with session.autocast():
                    loss = each(x).square().mean()
                session.backward(loss)
                session.step()
                session.zero_grad()
            each.load_state_dict(each.state_dict())
            session.load_state_dict(session.state_dict())
    for mine, other in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(mine, other)
