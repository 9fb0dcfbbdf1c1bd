"""What is measured of networks in training: time and memory of steps, losses, the largest batch."""

from __future__ import annotations

import statistics
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from preamp.machine import seconds_now

from .counting import launches
from .harness import Setting
from .race import Entry, Step, free_memory, race
from .trainers import Contender, Trainer, entry, turn
from .works import Work, works

Contenders = Sequence[Contender]

# -- whole steps: time, peak memory, host syncs and kernels

STEPS, SECONDS = 10, 0.6  # of a turn: at most so many steps, in about so many seconds


def steps(name: str, contenders: Contenders, setting: Setting) -> dict[str, Any]:
    """A row: a work trained by every contender, in turns."""
    work, device = works(setting.tiny)[name], setting.device
    if any(contender.compiled for contender in contenders):
        torch.compiler.reset()  # entries of other works would be looked through at every call
    backend = "eager" if setting.tiny else "inductor"
    captured = {contender.name for contender in contenders if contender.captured}

    def begin(one: Entry) -> None:
        if device.type == "cuda":
            torch.ones(8, 8, device=device) @ torch.ones(8, 8, device=device)  # cuBLAS's workspace is no contender's
            torch.cuda.synchronize(device)
            torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
        one.begin(warm=0)
        took = _warm_up(one.step, device)
        one.number = 2 if setting.tiny else max(2, min(STEPS, int(SECONDS / took)))
        if device.type == "cuda":
            if one.name not in captured:  # a graph's memory was taken while it was captured
                torch.cuda.reset_peak_memory_stats(device)
                one.step()
                one.step()
            torch.cuda.synchronize(device)
            one.found["peak bytes"] = torch.cuda.max_memory_allocated(device) - before
            one.found |= {"waits": _waits(one.step), "launches": launches(one.step)}

    entries = [entry(contender, work, device, backend) for contender in contenders]
    return {"contenders": race(entries, setting, begin)}


def _warm_up(step: Step, device: torch.device) -> float:
    """The seconds of a step when what is done in the first ones only, as compiling and capturing, is behind."""
    times = []
    for _ in range(8):
        started = seconds_now(device)
        step()
        times.append(seconds_now(device) - started)
    return min(times)


def _waits(step: Step, count: int = 3) -> float:
    """How often a step has the host wait for the device."""
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(count):
                step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return sum("called a synchronizing" in str(warning.message) for warning in caught) / count


# -- losses: does training arrive where float32 arrives?

SEED = "fp32, another seed"  # how much a seed changes
TRAINED, TAIL, SETTLED = 100, 20, 50
"""Steps; those at the end whose mean loss is the final one; those after which a scale should have found its place."""


def losses(name: str, contenders: Contenders, setting: Setting) -> dict[str, Any]:
    """A row: final losses by contender, same seed and data, the first being float32; and float32 with another seed."""
    work, count = works(setting.tiny)[name], 6 if setting.tiny else TRAINED
    runs = [(contender.name, contender, 0) for contender in contenders]
    runs.insert(1, (SEED, contenders[0], 1))
    found = _each(setting, {who: partial(_train, how, work, setting.device, count, seed) for who, how, seed in runs})
    if full := found[0].get("loss"):
        for one in found:
            one |= {"against fp32": one["loss"] / full - 1} if "loss" in one else {}
    return {"steps": count, "settled after": SETTLED, "contenders": found}


def _each(setting: Setting, makers: dict[str, Callable[[], dict[str, Any]]]) -> list[dict[str, Any]]:
    """What each finds, or the error that ended it."""
    results: list[dict[str, Any]] = []
    for name, make in makers.items():
        try:
            results.append({"name": name, **make()})
        except Exception as error:
            results.append({"name": name, "error": setting.failed(name, error)})
        free_memory()
    return results


def _train(contender: Contender, work: Work, device: torch.device, count: int, seed: int) -> dict[str, Any]:
    trainer = Trainer(contender, work, device, seed=seed)
    found, skips, scale = [], [], 1.0
    try:
        with turn(contender, device):
            for index in range(count):
                found.append(trainer.train(*trainer.data(index)))
                report, before = trainer.session and trainer.session.last_step, scale
                scale = report.scale if report else trainer.scaler.get_scale()
                if report.skipped if report else scale < before:
                    skips.append(index)
            values = torch.stack(found).float().tolist()
    finally:
        trainer.close()
    return {"loss": statistics.fmean(values[-TAIL:]), "skips": skips, "last scale": scale, "losses": values}


# -- memory: the largest batch that trains in a share of the device's

SHARE = 0.25  # what a contender may have: the search is then short, and the same on a small GPU
PROBED = 15  # sizes, so that four tries decide
NO_ENGINE = "unable to find an engine"
"""What torch says when no convolution of cuDNN's gets the memory it works in (pytorch/pytorch#108645)."""


def memory(name: str, contenders: Contenders, setting: Setting) -> dict[str, Any]:
    """A row: the largest batch of each contender."""
    work = works(setting.tiny)[name]
    if setting.device.type != "cuda":
        return {"not measured": "no allocator keeps a limit in a CPU's memory; this takes a CUDA device"}
    sizes = [place * (1 if setting.tiny else work.apart) for place in range(1, PROBED + 1)]

    def search(contender: Contender) -> dict[str, Any]:
        return {"batch": largest(sizes, lambda size: trains(contender, work, size, setting.device))}

    found = _each(setting, {contender.name: partial(search, contender) for contender in contenders})
    return {"sizes": sizes, "share": SHARE, "contenders": found}


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


def trains(contender: Contender, work: Work, count: int, device: torch.device) -> bool:
    """Whether a contender takes two steps with `count` samples in `SHARE` of the device's memory."""
    trainer: Trainer | None = None
    fits = True
    try:
        with _limited(device), turn(contender, device):
            trainer = Trainer(contender, work, device, count=count)
            trainer.step()
            trainer.step()
    except RuntimeError as error:
        if not isinstance(error, torch.OutOfMemoryError) and NO_ENGINE not in str(error):
            raise
        fits = False  # returned below, when the error holds no frames and their tensors any more
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
