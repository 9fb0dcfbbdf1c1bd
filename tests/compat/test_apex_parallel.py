"""apex.parallel over gloo: averages, dtypes, copies and refusals, compared with plain gradients."""

from __future__ import annotations

import copy
import inspect
import io
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from preamp.compat.apex import parallel
from preamp.compat.apex.parallel import DistributedDataParallel as DDP
from preamp.compat.apex.parallel import Reducer, SyncBatchNorm
from preamp.compat.apex.parallel import distributed as flat
from tests.compat.ranks import Checks, agree, batch, grads, net, reference, same

CHECKS = Checks()
check = CHECKS.add


@check
def parameters_come_from_rank_0_and_buffers_stay(rank: int, world: int) -> None:
    torch.manual_seed(10 + rank)
    module = nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.Linear(4, 4).half())
    module[0].to(memory_format=torch.channels_last)
    module[1].running_mean.fill_(rank)
    module[2].weight.requires_grad_(False)
    wrapped = DDP(module)
    assert wrapped.module is module
    assert all(key.startswith("module.") for key in wrapped.state_dict())
    for parameter in module.parameters():
        agree(parameter)
    assert module[1].running_mean.eq(rank).all()
    assert module[0].weight.is_contiguous(memory_format=torch.channels_last)


@check
def gradients_are_averaged(rank: int, world: int) -> None:
    wanted = reference(world)
    for options in (
        {},
        {"message_size": 1, "num_allreduce_streams": 2, "prof": True},
        {"delay_allreduce": True, "shared_param": False, "allreduce_communicators": ([None], [None])},
        {"gradient_predivide_factor": 4.0},
        {"retain_allreduce_buffers": True},
    ):
        model = DDP(net(), **options)
        for _ in range(3):
            model(batch(rank)).square().sum().backward()
            same(grads(model), wanted)
            model.zero_grad(set_to_none=options == {})


@check
def sum_predivision_and_float32_transport(rank: int, world: int) -> None:
    for factor in (1.0, 2.0):
        model = DDP(net(), gradient_average=False, gradient_predivide_factor=factor)
        model(batch(rank)).square().sum().backward()
        same(grads(model), reference(world, scale=1 / factor))
    for dtype in (torch.float16, torch.bfloat16):
        for always in (False, True):
            layer = nn.Linear(1, 1, bias=False).to(dtype)
            model = DDP(layer, allreduce_always_fp32=always, gradient_average=False)
            value = 1024.0 if rank == 0 else 0.25  # lost next to 1024 unless the sum is made in float32
            (model(torch.tensor([[value]], dtype=dtype)) * 1).sum().backward()
            assert layer.weight.grad is not None and layer.weight.grad.dtype == dtype
            wide = torch.tensor(1024 + 0.25 * (world - 1)).to(dtype)
            assert abs(float(layer.weight.grad) - float(wide)) <= (0 if always else 8)


@check
def predivision_saves_float16_from_overflow(rank: int, world: int) -> None:
    for factor, finite in ((1.0, False), (float(world), True)):
        layer = nn.Linear(1, 1, bias=False).half()
        DDP(layer, gradient_predivide_factor=factor)(torch.full((1, 1), 60000.0).half()).sum().backward()
        assert layer.weight.grad is not None
        assert bool(layer.weight.grad.isfinite().all()) is finite or world == 1


@check
def mixed_dtypes_under_a_replaced_forward(rank: int, world: int) -> None:
    torch.manual_seed(1)
    module = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))
    module[0].half()
    module[2].bfloat16()

    def forward(x: torch.Tensor) -> torch.Tensor:
        y = module[1](module[0](x.half()).float())
        return module[2](y.bfloat16()).float()

    module.forward = forward
    model = DDP(module)
    model(batch(rank).float()).square().sum().backward()
    for parameter in model.parameters():
        assert parameter.grad is not None and parameter.grad.dtype == parameter.dtype
        agree(parameter.grad.float())


@check
def copies_and_pickles_work(rank: int, world: int) -> None:
    wanted = reference(world)
    model = DDP(net(), message_size=10)
    model(batch(rank)).square().sum().backward()
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), torch.load(file, weights_only=False)):
        assert twin.message_size == 10
        assert list(twin.state_dict()) == list(model.state_dict())
        twin.zero_grad()
        twin(batch(rank)).square().sum().backward()
        same(grads(twin), wanted)
        same(grads(model), wanted)
    model.load_state_dict(twin.state_dict())


@check
def buffers_are_retained(rank: int, world: int) -> None:
    model = DDP(net(), retain_allreduce_buffers=True, message_size=20)
    assert model.allreduce_buffers == []
    for _ in range(2):
        model.zero_grad()
        model(batch(rank)).square().sum().backward()
        assert sum(buffer.numel() for buffer in model.allreduce_buffers) == sum(p.numel() for p in model.parameters())
        for buffer in model.allreduce_buffers:
            buffer.mul_(2)
        same(grads(model), [2 * g for g in reference(world)])
    half = DDP(
        net(dtype=torch.float16), retain_allreduce_buffers=True, allreduce_always_fp32=True, delay_allreduce=True
    )
    half(batch(rank).half()).square().sum().backward()
    (buffer,) = half.allreduce_buffers
    assert buffer.dtype == torch.float32
    assert all(p.grad is not None and p.grad.dtype == torch.float16 for p in half.parameters())


@check
def odd_models(rank: int, world: int) -> None:
    empty = DDP(nn.Tanh())
    x = batch(rank).requires_grad_()
    empty(x).sum().backward()
    frozen = DDP(net().requires_grad_(False))
    frozen(x).sum().backward()
    assert grads(frozen) == [None] * 6
    model = DDP(net(), message_size=10)
    model(batch(rank) * (float("nan") if rank == 0 else 1.0)).sum().backward()
    assert all(g is not None and g[..., 0].isnan().any() for g in grads(model)[:4])  # NaN everywhere, flags unharmed
    model.zero_grad()
    model.module.append(nn.Linear(2, 2).double())
    model(batch(rank)).square().sum().backward()
    for gradient in grads(model):
        assert gradient is not None
        agree(gradient)
    scalar = nn.Module()
    scalar.weight = nn.Parameter(torch.tensor(2.0))
    scalar.none = nn.Parameter(torch.zeros(0))
    scalar.forward = lambda y: (scalar.weight * y + scalar.none.sum(),)
    (out,) = DDP(scalar)(torch.tensor(float(rank)))
    out.backward()
    assert scalar.weight.grad is not None and float(scalar.weight.grad) == pytest.approx((world - 1) / 2)


@check
def what_cannot_work_says_so(rank: int, world: int) -> None:
    with pytest.raises(ValueError, match="different models"):
        DDP(nn.Linear(2, 2 + rank))
    with pytest.raises(ValueError, match="requires_grad"):
        DDP(nn.Linear(2, 2).requires_grad_(rank == 0))
    model = DDP(nn.Embedding(4, 2, sparse=True))
    with pytest.raises(ValueError, match="sparse=False"):
        model(torch.tensor([1])).sum().backward()


@check
def reducer_and_flat_calls(rank: int, world: int) -> None:
    torch.manual_seed(rank)
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).double(), nn.Linear(2, 2))
    reducer = Reducer(module)
    for parameter in module.parameters():
        agree(parameter)
    module[0].weight.grad = torch.full((2, 2), float(rank))
    if rank == 0:
        module[1].weight.grad = torch.full((2, 2), float(world)).double()
    reducer.reduce()
    assert module[0].weight.grad is not None and module[0].weight.grad.eq((world - 1) / 2).all()
    assert module[1].weight.grad is not None and module[1].weight.grad.eq(1).all()
    assert module[2].weight.grad is None
    tensors = [torch.full((2,), float(rank)), torch.full((3, 1), 2.0 * rank).half()]
    listed = Reducer([tensors[0], (tensors[1],)])
    assert len(listed.grads) == 2
    listed.reduce()
    assert tensors[0].eq((world - 1) / 2).all() and tensors[1].eq(world - 1).all()
    flat.flat_dist_call(tensors, dist.broadcast, (0,))
    flat.apply_flat_dist_call([torch.ones(2)], dist.all_reduce)


@pytest.mark.parametrize("world", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_in_processes(world: int) -> None:
    CHECKS.run(world)


# -- in this process


def test_without_a_process_group() -> None:
    for make in (DDP, Reducer, lambda module: parallel.create_syncbn_process_group(2)):
        with pytest.raises(RuntimeError, match="init_process_group"):
            make(nn.Linear(2, 2))
    assert parallel.create_syncbn_process_group(0) is None
    assert parallel.ReduceOp is dist.ReduceOp


def test_without_torch_distributed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_available", lambda: False)
    with pytest.raises(RuntimeError, match="process group"):
        DDP(net())
    assert SyncBatchNorm(4).double()(batch(0)).shape == (6, 4)


def test_arguments_keep_their_places() -> None:
    parameters = inspect.signature(DDP).parameters
    assert list(parameters) == [
        "module", "message_size", "delay_allreduce", "shared_param", "allreduce_trigger_params",
        "retain_allreduce_buffers", "allreduce_always_fp32", "num_allreduce_streams", "allreduce_communicators",
        "gradient_average", "gradient_predivide_factor", "gradient_average_split_factor", "prof",
    ]  # fmt: skip
    defaults = [10000000, False, None, None, False, False, 1, None, True, 1.0, None, False]
    assert [p.default for p in parameters.values()][1:] == defaults


def test_flat_helpers() -> None:
    tensors = [torch.ones(2, 2), torch.zeros(3), torch.tensor(4.0)]
    buffer = flat.flatten(tensors)
    assert buffer.tolist() == [1, 1, 1, 1, 0, 0, 0, 4]
    assert [t.shape for t in flat.unflatten(buffer, tensors)] == [t.shape for t in tensors]
    assert flat.unflatten(torch.zeros(0), []) == []
    mixed = [torch.ones(1), torch.ones(1).half(), torch.ones(1).double(), torch.ones(2)]
    assert [len(v) for v in flat.split_by_type(mixed).values()] == [2, 1, 1]


@pytest.mark.slow
def test_multiproc_starts_ranks_and_reports_failure(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import sys; print(' '.join(sys.argv[1:])); sys.exit(3 if '--fail' in sys.argv else 0)")
    command = [sys.executable, "-m", "preamp.compat.apex.parallel.multiproc"]
    environment = {k: v for k, v in os.environ.items() if k != "WORLD_SIZE"}

    def run(*arguments: str, **extra: str) -> subprocess.CompletedProcess[str]:
        env = {**environment, **extra}
        return subprocess.run([*command, *arguments], cwd=tmp_path, env=env, capture_output=True, text=True)

    first = run(str(script), "--lr", "1", "--rank", "7", WORLD_SIZE="2")
    assert (first.returncode, first.stdout.split()) == (0, ["--lr", "1", "--world-size", "2", "--rank", "0"])
    assert (tmp_path / "GPU_1.log").read_text().split() == ["--lr", "1", "--world-size", "2", "--rank", "1"]
    assert run(str(script), "--world-size=2", "--fail").returncode == 3
    assert "required: script" in run().stderr
