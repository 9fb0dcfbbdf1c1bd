"""fp16_utils: casting networks, master parameters, FP16_Optimizer and its checkpoints, the loss scalers."""

from __future__ import annotations

import copy
import gc
import inspect
import io
import pickle
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import Parameter

from preamp.compat.apex import amp
from preamp.compat.apex._notice import DeprecatedFeatureWarning
from preamp.compat.apex._scaler import LossScaler as AmpScaler
from preamp.compat.apex.fp16_utils import (
    BN_convert_float,
    DynamicLossScaler,
    FP16_Optimizer,
    FP16Model,
    LossScaler,
    clip_grad_norm,
    convert_module,
    convert_network,
    loss_scaler,
    master_params_to_model_params,
    model_grads_to_master_grads,
    network_to_half,
    prep_param_lists,
    to_python_float,
    tofp16,
)

from ..products import BY_FLOAT32, counted, cpu_that_multiplies

LOW = [torch.float16, torch.bfloat16]
lows = pytest.mark.parametrize("low", LOW)


class Net(nn.Module):
    """Half a model in 16 bits, half in float32."""

    def __init__(self, low: torch.dtype = torch.float16) -> None:
        super().__init__()
        self.first = nn.Linear(5, 7).to(low)
        self.norm = nn.BatchNorm1d(7)
        self.last = nn.Linear(7, 2).to(low)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.first(x.to(self.first.weight.dtype)).float())
        return self.last(x.to(self.last.weight.dtype))


def wrap(optimizer: torch.optim.Optimizer, **options: Any) -> FP16_Optimizer:
    with pytest.warns(DeprecatedFeatureWarning):
        return FP16_Optimizer(optimizer, **{"verbose": False, **options})


def made(low: torch.dtype = torch.float16, lr: float = 0.05, **options: Any) -> tuple[Net, FP16_Optimizer]:
    torch.manual_seed(3)
    net = Net(low)
    return net, wrap(torch.optim.Adam(net.parameters(), lr=lr), **options)


def batch(seed: int) -> Tensor:
    return torch.randn(6, 5, generator=torch.Generator().manual_seed(seed))


def loss_of(net: nn.Module, seed: int) -> Tensor:
    return net(batch(seed)).float().pow(2).mean()


def train(net: Net, optimizer: FP16_Optimizer, seeds: Any) -> None:
    for seed in seeds:
        optimizer.zero_grad()
        optimizer.backward(loss_of(net, seed))
        optimizer.step()


def weights(net: nn.Module) -> list[Tensor]:
    return [param.detach().clone() for param in net.parameters()]


def same(left: list[Any], right: list[Any]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def grad(tensor: Tensor) -> Tensor:
    assert tensor.grad is not None
    return tensor.grad


# -- networks


def network() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.BatchNorm2d(4, affine=False),
        nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), nn.LSTM(4, 4),
    )  # fmt: skip


def test_network_to_half() -> None:
    net = network()
    half = network_to_half(net)
    assert isinstance(half[0], tofp16)
    assert half[1] is net
    assert all(key.startswith("1.") for key in half.state_dict())
    assert net[0].weight.dtype is torch.float16
    assert net[1].weight.dtype is net[1].running_mean.dtype is torch.float32
    assert net[2].running_mean.dtype is torch.float16
    assert net[3][1].weight.dtype is torch.float32
    assert half[0](torch.ones(2)).dtype is torch.float16
    image = network_to_half(nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU()))(torch.ones(1, 3, 2, 2))
    assert image.dtype is torch.float16


def test_bn_convert_float_takes_a_lone_layer() -> None:
    layer = nn.BatchNorm1d(3).half()
    assert BN_convert_float(layer) is layer
    assert layer.weight.dtype is torch.float32
    assert BN_convert_float(nn.BatchNorm1d(3, affine=False).half()).running_mean.dtype is torch.float16


@lows
def test_convert_network(low: torch.dtype) -> None:
    net = network()
    net.register_buffer("numbers", torch.arange(3))
    before = list(net.parameters())
    assert convert_network(net, dtype=low) is net
    assert all(a is b for a, b in zip(net.parameters(), before, strict=True))
    assert net[0].weight.dtype is net[2].running_mean.dtype is net[4].weight_hh_l0.dtype is low
    assert net[1].weight.dtype is net[1].running_var.dtype is torch.float32
    assert net.numbers.dtype is torch.int64


@lows
def test_convert_module_is_shallow_and_casts_gradients(low: torch.dtype) -> None:
    outer = nn.Linear(2, 2)
    outer.child = nn.Linear(2, 2)  # type: ignore[assignment]
    outer(torch.ones(1, 2)).sum().backward()
    convert_module(outer, low)
    assert grad(outer.weight).dtype is outer.weight.dtype is low
    assert outer.child.weight.dtype is torch.float32
    outer(torch.ones(1, 2, dtype=low)).sum().backward()  # gradients still add up
    assert torch.equal(grad(outer.weight), torch.full((2, 2), 2.0, dtype=low))


def test_fp16_model() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 2)

        def forward(self, x: Tensor, y: Tensor, name: str = "", scale: float = 1.0) -> Tensor:
            assert name == "n"
            return self.layer(x) + y * scale

    model = FP16Model(Two())
    assert isinstance(model.network, Two)
    assert model(torch.ones(1, 2), torch.ones(1, 2), "n", scale=2.0).dtype is torch.float16


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
@pytest.mark.parametrize("kind", [network_to_half, FP16Model, lambda model: amp.initialize(model, opt_level="O2")])
def test_products_of_a_copy_go_through_float32_once_the_model_is_gone(kind: Any, copied: Any) -> None:
    """A model that was saved as a whole, and is loaded to be used."""
    with cpu_that_multiplies(BY_FLOAT32):
        twin = copied(kind(nn.Linear(2, 2)))
        gc.collect()
        with counted() as through:
            twin(torch.ones(1, 2))
        assert through and all(through)
        del twin
        gc.collect()


# -- parameter lists


@lows
@pytest.mark.parametrize("flat", [False, True])
def test_parameters_to_masters_and_back(low: torch.dtype, flat: bool) -> None:
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Linear(2, 3), nn.Linear(1, 1)).to(low)
    net[0].to(memory_format=torch.channels_last)
    net[2].weight.requires_grad_(False)
    model, masters = prep_param_lists(net, flat_master=flat)
    assert len(model) == 5
    assert all(isinstance(m, Parameter) and m.dtype is torch.float32 and m.is_leaf for m in masters)
    assert len(masters) == (1 if flat else 5)
    if flat:
        assert masters[0].numel() == sum(p.numel() for p in model)
    for i, param in enumerate(model):
        param.grad = torch.full_like(param, i + 1.0)
    model_grads_to_master_grads(model, masters, flat_master=flat)
    assert masters[0].grad is not None
    assert grad(masters[0]).dtype is torch.float32
    torch.optim.SGD(masters, lr=0.5).step()
    before, frozen = [param.detach().clone() for param in model], net[2].weight.item()
    master_params_to_model_params(model, masters, flat_master=flat)
    assert net[2].weight.item() == frozen
    for i, (param, old) in enumerate(zip(model, before, strict=True)):
        assert torch.equal(param, (old.float() - 0.5 * (i + 1)).to(low))


def test_parameters_without_gradients() -> None:
    net = nn.Linear(2, 2).half()
    model, masters = prep_param_lists(net)
    masters[0].grad = torch.ones(2, 2)
    model_grads_to_master_grads(model, masters)
    assert masters[0].grad is None
    model, (flat,) = prep_param_lists(net, flat_master=True)
    flat.grad = None  # as an optimizer's zero_grad leaves it
    net.weight.grad = torch.ones_like(net.weight)
    model_grads_to_master_grads(model, [flat], flat_master=True)
    assert grad(flat).tolist() == [1.0] * 4 + [0.0] * 2


def test_a_flat_master_of_two_dtypes_is_refused() -> None:
    net = nn.Sequential(nn.Linear(1, 1).half(), nn.Linear(1, 1))
    with pytest.raises(RuntimeError, match="mixture of parameters of different types"):
        prep_param_lists(net, flat_master=True)
    with pytest.raises(RuntimeError):
        master_params_to_model_params([torch.ones(1)], [])


def test_small_things() -> None:
    assert to_python_float(torch.tensor([2.5])) == 2.5
    assert to_python_float([1.5]) == 1.5
    assert loss_scaler.to_python_float is to_python_float
    assert clip_grad_norm is nn.utils.clip_grad_norm_


# -- FP16_Optimizer


def test_construction_says_what_it_takes(capsys: pytest.CaptureFixture[str]) -> None:
    net = Net()
    wrap(torch.optim.SGD(net.parameters(), lr=0.1), verbose=True)
    out = capsys.readouterr().out
    assert "Warning:  FP16_Optimizer is deprecated and dangerous" in out
    assert "FP16_Optimizer processing param group 0:" in out
    assert f"received torch.HalfTensor with {torch.Size([7, 5])}" in out
    assert f"received torch.FloatTensor with {torch.Size([7])}" in out
    wrap(torch.optim.SGD(Net().parameters(), lr=0.1))
    assert "received" not in capsys.readouterr().out
    names = list(inspect.signature(FP16_Optimizer).parameters)
    assert names == ["init_optimizer", "static_loss_scale", "dynamic_loss_scale", "dynamic_loss_args", "verbose"]


@lows
def test_masters_take_the_places_of_16_bit_parameters(low: torch.dtype) -> None:
    net = Net(low)
    net.first.bias.requires_grad_(False)
    optimizer = wrap(torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9))
    group = optimizer.param_groups[0]["params"]
    assert group[0] is optimizer.fp32_from_fp16_groups[0][0]
    assert group[0].dtype is torch.float32
    assert group[1] is net.first.bias
    assert group[2] is net.norm.weight
    lows = [net.first.weight, net.last.weight, net.last.bias]
    assert all(a is b for a, b in zip(optimizer.all_fp16_params, lows, strict=True))
    assert all(a is b for a, b in zip(optimizer.fp16_groups[0], lows, strict=True))
    assert len(optimizer.all_fp32_from_fp16_params) == 3
    assert len(optimizer.all_fp32_from_fp32_params) == 2
    assert not optimizer.overflow
    assert optimizer.first_closure_call_this_step
    assert optimizer.state is optimizer.optimizer.state


def test_other_dtypes_are_refused() -> None:
    with pytest.warns(DeprecatedFeatureWarning), pytest.raises(TypeError, match="Wrapped parameters must be either"):
        FP16_Optimizer(torch.optim.SGD(nn.Linear(1, 1).double().parameters(), lr=0.1))


@lows
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("flow", ["plain", "closure"])
def test_steps_are_those_of_float32_masters(low: torch.dtype, dynamic: bool, flow: str) -> None:
    """The masters go where an unscaled optimizer over float32 copies goes, fed with the same 16-bit gradients."""
    options = {"dynamic_loss_scale": True, "dynamic_loss_args": {"init_scale": 2.0**10}} if dynamic else {}
    net, optimizer = made(low, static_loss_scale=128.0, **options)
    twin = copy.deepcopy(net)
    copies = [Parameter(p.detach().float()) for p in twin.parameters()]
    plain = torch.optim.Adam(copies, lr=0.05)
    for seed in range(5):

        def closure(seed: int = seed) -> Tensor:
            optimizer.zero_grad()
            loss = loss_of(net, seed)
            optimizer.backward(loss)
            return loss

        if flow == "closure":
            loss = optimizer.step(closure)
            assert loss is not None
        else:
            closure()
            optimizer.step()
        twin.zero_grad()
        (loss_of(twin, seed) * optimizer.loss_scale).backward()
        for param, wide in zip(twin.parameters(), copies, strict=True):
            wide.grad = grad(param).float() / optimizer.loss_scale
        plain.step()
        with torch.no_grad():
            for param, wide in zip(twin.parameters(), copies, strict=True):
                param.copy_(wide)
    assert same(weights(net), weights(twin))


@lows
def test_gradients_add_up(low: torch.dtype) -> None:
    """Several backward passes, in any mixture of ways to update the masters; float32 parameters too."""
    net, optimizer = made(low, static_loss_scale=64.0)
    expected = copy.deepcopy(net)
    for seed in range(3):
        (loss_of(expected, seed) * 64).backward()
    true = [grad(p).float() / 64 for p in expected.parameters()]
    for updates in ((True, True, True), (False, False, True), (True, False, True), (False, False, False)):
        state = copy.deepcopy(net.state_dict())
        optimizer.zero_grad()
        for seed, update in enumerate(updates):
            optimizer.backward(loss_of(net, seed), update_master_grads=update)
        if not updates[-1]:
            optimizer.update_master_grads()
            optimizer.update_master_grads()  # once more changes nothing
        net.load_state_dict(state)
        found = [grad(p) for p in optimizer.param_groups[0]["params"]]
        for mine, theirs in zip(found, true, strict=True):
            assert mine.dtype is torch.float32
            torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-7)


def test_gradients_add_up_while_the_scale_moves() -> None:
    net, optimizer = made(dynamic_loss_scale=True, dynamic_loss_args={"init_scale": 64.0, "scale_window": 1})
    expected = copy.deepcopy(net)
    for seed in range(3):
        loss_of(expected, seed).backward()
        optimizer.backward(loss_of(net, seed))
    assert optimizer.loss_scale == 64.0 * 8
    for mine, theirs in zip(optimizer.param_groups[0]["params"], expected.parameters(), strict=True):
        torch.testing.assert_close(grad(mine), grad(theirs).float(), rtol=5e-3, atol=1e-3)


def test_overflow_skips_the_step(capsys: pytest.CaptureFixture[str]) -> None:
    net, optimizer = made(dynamic_loss_scale=True, dynamic_loss_args={"init_scale": 256.0})
    train(net, optimizer, range(2))
    before, masters = weights(net), [m.detach().clone() for m in optimizer.all_fp32_from_fp16_params]
    optimizer.zero_grad()
    optimizer.backward(loss_of(net, 2) * float("inf"))
    assert optimizer.overflow
    assert optimizer.clip_master_grads(1.0) == -1
    capsys.readouterr()
    assert optimizer.step() is None
    assert capsys.readouterr().out == "Gradient overflow.  Skipping step, reducing loss scale to 128.0\n"
    assert same(weights(net), before)
    assert same(optimizer.all_fp32_from_fp16_params, masters)
    state = optimizer.state[optimizer.param_groups[0]["params"][0]]
    assert int(state["step"]) == 2
    train(net, optimizer, [3])
    assert not optimizer.overflow
    assert not same(weights(net), before)


def test_closures_are_called_again_on_overflow(capsys: pytest.CaptureFixture[str]) -> None:
    net, optimizer = made(dynamic_loss_scale=True, dynamic_loss_args={"init_scale": 64.0})
    calls: list[float] = []

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(net, 0)
        calls.append(optimizer.loss_scale)
        optimizer.backward(loss * float("inf") if len(calls) < 3 else loss)
        return loss

    assert optimizer.step(closure) is not None
    assert calls == [64.0, 32.0, 16.0]
    assert capsys.readouterr().out.count("OVERFLOW within closure!") == 2
    assert optimizer.first_closure_call_this_step


def test_a_closure_that_always_overflows_ends() -> None:
    net, optimizer = made(dynamic_loss_scale=True)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(net, 0) * float("nan")
        optimizer.backward(loss)
        return loss

    with pytest.raises(RuntimeError, match="times in a row"):
        optimizer.step(closure)
    assert optimizer.first_closure_call_this_step


def test_lbfgs_sees_fresh_weights_in_its_closure() -> None:
    net = nn.Linear(3, 1).half()
    optimizer = wrap(torch.optim.LBFGS(net.parameters(), lr=0.5, max_iter=8))
    x, y = torch.randn(16, 3).half(), torch.randn(16, 1).half()

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = (net(x) - y).float().pow(2).mean()
        optimizer.backward(loss)
        return loss

    first = optimizer.step(closure).item()
    assert closure().item() < first


def test_clipping() -> None:
    net, optimizer = made(static_loss_scale=16.0)
    optimizer.backward(loss_of(net, 0))
    given = [p.grad for group in optimizer.param_groups for p in group["params"]]
    total = torch.cat([g.flatten() for g in given if g is not None]).norm()
    norm = optimizer.clip_master_grads(total.item() / 2)
    assert float(norm) == pytest.approx(total.item(), rel=1e-5)
    assert float(optimizer.clip_master_grads(1e9)) == pytest.approx(total.item() / 2, rel=1e-3)


@pytest.mark.parametrize("none", [False, True])
def test_zero_grad(none: bool) -> None:
    net, optimizer = made()
    optimizer.backward(loss_of(net, 0))
    optimizer.zero_grad(set_grads_to_None=none)
    for param in [*net.parameters(), *optimizer.all_fp32_from_fp16_params]:
        assert (param.grad is None) if none else not grad(param).any()
    optimizer.step()


def test_parameters_without_gradients_do_not_move() -> None:
    net, optimizer = made()
    before = weights(net)
    optimizer.backward(net.last(torch.ones(2, 7).half()).sum())
    optimizer.step()
    after = weights(net)
    assert same(before[:4], after[:4])
    assert not same(before[4:], after[4:])


@pytest.mark.filterwarnings("ignore:.*sparse.*:UserWarning")
@lows
def test_sparse_gradients_are_spread_out(low: torch.dtype) -> None:
    table = nn.Embedding(4, 2, sparse=True).to(low)
    wide = nn.Embedding(4, 2, sparse=True)
    optimizer = wrap(torch.optim.SGD([*table.parameters(), *wide.parameters()], lr=1.0), static_loss_scale=8.0)
    before = [table.weight.detach().clone(), wide.weight.detach().clone()]
    passes = 1 if low is torch.float16 else 2  # torch cannot add sparse float16 gradients on a CPU
    for _ in range(passes):
        index = torch.tensor([1, 1, 3])
        optimizer.backward(table(index).float().sum() + wide(index).sum())
    optimizer.step()
    moved = passes * torch.tensor([0.0, 2.0, 0.0, 1.0])[:, None].expand(4, 2)
    torch.testing.assert_close(wide.weight.detach(), before[1] - moved)
    torch.testing.assert_close(table.weight.detach(), (before[0].float() - moved).to(low))


# -- saving


@lows
@pytest.mark.parametrize("weights_only", [False, True])
def test_resume_is_bit_exact(low: torch.dtype, weights_only: bool) -> None:
    options = {"init_scale": 32.0, "scale_window": 3, "min_loss_scale": 2.0, "max_loss_scale": 512.0}
    net, optimizer = made(low, lr=1e-3, dynamic_loss_scale=True, dynamic_loss_args=options)
    train(net, optimizer, range(4))
    file = io.BytesIO()
    torch.save({"model": net.state_dict(), "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=weights_only)
    assert list(saved["optimizer"]) == [
        "loss_scaler", "dynamic_loss_scale", "overflow", "first_closure_call_this_step", "optimizer_state_dict",
        "fp32_from_fp16",
    ]  # fmt: skip
    other, resumed = made(low, lr=1e-3, dynamic_loss_scale=True)
    other.load_state_dict(saved["model"])
    resumed.load_state_dict(saved["optimizer"])
    assert resumed.loss_scaler.__dict__ == optimizer.loss_scaler.__dict__
    train(net, optimizer, range(4, 9))
    train(other, resumed, range(4, 9))
    assert same(weights(net), weights(other))
    assert same(optimizer.all_fp32_from_fp16_params, resumed.all_fp32_from_fp16_params)
    assert optimizer.loss_scale == resumed.loss_scale == 256.0


def test_scalers_that_apex_saved_as_objects_load() -> None:
    _, optimizer = made()
    state = optimizer.state_dict()
    state["loss_scaler"] = SimpleNamespace(_loss_scale=512.0, _unskipped=7, dynamic=True, _scale_seq_len=9)
    state["dynamic_loss_scale"] = True
    optimizer.load_state_dict(state)
    assert optimizer.loss_scaler.loss_scale() == optimizer.loss_scale == 512.0
    assert isinstance(optimizer.loss_scaler, AmpScaler)
    assert (optimizer.loss_scaler._unskipped, optimizer.loss_scaler._scale_seq_len) == (7, 9)
    assert optimizer.loss_scaler.dynamic
    state["loss_scaler"] = DynamicLossScaler(init_scale=64.0, scale_window=5)
    optimizer.load_state_dict(state)
    assert (optimizer.loss_scale, optimizer.loss_scaler._scale_seq_len) == (64.0, 5)
    state["loss_scaler"] = SimpleNamespace()
    with pytest.raises(KeyError, match="loss_scale"):
        optimizer.load_state_dict(state)


def test_masters_that_do_not_fit_change_nothing() -> None:
    net, optimizer = made(dynamic_loss_scale=True)
    state = optimizer.state_dict()
    state["fp32_from_fp16"] = [state["fp32_from_fp16"][0][:1]]
    state["overflow"] = True
    before = weights(net)
    with pytest.raises(ValueError, match="matched by position"):
        optimizer.load_state_dict(state)
    assert not optimizer.overflow
    assert same(before, weights(net))


def test_copies_and_pickles_are_refused() -> None:
    _, optimizer = made()
    with pytest.raises(RuntimeError, match=r"should be serialized using state_dict\(\)"):
        pickle.dumps(optimizer)
    with pytest.raises(RuntimeError, match=r"should be serialized using state_dict\(\)"):
        copy.deepcopy(optimizer)


def test_properties_may_be_set() -> None:
    _, optimizer = made(dynamic_loss_scale=True)
    optimizer.loss_scale = 99.0
    assert optimizer.loss_scaler.loss_scale() == 99.0
    groups, state = optimizer.param_groups, optimizer.state
    optimizer.param_groups = list(groups)
    optimizer.state = dict(state)
    assert optimizer.optimizer.param_groups == groups
    optimizer.param_groups[0]["lr"] = 0.5
    assert optimizer.optimizer.param_groups[0]["lr"] == 0.5


# -- loss scalers


def test_static_loss_scaler() -> None:
    with pytest.warns(DeprecatedFeatureWarning):
        scaler = LossScaler(8)
    assert scaler.loss_scale == scaler.cur_scale == 8
    param = Parameter(torch.tensor([3.0]))
    scaler.backward(param.sum(), retain_graph=True)
    assert grad(param).item() == 8.0
    param.grad = torch.tensor([float("inf")])
    assert not scaler.has_overflow([param])
    scaler.update_scale(True)
    assert scaler.loss_scale == 8
    assert scaler.scale_gradient(None, (torch.ones(1),), None)[0].item() == 8.0


def test_dynamic_loss_scaler_moves() -> None:
    scaler = DynamicLossScaler(init_scale=8.0, scale_factor=2.0, scale_window=3)
    assert (scaler.cur_iter, scaler.last_overflow_iter) == (0, -1)
    scales = []
    for overflow in (False, False, False, True, False, False, False, True, True, True, True, True):
        scaler.update_scale(overflow)
        scales.append(scaler.loss_scale)
    assert scales == [8, 8, 16, 8, 8, 8, 16, 8, 4, 2, 1, 1]
    assert DynamicLossScaler().loss_scale == 2**32


@pytest.mark.parametrize("dtype", [torch.float32, *LOW])
@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
@pytest.mark.filterwarnings("ignore:.*sparse.*:UserWarning")
def test_dynamic_loss_scaler_looks(dtype: torch.dtype, bad: float) -> None:
    params = [Parameter(torch.ones(3, dtype=dtype)), Parameter(torch.ones(2)), Parameter(torch.ones(0))]
    scaler = DynamicLossScaler()
    assert not scaler.has_overflow(params)
    for param in params:
        param.grad = torch.full_like(param, 60000.0)  # their sum is no float16
    assert not scaler.has_overflow(iter(params))
    assert torch.equal(grad(params[1]), torch.full((2,), 60000.0))
    grad(params[0])[1] = bad
    assert scaler.has_overflow(params)
    assert DynamicLossScaler._has_inf_or_nan(grad(params[0]))
    assert not DynamicLossScaler._has_inf_or_nan(grad(params[1]))
    table = Parameter(torch.ones(4, 2))
    table.grad = torch.sparse_coo_tensor(torch.tensor([[1]]), torch.full((1, 2), bad), (4, 2))
    assert scaler.has_overflow([table])
