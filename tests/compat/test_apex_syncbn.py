"""SyncBatchNorm over 2 and 3 gloo processes against one plain batch norm in float64 over the joined batch."""

from __future__ import annotations

import copy
import pickle
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from preamp.compat.apex._notice import DeprecatedFeatureWarning
from preamp.compat.apex.parallel import (
    DistributedDataParallel,
    SyncBatchNorm,
    convert_syncbn_model,
    create_syncbn_process_group,
    sync_batchnorm,
)
from tests.compat.ranks import Checks, same

CHECKS = Checks()
check = CHECKS.add
CHANNELS = 3


def batches(world: int, tail: tuple[int, ...], *, sizes: list[int] | None = None) -> list[torch.Tensor]:
    """One float64 batch per rank, of unequal sizes, far from mean 0 and variance 1."""
    generator = torch.Generator().manual_seed(5)
    sizes = sizes or [2 + 3 * rank for rank in range(world)]
    return [torch.randn(n, CHANNELS, *tail, generator=generator, dtype=torch.float64) * 3 + 10 for n in sizes]


def affine(layer: nn.Module) -> nn.Module:
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([0.5, -1.5, 2.0]))
        layer.bias.copy_(torch.tensor([0.1, 0.2, -3.0]))
    return layer


class Reference:
    """One batch norm over the joined batch of `ranks`, with its gradients, written out in float64."""

    def __init__(
        self, xs: list[torch.Tensor], *, z: bool = False, relu: bool = False, momentum: float | None = 0.1
    ) -> None:
        self.layer = affine(nn.BatchNorm2d(CHANNELS, momentum=momentum).double())
        self.layer._check_input_dim = lambda x: None
        self.xs = [x.clone().requires_grad_() for x in xs]
        self.zs = [(x * 0.3 - 1).clone().requires_grad_() for x in xs]
        joined = self.layer(torch.cat(self.xs))
        if z:
            joined = joined + torch.cat(self.zs)
        self.ys = (joined.relu() if relu else joined).split([len(x) for x in xs])
        sum(map(loss_of, self.ys)).backward()


def loss_of(y: torch.Tensor) -> torch.Tensor:
    return (y * torch.sin(torch.arange(y.numel()).view(y.shape))).sum()


def close(got: torch.Tensor | None, want: torch.Tensor | None, tolerance: float = 1e-10) -> None:
    assert got is not None and want is not None
    torch.testing.assert_close(got.double(), want.double(), rtol=tolerance, atol=tolerance)


def over_ranks(gradient: torch.Tensor | None) -> torch.Tensor:
    assert gradient is not None
    total = gradient.clone()
    dist.all_reduce(total)
    return total


def compare(rank: int, xs: list[torch.Tensor], layer: SyncBatchNorm, **options: bool) -> None:
    want = Reference(xs, momentum=layer.momentum, **options)
    x = xs[rank].clone().requires_grad_()
    z = (xs[rank] * 0.3 - 1).clone().requires_grad_() if options.get("z") else None

    def turned(t: torch.Tensor | None) -> torch.Tensor | None:
        return t.movedim(1, -1).contiguous() if layer.channel_last and t is not None else t

    out = layer(turned(x), turned(z))
    y = out.movedim(-1, 1) if layer.channel_last else out
    loss_of(y).backward()
    close(y, want.ys[rank])
    close(x.grad, want.xs[rank].grad)
    if z is not None:
        close(z.grad, want.zs[rank].grad)
    close(over_ranks(layer.weight.grad), want.layer.weight.grad)
    close(over_ranks(layer.bias.grad), want.layer.bias.grad)
    close(layer.running_mean, want.layer.running_mean)
    close(layer.running_var, want.layer.running_var)
    assert layer.num_batches_tracked == 1


@check
def every_rank_of_tensor_with_unequal_batches(rank: int, world: int) -> None:
    for tail in ((), (4,), (2, 3), (2, 1, 3)):
        for channel_last in (False, True):
            layer = affine(SyncBatchNorm(CHANNELS, channel_last=channel_last).double())
            compare(rank, batches(world, tail), layer)


@check
def addition_and_relu(rank: int, world: int) -> None:
    for z in (False, True):
        for relu in (False, True):
            for channel_last in (False, True):
                layer = affine(SyncBatchNorm(CHANNELS, fuse_relu=relu, channel_last=channel_last).double())
                compare(rank, batches(world, (2, 2)), layer, z=z, relu=relu)


@check
def an_empty_batch_on_a_rank(rank: int, world: int) -> None:
    compare(rank, batches(world, (2,), sizes=[0] + [4] * (world - 1)), affine(SyncBatchNorm(CHANNELS).double()))
    compare(rank, batches(world, (), sizes=[1] * world), affine(SyncBatchNorm(CHANNELS).double()))
    layer = SyncBatchNorm(CHANNELS)
    layer(torch.zeros(0, CHANNELS, requires_grad=True)).sum().backward()
    assert layer.running_mean.eq(0).all() and layer.running_var.eq(1).all()
    assert layer.weight.grad is not None and layer.weight.grad.eq(0).all()


@check
def cumulative_average_over_steps(rank: int, world: int) -> None:
    layer, plain = SyncBatchNorm(CHANNELS, momentum=None).double(), nn.BatchNorm1d(CHANNELS, momentum=None).double()
    for step in range(3):
        xs = [x * (step + 1) for x in batches(world, (2,))]
        layer(xs[rank])
        plain(torch.cat(xs))
    close(layer.running_mean, plain.running_mean)
    close(layer.running_var, plain.running_var)


@check
def low_inputs_with_float32_parameters(rank: int, world: int) -> None:
    for dtype, tolerance in ((torch.float16, 2e-3), (torch.bfloat16, 2e-2), (torch.float32, 1e-5)):
        xs = [x.to(dtype) for x in batches(world, (3, 3))]
        want = Reference([x.double() for x in xs])
        layer = affine(SyncBatchNorm(CHANNELS))
        x = xs[rank].to(memory_format=torch.channels_last).requires_grad_()
        y = layer(x)
        assert y.dtype == dtype
        assert y.is_contiguous(memory_format=torch.channels_last)
        loss_of(y.float()).backward()
        assert x.grad is not None and x.grad.dtype == dtype
        close(y, want.ys[rank], 4 * tolerance)
        close(x.grad, want.xs[rank].grad, 10 * tolerance)
        close(layer.running_var, want.layer.running_var, 1e-4)
        all_low = affine(SyncBatchNorm(CHANNELS)).to(dtype)
        assert all_low(x).dtype == dtype
    far = torch.randn(8, CHANNELS, generator=torch.Generator().manual_seed(rank)) + 4096  # E[x^2] - E[x]^2 is noise
    parts = [torch.empty_like(far) for _ in range(world)]
    dist.all_gather(parts, far)
    joined = F.batch_norm(torch.cat(parts).double(), None, None, training=True)
    close(SyncBatchNorm(CHANNELS, affine=False)(far), joined[8 * rank : 8 * rank + 8], 1e-2)


@check
def groups(rank: int, world: int) -> None:
    with pytest.raises(ValueError):
        create_syncbn_process_group(world + 1)
    assert create_syncbn_process_group(0) is None
    whole, alone = create_syncbn_process_group(world), create_syncbn_process_group(1)
    assert dist.get_world_size(whole) == world and dist.get_world_size(alone) == 1
    xs = batches(world, (2,))
    compare(rank, xs, affine(SyncBatchNorm(CHANNELS, process_group=whole).double()))
    layer = SyncBatchNorm(CHANNELS).double()
    layer.process_group = alone
    close(layer(xs[rank]), F.batch_norm(xs[rank], None, None, training=True))
    twin = copy.deepcopy(SyncBatchNorm(CHANNELS, process_group=whole))
    assert twin.process_group is whole
    assert pickle.loads(pickle.dumps(twin)).process_group is None


@check
def converted_under_data_parallel(rank: int, world: int) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(
        nn.Conv2d(CHANNELS, 4, 1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 2, 1), nn.BatchNorm2d(2)
    )
    plain.double()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        converted = convert_syncbn_model(copy.deepcopy(plain))
    assert [w.category for w in seen] == ([DeprecatedFeatureWarning] if rank == 0 else [])
    model = DistributedDataParallel(converted, message_size=5, gradient_average=False)
    xs = batches(world, (2, 2))
    plain(torch.cat(xs)).pow(3).sum().backward()
    model(xs[rank]).pow(3).sum().backward()
    same([p.grad for p in model.parameters()], [p.grad for p in plain.parameters()], rtol=1e-9, atol=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("world", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_in_processes(world: int) -> None:
    CHECKS.run(world)


# -- in this process


def test_alone_it_is_plain_batch_norm() -> None:
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        for held in {dtype, torch.float32 if dtype.itemsize == 2 else dtype}:
            plain, layer = nn.BatchNorm2d(CHANNELS).to(torch.float64), SyncBatchNorm(CHANNELS).to(held)
            x = batches(1, (4, 4))[0].to(dtype)
            for training in (True, False):
                y = layer.train(training)(x)
                assert y.dtype == dtype
                close(y, plain.train(training)(x.double()), 5e-2)
            assert layer.running_mean.dtype == held
            assert layer.num_batches_tracked == 1
    last = SyncBatchNorm(CHANNELS, channel_last=True, fuse_relu=True).double()
    x = batches(1, (4, 4))[0]
    z = torch.ones(1, dtype=torch.float64).expand_as(x.movedim(1, -1))
    wanted = (F.batch_norm(x, None, None, training=True).movedim(1, -1) + 1).relu()
    close(last(x.movedim(1, -1), z), wanted)
    loose = SyncBatchNorm(CHANNELS, affine=False, track_running_stats=False).eval()
    close(loose(x.float()), F.batch_norm(x, None, None, training=True), 1e-4)


def test_what_cannot_be_normalised() -> None:
    layer = SyncBatchNorm(CHANNELS)
    for shape in ((CHANNELS,), (2, 4), (1, CHANNELS, 1, 1, 1, 1)):
        with pytest.raises(ValueError, match="channels along axis 1"):
            layer(torch.zeros(shape))
    layer.channel_last = True
    with pytest.raises(ValueError, match="last axis"):
        layer(torch.zeros(2, CHANNELS, 4))


def test_convert_keeps_everything() -> None:
    bn = nn.BatchNorm2d(4, eps=1e-3, momentum=None).half().eval()
    bn.weight.requires_grad_(False)
    bn.num_batches_tracked.fill_(7)
    calls = []
    bn.register_forward_hook(lambda *_: calls.append(1))
    instance = nn.InstanceNorm2d(4, affine=True)
    model = nn.ModuleDict(
        {"a": nn.Sequential(nn.Conv2d(3, 4, 1), bn), "again": bn, "i": instance, "t": nn.SyncBatchNorm(4)}
    )
    state = {k: v.clone() for k, v in model.state_dict().items()}
    converted = convert_syncbn_model(model, channel_last=True)
    made = converted["again"]
    assert converted is model and made is model["a"][1] and model["i"] is instance
    assert type(made) is SyncBatchNorm and type(model["t"]) is SyncBatchNorm
    assert (made.eps, made.momentum, made.training, made.channel_last) == (1e-3, None, False, True)
    assert made.weight is bn.weight and made.running_mean is bn.running_mean
    assert not made.weight.requires_grad and made.weight.dtype == torch.float16
    assert {k: v.tolist() for k, v in model.state_dict().items()} == {k: v.tolist() for k, v in state.items()}
    made(torch.zeros(2, 2, 2, 4).half())
    assert calls == [1]
    bn.weight = nn.Parameter(torch.ones(4))  # the old layer goes its own way
    assert made.weight is not bn.weight

    root = convert_syncbn_model(nn.BatchNorm1d(3, affine=False, track_running_stats=False))
    assert type(root) is SyncBatchNorm and root.weight is None and root.running_mean is None
    nothing = nn.Sequential(nn.Linear(1, 1), instance)
    assert convert_syncbn_model(nothing) is nothing
    assert convert_syncbn_model(root) is root and not root.channel_last


def test_names_resolve_to_one_class() -> None:
    assert sync_batchnorm.SyncBatchNorm is SyncBatchNorm
    assert issubclass(SyncBatchNorm, nn.modules.batchnorm._BatchNorm)
    with pytest.warns(DeprecatedFeatureWarning) as seen:
        convert_syncbn_model(nn.Sequential(nn.Sequential(nn.BatchNorm1d(2)), nn.BatchNorm1d(2)))
    assert len(seen) == 1 and seen[0].filename == __file__
