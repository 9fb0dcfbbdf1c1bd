"""What happens between two steps: unused and frozen parameters, several passes, nested and broken backwards."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from preamp.compat.apex.parallel import DistributedDataParallel as DDP
from preamp.compat.apex.parallel import SyncBatchNorm
from tests.compat.ranks import Checks, batch, grads, net, plain_grads, reference, same

CHECKS = Checks()
check = CHECKS.add


class Branches(nn.Module):
    """A trunk, a branch per rank, and a branch that nobody takes."""

    def __init__(self, world: int) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.branches = nn.ModuleList(nn.Linear(3, 1) for _ in range(world + 1))
        self.trunk = nn.Linear(4, 3)
        self.double()

    def forward(self, x: torch.Tensor, branch: int) -> dict[str, torch.Tensor]:
        return {"y": self.branches[branch](self.trunk(x))}


def count_ranks_in_backward(_: nn.Module, __: object, output: torch.Tensor) -> None:
    """A collective of somebody else in the default group."""

    def count(gradient: torch.Tensor) -> None:
        ranks = gradient.new_ones(1)
        dist.all_reduce(ranks)
        assert ranks == dist.get_world_size()

    output.register_hook(count)


@check
def ranks_may_use_different_parameters(rank: int, world: int) -> None:
    plain = Branches(world)
    wanted = plain_grads([plain(batch(r), r)["y"].square().sum() for r in range(world)], plain, 1 / world)
    model = DDP(Branches(world))
    model.module.trunk.register_forward_hook(count_ranks_in_backward)
    for repeat in (1, 2, 3):  # gradients add up over the passes
        model(batch(rank), rank)["y"].square().sum().backward()
        same(grads(model)[:-4] + grads(model)[-2:], [g * repeat for g in wanted[:-4] + wanted[-2:]])
        assert all(p.grad is None for p in model.module.branches[world].parameters())


@check
def accumulation_without_and_with_reduction(rank: int, world: int) -> None:
    wanted = reference(world)
    model = DDP(net())
    model.disable_allreduce()
    model(batch(rank)).square().sum().backward()
    plain = net()
    same(grads(model), plain_grads([plain(batch(rank)).square().sum()], plain, 1.0))
    model.enable_allreduce()
    model(batch(rank)).square().sum().backward()
    same(grads(model), [2 * g for g in wanted])
    model(batch(rank)).square().sum().backward()  # on top of what is averaged already
    same(grads(model), [3 * g for g in wanted])

    branches, single = DDP(Branches(world)), Branches(world)
    branches.disable_allreduce()
    branches(batch(rank), rank)["y"].sum().backward()
    branches.enable_allreduce()
    branches(batch(rank), world)["y"].sum().backward()  # not the branch in which gradients wait
    losses = [single(batch(r), b)["y"].sum() for r in range(world) for b in (r, world)]
    same(grads(branches), plain_grads(losses, single, 1 / world))


@check
def forwards_and_backwards_in_any_order(rank: int, world: int) -> None:
    wanted = reference(world)
    model = DDP(net())
    first, second = model(batch(rank)).square().sum(), model(batch(rank)).square().sum()
    second.backward()
    first.backward(retain_graph=True)
    same(grads(model), [2 * g for g in wanted])
    first.backward()
    same(grads(model), [3 * g for g in wanted])
    model.zero_grad(set_to_none=False)
    (model(batch(rank)).square().sum() + model(batch(rank)).square().sum()).backward()
    same(grads(model), [2 * g for g in wanted])
    model.module.zero_grad()
    model.module(batch(rank)).square().sum().backward()  # past the wrapper
    same(grads(model), wanted)
    with torch.no_grad():
        model(batch(rank))
    if rank == 0:  # only rank 0 looks at something
        model.eval()
        x = batch(rank).requires_grad_()
        torch.autograd.grad(model(x).sum(), x)
        with torch.no_grad():
            model(batch(rank))
        model.train()
    model.zero_grad()
    model(batch(rank)).square().sum().backward()
    same(grads(model), wanted)


@check
def layers_are_frozen_and_thawed(rank: int, world: int) -> None:
    wanted = reference(world)
    model = DDP(net())
    for frozen in ([], [0], [0, 2], [2], [], [0], []):
        for number, layer in enumerate(model.module):
            layer.requires_grad_(number not in frozen)
        for _ in range(2):
            model.zero_grad()
            model(batch(rank)).square().sum().backward()
            for (name, p), want in zip(model.module.named_parameters(), wanted, strict=True):
                if int(name[0]) in frozen:
                    assert p.grad is None
                else:
                    same([p.grad], [want])


class Fuse(nn.Module):
    """Lets its input through; backward raises when armed."""

    armed = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * 1

        def burn(_: torch.Tensor) -> None:
            if self.armed:
                raise ArithmeticError("boom")

        x.register_hook(burn)
        return x


@check
def a_backward_that_raises_on_all_ranks_is_survived(rank: int, world: int) -> None:
    wanted = reference(world)
    for place in (3, 5):  # between the layers, and before any gradient
        fuse = Fuse()
        model = DDP(nn.Sequential(*net()[:place], fuse, *net()[place:], Fuse()))
        for _ in range(2):
            kept = model(batch(rank)).square().sum()
            fuse.armed = True
            with pytest.raises(ArithmeticError):
                model(batch(rank)).square().sum().backward(retain_graph=True)
            fuse.armed = False
            model.zero_grad()
            kept.backward()
            same(grads(model), wanted)
            model.zero_grad()


@check
def reentrant_checkpoints(rank: int, world: int) -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = net()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = checkpoint(self.body[:2], x, use_reentrant=True)
            return self.body[4](checkpoint(self.body[2:4], x, use_reentrant=True))

    sent = []
    send = dist.all_reduce
    model = DDP(Checkpointed())
    dist.all_reduce = lambda *a, **k: (sent.append(1), send(*a, **k))[1]
    try:
        for _ in range(2):
            model.zero_grad()
            model(batch(rank).requires_grad_()).square().sum().backward()
            same(grads(model), reference(world))
    finally:
        dist.all_reduce = send
    assert len(sent) == 4  # what is there, and the gradients, once for each outer backward


@pytest.mark.slow
@pytest.mark.parametrize("world", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_in_processes(world: int) -> None:
    CHECKS.run(world)


def test_a_world_of_one(tmp_path: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    try:
        for factor in (1.0, 4.0):
            model = DDP(net(), gradient_predivide_factor=factor)
            model(batch(0)).square().sum().backward()
            same(grads(model), reference(1))
        layer = SyncBatchNorm(4).double()
        assert torch.equal(layer(batch(0)), nn.BatchNorm1d(4).double()(batch(0)))
    finally:
        dist.destroy_process_group()
    state = pickle.dumps(model)
    model(batch(0)).sum().backward()  # what is left of a closed group is a plain module
    pickle.loads(state)(batch(0)).sum().backward()
