"""Replicas in threads: what nn.DataParallel does to a prepared model, as far as a CPU can show it.

torch.nn.parallel.parallel_apply hands its threads a plain autocast region of the accelerator, and refuses to run
without one. Neither the dtype of a region nor preamp's rules go from one thread to another, so a replica has to enter
a region of its own: `session.autocast()` as a decorator of forward.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..rows import over
from .runs import LEVELS, LOW, OUTPUT, Net, batch, check_same, prepared, reference, train


def in_threads(calls: list[Callable[[], Any]]) -> list[Any]:
    """Results of functions that run at the same time, each in a thread of its own."""
    results: list[Any] = [None] * len(calls)
    start = threading.Barrier(len(calls))

    def work(i: int) -> None:
        start.wait()
        try:
            results[i] = calls[i]()
        except Exception as error:
            results[i] = error

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def replica(model: nn.Module) -> nn.Module:
    """As torch.nn.parallel.replicate makes them: modules without parameters, which hold differentiable copies."""
    copies = {module: module._replicate_for_data_parallel() for module in model.modules()}
    for module, copied in copies.items():
        for key, child in module._modules.items():
            copied._modules[key] = None if child is None else copies[child]
        for key, parameter in module._parameters.items():
            copied._parameters.pop(key, None)
            setattr(copied, key, None if parameter is None else parameter.clone())
    return copies[model]


@pytest.mark.parametrize("level", LEVELS)
def test_replicas_in_threads_train_as_the_whole_batch(level: str) -> None:
    """Forward passes of two replicas at once, each in a region of its own, and one backward pass through both."""

    def step(parallel: bool) -> tuple[list[Tensor], Tensor]:
        model, (x, y) = Net(), batch(0)
        with prepared(model, level) as session:
            if parallel:
                forward = [session.autocast()(replica(model).forward) for _ in range(2)]
                halves = in_threads([lambda f=f, p=p: f(p) for f, p in zip(forward, x.chunk(2), strict=True)])  # type: ignore[misc]
            else:
                with session.autocast():
                    halves = [model(part) for part in x.chunk(2)]
            assert [half.dtype for half in halves] == [OUTPUT[level]] * 2
            with session.autocast():
                loss = F.cross_entropy(torch.cat(halves), y)
            session.backward(loss)
            grads = [p.grad.clone() for p in model.parameters() if p.grad is not None]
            assert not session.step().skipped
            return grads, loss.detach()

    (ours, our_loss), (theirs, their_loss) = step(True), step(False)
    assert torch.equal(our_loss, their_loss) and len(ours) == len(theirs)
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.dtype is other.dtype
        assert (mine - other).float().norm() <= 8 * torch.finfo(LOW[level]).eps * other.float().norm() + 1e-6


@pytest.mark.skipif(torch.cuda.is_available(), reason="nn.DataParallel moves the model to the GPU")
@over(level=LEVELS, when=["before", "after"])
def test_data_parallel_on_a_cpu_is_the_model(level: str, when: str) -> None:
    """Without accelerators nn.DataParallel calls the model it wraps."""
    ours = train(level, nn.DataParallel(Net())) if when == "before" else train(level, after=nn.DataParallel)
    check_same(ours, reference(level))
