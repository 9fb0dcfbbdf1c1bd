"""Threads that train at once: the doctor follows one, and leaves to the others what they train."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import preamp


class Spied(nn.Parameter):
    """Notes the threads that ask for its gradient."""

    asked: set[int]

    @property
    def grad(self) -> Tensor | None:  # type: ignore[override]
        self.asked.add(threading.get_ident())
        return torch.Tensor.grad.__get__(self)  # type: ignore[attr-defined,no-any-return]

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        torch.Tensor.grad.__set__(self, value)  # type: ignore[attr-defined]


class Other(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = Spied(torch.randn(8, 8))
        self.weight.asked = set()

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


def training(model: nn.Module, turns: threading.Barrier, steps: int = 4) -> Callable[[], None]:
    """Steps of a model; all threads wait for each other after each pass, each backward pass and each step."""

    def run() -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for step in range(steps):
            with torch.autocast("cpu", torch.bfloat16):
                loss = model(torch.randn(4, 8)).float().square().mean()
            turns.wait()
            loss.backward()
            turns.wait()
            optimizer.step()
            turns.wait()
            if step == 0 and isinstance(model, Other):
                model.weight.asked.clear()  # that two train was not known before
            turns.wait()
            optimizer.zero_grad()

    return run


def run_in_threads(*targets: Callable[[], None]) -> list[threading.Thread]:
    threads = [threading.Thread(target=target) for target in targets]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return threads


@pytest.mark.parametrize("known", [True, False], ids=["one of two", "both"])
def test_of_two_threads_that_train_one_is_followed(known: bool) -> None:
    """An interpreter crashed: a gradient was freed by its thread while the doctor read it."""
    model, other, turns = nn.Linear(8, 8), Other(), threading.Barrier(2, timeout=60)
    with preamp.doctor.watch([model] if known else [model, other], every=1) as seen:
        _, second = run_in_threads(training(model, turns), training(other, turns))
    verdict = seen.report().verdict
    assert "in one thread of several that train" in verdict and " 4 steps" in verdict
    assert "100% of the products in 16 bits" in verdict
    assert other.weight.asked == {second.ident}


def test_threads_that_train_one_after_the_other_are_all_followed() -> None:
    models, turns = [nn.Linear(8, 8) for _ in range(3)], threading.Barrier(1)
    with preamp.doctor.watch(models, every=1) as seen:
        for model in models:
            run_in_threads(training(model, turns))
    verdict = seen.report().verdict
    assert " 12 steps" in verdict and "several that train" not in verdict


def test_a_model_that_ran_in_another_thread_first_is_followed_where_it_is_trained() -> None:
    model, turns = nn.Linear(8, 8), threading.Barrier(1)
    with preamp.doctor.watch(model, every=1) as seen:
        model(torch.randn(1, 8))
        run_in_threads(training(model, turns))
    verdict = seen.report().verdict
    assert " 4 steps" in verdict and "100% of the products in 16 bits" in verdict
