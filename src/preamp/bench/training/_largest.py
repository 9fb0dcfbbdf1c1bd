"""The largest batch, or the deepest network, that trains in a share of the device's memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch

from .._results import failure
from ._contenders import O2, O5_EIGHT, O5_SPLIT, REFERENCE, Contender, Trainer
from ._measure import Clock, Tell, free, quiet
from ._rows import TrainingRow
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
    work: Work, device: torch.device, clock: Clock, sizes: Sequence[int], contenders: Sequence[Contender] = SEARCHED,
    tell: Tell = quiet, fits: Fits | None = None,
) -> TrainingRow:  # fmt: skip
    """The largest batch of each contender."""

    def make(contender: Contender, count: int) -> Trainer:
        return Trainer(contender, work, device, count=count)

    name = f"largest batch, {work.name}"
    return _row("largest batch", name, "batch", contenders, sizes, fits or _on(device, make), device, clock, tell)


def net_row(
    work: Work, count: int, device: torch.device, clock: Clock, sizes: Sequence[int], contenders: Sequence[Contender],
    tell: Tell = quiet, fits: Fits | None = None,
) -> TrainingRow:  # fmt: skip
    """The most layers of each contender in a work that has a `deeper`, and how many parameters they make.

    `count`: samples a batch, few, so that it is what belongs to parameters that fills the memory.
    """
    deeper = work.deeper
    assert deeper is not None

    def make(contender: Contender, layers: int) -> Trainer:
        return Trainer(contender, deeper(layers), device, count=count)

    name = f"larger net, {work.name}"
    row = _row("larger net", name, "layers", contenders, sizes, fits or _on(device, make), device, clock, tell)
    row.about["batch"] = count
    for each in row.contenders:
        if each.get("layers"):
            each["parameters"] = deeper(each["layers"]).parameters
    return row


def _row(
    part: str, name: str, what: str, contenders: Sequence[Contender], sizes: Sequence[int], fits: Fits | None,
    device: torch.device, clock: Clock, tell: Tell,
) -> TrainingRow:  # fmt: skip
    """`what`: the key under which each contender has its largest size."""
    if fits is None:
        why = f"{device.type} memory has no limit that an allocator keeps; this takes a CUDA device"
        return TrainingRow(part=part, name=name, about={"not measured": why})
    results: list[dict[str, object]] = []
    about: dict[str, object] = {"sizes": list(sizes), "share": SHARE}
    for contender in contenders:
        if clock.left <= 5:
            about["cut short"] = f"left out: {clock.spent}"
            results.append({"name": contender.name, "error": about["cut short"]})
            continue
        try:
            results.append({"name": contender.name, what: largest(sizes, partial(fits, contender))})
        except Exception as error:
            results.append({"name": contender.name, "error": failure(contender.name, error, tell)})
    said = f"the largest of {', '.join(map(str, sizes))} that trains in {SHARE:.0%} of the memory"
    return TrainingRow(part=part, name=name, what=said, contenders=results, about=about)


def _on(device: torch.device, make: Callable[[Contender, int], Trainer]) -> Fits | None:
    """By trying; None where memory has no limit."""
    if device.type != "cuda":
        return None
    return lambda contender, size: trains(partial(make, contender, size), device)


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
        free()
    return fits


@contextmanager
def _limited(device: torch.device) -> Iterator[None]:
    """No longer than needed: closing a session with split masters takes memory for a moment."""
    if device.type != "cuda":
        yield
        return
    free()
    # cuDNN's search for the quickest convolutions would take seconds at each size, and memory of its own
    searching, torch.backends.cudnn.benchmark = torch.backends.cudnn.benchmark, False
    torch.cuda.set_per_process_memory_fraction(SHARE, device)
    try:
        yield
        torch.cuda.synchronize(device)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, device)
        torch.backends.cudnn.benchmark = searching
