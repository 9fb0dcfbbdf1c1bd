"""What several processes do, in a group of one: over gloo on a CPU everywhere, over NCCL where there is a GPU.

One rank cannot disagree, so this is not about numbers; it is about orders, streams and waits: the collectives run on
the backend's own stream, and nothing on the host waits for them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import preamp

from ..session.toys import squares
from .training import no_waiting

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
LEVELS = ("O0", "O1", "O2", "O4", "O5")
CUDA_BACKEND = "nccl" if dist.is_nccl_available() else "pretend"
"""NCCL with a GPU; else the backend of `tests/pretend`, on the fake CUDA device."""


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> Iterator[str]:
    name: str = request.param
    if name == "cuda":
        torch.cuda.set_device(0)
    dist.init_process_group(CUDA_BACKEND if name == "cuda" else "gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield name
    finally:
        dist.destroy_process_group()


def network(device: str) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.LayerNorm(32), nn.GELU(), nn.Linear(32, 4)).to(device)


def train(session: preamp.Session, model: nn.Module, device: str, begin: int = 0, end: int = 12) -> None:
    """Steps of two micro-batches; the ninth has an infinity. From the seventh on clipping and step may not wait."""
    for step in range(begin, end):
        for half in range(2):
            generator = torch.Generator().manual_seed(2 * step + half)
            x = torch.randn(8, 16, generator=generator)
            x[0, 0] = torch.inf if step == 8 and half else x[0, 0]
            x = x.to(device)
            with session.no_sync(model) if half == 0 else contextlib.nullcontext():
                squares(session, model, x, sync=half == 1)
        with no_waiting() if step > 6 else contextlib.nullcontext():
            session.clip_grad_norm_(0.5)
            session.step()
            session.zero_grad()


def weights(model: nn.Module) -> list[Tensor]:
    return [(p.full_tensor() if hasattr(p, "full_tensor") else p).detach().clone() for p in model.parameters()]


def alone(level: str, device: str, kind: Any) -> list[Tensor]:
    model = network(device)
    return trained(preamp.prepare(model, kind(model.parameters(), 1e-2), level=level), model, device)


def trained(session: preamp.Session, model: nn.Module, device: str) -> list[Tensor]:
    """The weights after `train`, when the session is closed."""
    with session:
        train(session, model, device)
        assert session.skipped == 1
    return weights(model)


def check_alike(mine: list[Tensor], theirs: list[Tensor], *, exact: bool) -> None:
    for a, b in zip(mine, theirs, strict=True):
        assert torch.isfinite(a).all()
        torch.testing.assert_close(a, b, rtol=0 if exact else 2e-2, atol=0 if exact else 5e-3)


def fused_adam(parameters: Any, lr: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr, fused=True)


@pytest.mark.parametrize("kind", [fused_adam, preamp.optim.AdamW], ids=["torch", "preamp"])
@pytest.mark.parametrize("level", LEVELS)
def test_distributed_data_parallel(device: str, level: str, kind: Any) -> None:
    model = network(device)
    session = preamp.prepare(model, kind(model.parameters(), 1e-2), level=level)
    mine = trained(session, DistributedDataParallel(model), device)
    check_alike(mine, alone(level, device, kind), exact=device == "cpu")


@pytest.mark.parametrize("level", LEVELS)
def test_fully_sharded(device: str, level: str) -> None:
    policy = preamp.policy(level)
    model = network(device)
    fully_shard(model[1], mp_policy=policy.fsdp(full=True))
    fully_shard(model, mp_policy=policy.fsdp())
    session = preamp.prepare(model, preamp.optim.AdamW(model.parameters(), 1e-2), level=level)
    check_alike(trained(session, model, device), alone(level, device, preamp.optim.AdamW), exact=False)


@pytest.mark.parametrize("level", ["O1", "O5"])
def test_gradients_in_16_bits_on_the_wire(device: str, level: str) -> None:
    model = network(device)
    session = preamp.prepare(model, preamp.optim.SGD(model.parameters(), 1e-2), level=level)
    wrapped = DistributedDataParallel(model)
    wrapped.register_comm_hook(None, preamp.parallel.compress_hook())
    check_alike(trained(session, wrapped, device), alone(level, device, preamp.optim.SGD), exact=False)


@pytest.mark.parametrize("level", LEVELS)
def test_a_group_that_is_asked(device: str, level: str) -> None:
    model = network(device)
    optimizer = preamp.optim.AdamW(model.parameters(), 1e-2)
    session = preamp.prepare(model, optimizer, level=level, group=dist.group.WORLD)
    check_alike(trained(session, model, device), alone(level, device, preamp.optim.AdamW), exact=False)


def test_checkpoints(device: str, tmp_path: Path) -> None:
    policy = preamp.policy("O5")
    model = network(device)
    fully_shard(model, mp_policy=policy.fsdp())
    optimizer = preamp.optim.AdamW(model.parameters(), 1e-2)
    with preamp.prepare(model, optimizer, level="O5") as session:
        objects: dict[str, Any] = {"model": model, "optimizer": optimizer, "session": session}
        train(session, model, device, 0, 4)
        saved = weights(model)
        pending = preamp.checkpoint.save_sharded_async(tmp_path / "run", **objects)
        gathered = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        train(session, model, device, 4, 8)
        pending.result()
        preamp.checkpoint.load_sharded(tmp_path / "run", **objects)
        check_alike(weights(model), saved, exact=True)
        assert session.steps == 4
    check_alike([gathered[name].to(device) for name, _ in model.named_parameters()], saved, exact=True)


@pytest.mark.gpu
@pytest.mark.parametrize("level", ["O1", "O5"])
def test_a_captured_step_under_ddp(level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch asks: the wrapper made on a side stream, 11 warm-up steps, and no watchdog that looks at events."""
    monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
    torch.cuda.set_device(0)
    dist.init_process_group(CUDA_BACKEND, store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = network("cuda")
        session = preamp.prepare(model, preamp.optim.AdamW(model.parameters(), 1e-2), level=level)
        with torch.cuda.stream(torch.cuda.Stream()):
            wrapped = DistributedDataParallel(model)
        torch.cuda.synchronize()

        def step(x: Tensor) -> Tensor:
            loss = squares(session, wrapped, x)
            session.step()
            session.zero_grad()
            return loss.detach()

        captured = session.capture(step, warmup=11)
        x = torch.randn(8, 16, device="cuda")
        losses = torch.stack([captured(x).clone() for _ in range(40)])
        assert captured.captured
        assert losses[-1] < losses[0] and torch.isfinite(losses).all()
        session.close()
    finally:
        dist.destroy_process_group()


@pytest.mark.gpu
@pytest.mark.parametrize("level", ["O1", "O4"])
def test_data_parallel(level: str) -> None:
    """On one GPU the wrapper calls the model; on two it replicates it, and each thread enters the decorated forward."""
    count = min(torch.cuda.device_count(), 2)
    model = network("cuda")
    optimizer = preamp.optim.AdamW(model.parameters(), 1e-2)
    with preamp.prepare(model, optimizer, level=level) as session:

        class Within(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.net = model

            @session.autocast()
            def forward(self, x: Tensor) -> Tensor:
                result: Tensor = self.net(x)
                assert result.dtype is session.policy.compute
                return result.float()

        wrapped = nn.DataParallel(Within(), device_ids=list(range(count)))
        losses = []
        for _ in range(10):
            loss = wrapped(torch.ones(8, 16, device="cuda")).square().mean()
            session.backward(loss)
            session.step()
            session.zero_grad()
            losses.append(loss.item())
    assert losses[-1] < losses[0]
