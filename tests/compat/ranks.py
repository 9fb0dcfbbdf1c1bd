"""Checks that run in real processes over gloo, and the small models they run on.

The processes of one world size are started once; they run every check in turn, each with models of its own, and
leave what went wrong in a file per rank.
"""

from __future__ import annotations

import json
import tempfile
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

from tests import forks

Check = Callable[[int, int], None]


class Checks(dict[str, Check]):
    def add(self, function: Check) -> Check:
        """A decorator."""
        self[function.__name__] = function
        return function

    def run(self, world: int) -> None:
        """All in one set of processes, which take longer to start than to run; fails with what the ranks say."""
        with tempfile.TemporaryDirectory() as folder:
            context = mp.start_processes(
                _process, (world, folder, self), nprocs=world, join=False, start_method=forks.METHOD
            )
            while not context.join(timeout=60):
                pass
            found = [json.loads(Path(folder, f"rank{rank}.json").read_text()) for rank in range(world)]
        texts = {name: "\n".join(rank.get(name, "not reached") for rank in found).strip() for name in self}
        assert not any(texts.values()), "\n".join(f"{name}: {text}" for name, text in texts.items() if text)


def _process(rank: int, world: int, folder: str, checks: dict[str, Check]) -> None:
    warnings.simplefilter("error")
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=world, timeout=timedelta(seconds=20)
    )
    results = {}
    for name, function in checks.items():
        torch.manual_seed(0)
        try:
            function(rank, world)
            dist.barrier()
            results[name] = ""
        except Exception:
            results[name] = f"rank {rank} of {world}: {traceback.format_exc()}"
            break  # the ranks are no longer in step
    Path(folder, f"rank{rank}.json").write_text(json.dumps(results))
    if all(not text for text in results.values()):
        dist.destroy_process_group()


# -- models and references


def net(*, dtype: torch.dtype = torch.float64) -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3), nn.Tanh(), nn.Linear(3, 2)).to(dtype)


def batch(rank: int, *, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(6, 4, generator=torch.Generator().manual_seed(100 + rank), dtype=torch.float64).to(dtype)


def grads(module: nn.Module) -> list[torch.Tensor | None]:
    return [None if p.grad is None else p.grad.detach().clone() for p in module.parameters()]


def plain_grads(losses: list[torch.Tensor], model: nn.Module, scale: float) -> list[torch.Tensor]:
    model.zero_grad()
    (sum(losses) * scale).backward()
    return [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]


def reference(world: int, *, scale: float | None = None) -> list[torch.Tensor]:
    model = net()
    return plain_grads([model(batch(r)).square().sum() for r in range(world)], model, scale or 1 / world)


def same(seen: list[torch.Tensor | None], wanted: list[torch.Tensor], **tolerance: float) -> None:
    for got, want in zip(seen, wanted, strict=True):
        assert got is not None
        torch.testing.assert_close(got.double(), want.double(), **(tolerance or {"rtol": 1e-12, "atol": 1e-12}))


def agree(tensor: torch.Tensor) -> None:
    """The ranks hold bitwise the same."""
    others = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(others, tensor.detach().contiguous())
    assert all(torch.equal(other, others[0]) for other in others)
