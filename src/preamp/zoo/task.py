"""What a task is: a network, its data, its loss and its metric, with a recipe per size.

A task knows nothing of precision. It builds a float32 model, hands out CPU batches and judges a function that
predicts; who trains wraps the model as they like.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import ClassVar

import torch
from torch import Tensor, nn

Batch = tuple[tuple[Tensor, ...], Tensor]
"""Model inputs and the target that belongs to them, on the CPU."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How a task is trained at one size: a OneCycle schedule of `steps` that peaks at `max_lr`.

    `clip`: the L2 norm to which gradients are clipped. `optimizer`: "AdamW" or "SGD" (momentum 0.9).
    """

    steps: int
    batch_size: int
    max_lr: float
    eval_batch_size: int
    weight_decay: float = 1e-2
    clip: float = 1.0
    optimizer: str = "AdamW"


class Task(ABC):
    """One network on one data set.

    Sizes are "ci" (seconds on a CPU) and "full" (minutes on a GPU). All methods raise `ValueError`
    for any other. Equal seeds give equal weights and equal batches, bit for bit, and no method draws from
    torch's global generator or leaves it changed.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    data: ClassVar[str]
    metric: ClassVar[str]
    sizes: ClassVar[tuple[str, ...]] = ("ci", "full")
    recipes: ClassVar[Mapping[str, Recipe]]
    quick_steps: ClassVar[Mapping[str, int]]

    def recipe(self, size: str, *, quick: bool = False) -> Recipe:
        """How to train at `size`; `quick` trains shorter, for a smoke test rather than for quality."""
        recipe = self.recipes[self._known(size)]
        return replace(recipe, steps=self.quick_steps[size]) if quick else recipe

    def build(self, size: str, *, seed: int) -> nn.Module:
        """A new float32 model in training mode, on the CPU unless a default device is in force.

        The weights depend on `seed` only.
        """
        self._known(size)
        with torch.random.fork_rng(devices=[]):
            # not torch.manual_seed: that would also reseed every CUDA device, which fork_rng does not restore here
            torch.default_generator.manual_seed(seed)
            return self._network(size)

    def batches(self, size: str, *, seed: int, steps: int, batch_size: int) -> Iterator[Batch]:
        """`steps` training batches of `batch_size` on the CPU, from a generator of their own."""
        self._known(size)
        return self._stream(size, torch.Generator().manual_seed(seed), steps, batch_size)

    @abstractmethod
    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        """The 0-d training loss of what the model gave, in whatever dtype plain torch functions give it."""

    def evaluate(self, predict: Callable[..., Tensor], size: str, *, device: torch.device) -> float:
        """The metric on the held-out split, in [0, 1], higher is better.

        `predict(*inputs)` is the model in eval mode; it is called under `torch.no_grad` with inputs on `device`.
        Outputs that are not finite count as wrong; they raise nothing.
        """
        with torch.no_grad():
            rows = [
                self._tally(predict(*(x.to(device) for x in inputs)).float(), target.to(device)).cpu()
                for inputs, target in _held_out(self, self._known(size))
            ]
        return self._score(torch.cat(rows).double())

    def _known(self, size: str) -> str:
        if size not in self.sizes:
            raise ValueError(f"task {self.name!r} has no size {size!r}; its sizes are {', '.join(self.sizes)}")
        return size

    @abstractmethod
    def _network(self, size: str) -> nn.Module:
        """The model, initialised from the global generator."""

    @abstractmethod
    def _stream(self, size: str, generator: torch.Generator, steps: int, batch_size: int) -> Iterator[Batch]:
        """Training batches, random by `generator` alone."""

    @abstractmethod
    def _held_out(self, size: str) -> Sequence[Batch]:
        """The same held-out batches every time."""

    @abstractmethod
    def _tally(self, output: Tensor, target: Tensor) -> Tensor:
        """What the metric needs of one batch: float32 rows of two numbers, on the batch's device."""

    def _score(self, rows: Tensor) -> float:
        """The metric of all rows, float64 (N, 2); unless overridden, the ratio of the columns' sums."""
        hits, total = rows.sum(0).tolist()
        return float(hits / total)


@lru_cache(maxsize=8)
def _held_out(task: Task, size: str) -> Sequence[Batch]:
    return task._held_out(size)


def shuffled(count: int, batch_size: int, steps: int, generator: torch.Generator) -> Iterator[Tensor]:
    """`steps` index batches, int64 (batch_size,), that walk through fresh permutations of range(count).

    A permutation's last batch is dropped when it would be short, so that every step has the same shape.
    """
    if batch_size > count:
        raise ValueError(f"a batch of {batch_size} cannot be drawn from {count} examples without repeats")
    done = 0
    while done < steps:
        order = torch.randperm(count, generator=generator, device="cpu")
        for start in range(0, count - batch_size + 1, batch_size):
            if done == steps:
                return
            yield order[start : start + batch_size]
            done += 1
