"""The largest batch, or the deepest network, that trains in a share of the device's memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from .._results import Row
from ._contenders import O2, O5_EIGHT, O5_SPLIT, REFERENCE, Contender, Trainer
from ._measure import Run, free_memory
from ._works import Work

SHARE = 0.25
"""Of the device's memory, what a contender may have: the search is then short, and the same on a small GPU."""

SEARCHED: tuple[Contender, ...] = (REFERENCE, O2, O5_SPLIT, O5_EIGHT)

NO_ENGINE = "unable to find an engine"
"""What torch says when no convolution of cuDNN's gets the memory it works in (pytorch/pytorch#108645)."""

Fits = Callable[[Contender, int], bool]
"""Whether a contender trains at a size."""


def largest(sizes: Sequence[int], fits: Callable[[int], bool]) -> int:
    """The largest of ascending `sizes` that fits, by bisection; 0 if none does."""
    low, high = -1, len(sizes)
    while high - low > 1:
        middle = (low + high) // 2
        if fits(sizes[middle]):
            low = middle
        else:
            high = middle
    return sizes[low] if low >= 0 else 0


def batch_row(
    run: Run, work: Work, sizes: Sequence[int], contenders: Sequence[Contender] = SEARCHED, fits: Fits | None = None
) -> Row:
    """The largest batch of each contender."""

    def make(contender: Contender, count: int) -> Trainer:
        return Trainer(contender, work, run.device, count=count)

    return _row(run, "largest batch", work, "batch", sizes, contenders, fits, make)


def net_row(
    run: Run, work: Work, count: int, sizes: Sequence[int], contenders: Sequence[Contender], fits: Fits | None = None
) -> Row:
    """The most layers of each contender in a work that has a `deeper`, and how many parameters they make.

    `count`: samples a batch, few, so that it is what belongs to parameters that fills the memory.
    """
    deeper = work.deeper
    assert deeper is not None

    def make(contender: Contender, layers: int) -> Trainer:
        return Trainer(contender, deeper(layers), run.device, count=count)

    row = _row(run, "larger net", work, "layers", sizes, contenders, fits, make)
    row.about["batch"] = count
    for each in row.contenders:
        if each.get("layers"):
            each["parameters"] = deeper(each["layers"]).parameters
    return row


def _row(
    run: Run, part: str, work: Work, what: str, sizes: Sequence[int], contenders: Sequence[Contender],
    fits: Fits | None, make: Callable[[Contender, int], Trainer],
) -> Row:  # fmt: skip
    """`what`: the key under which each contender has its largest size; `fits`: in place of trying."""
    name = f"{part}, {work.name}"
    if fits is None and run.device.type != "cuda":
        why = f"{run.device.type} memory has no limit that an allocator keeps; this takes a CUDA device"
        return Row(part=part, name=name, about={"not measured": why})
    by_name = {contender.name: contender for contender in contenders}

    def tried(contender: Contender, size: int) -> bool:
        return trains(partial(make, contender, size), run.device)

    def measure(who: str) -> dict[str, Any]:
        return {what: largest(sizes, partial(fits or tried, by_name[who]))}

    about: dict[str, Any] = {"sizes": list(sizes), "share": SHARE}
    results = run.each(by_name, measure, 5.0, about)
    said = f"the largest of {', '.join(map(str, sizes))} that trains in {SHARE:.0%} of the memory"
    return Row(part=part, name=name, what=said, contenders=results, about=about)


def trains(make: Callable[[], Trainer], device: torch.device) -> bool:
    """Whether what `make` makes takes two steps in `SHARE` of the device's memory."""
    trainer: Trainer | None = None
    fits = True
    try:
        with _limited(device):
            trainer = make()
            trainer.take_turn()
            for _ in range(2):
                trainer.step()
    except RuntimeError as error:
        if not isinstance(error, torch.OutOfMemoryError) and NO_ENGINE not in str(error):
            raise
        fits = False
    finally:
        if trainer is not None:
            trainer.close()
        del trainer
        free_memory()
    return fits


@contextmanager
def _limited(device: torch.device) -> Iterator[None]:
    """No longer than needed: closing a session with split masters takes memory for a moment."""
    if device.type != "cuda":
        yield
        return
    free_memory()
    # cuDNN's search for the quickest convolutions would take seconds at each size, and memory of its own
    searching, torch.backends.cudnn.benchmark = torch.backends.cudnn.benchmark, False
    torch.cuda.set_per_process_memory_fraction(SHARE, device)
    try:
        yield
        torch.cuda.synchronize(device)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, device)
        torch.backends.cudnn.benchmark = searching
