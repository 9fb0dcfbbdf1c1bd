"""Measuring contenders that take turns: time by device events, memory, host syncs, kernels; and the suite's clock."""

from __future__ import annotations

import contextlib
import gc
import itertools
import statistics
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ...autocast import REGISTRY
from .._counting import counted_launches
from .._machine import seconds_now
from .._race import spread
from .._results import Row, failure
from ._contenders import Contender, Trainer
from ._works import Work

Tell = Callable[[str], None]


def quiet(what: str) -> None:
    """Report nothing."""


class Clock:
    """The time that a suite has, in seconds. `now` gives the present one."""

    def __init__(self, budget: float, now: Callable[[], float] = time.monotonic) -> None:
        self.budget, self._now = budget, now
        self._started = now()

    @property
    def used(self) -> float:
        """Seconds since the start."""
        return self._now() - self._started

    @property
    def left(self) -> float:
        """Seconds until the end."""
        return self.budget - self.used

    @property
    def spent(self) -> str:
        """How much was used, in words."""
        return f"{self.used:.0f} s of {self.budget:.0f} s were used"


@dataclass(frozen=True, kw_only=True)
class Pace:
    """How long contenders are measured: `rounds` turns each, of up to `steps` steps but `seconds` at the most."""

    rounds: int
    steps: int
    seconds: float
    warm_up: int
    backend: str = "inductor"
    """torch.compile's."""


@dataclass(frozen=True, kw_only=True)
class Speeds:
    """What the machine does at best: bytes copied (read and written) and bfloat16 operations, a second."""

    copy: float
    product: float

    def share(self, work: Work, seconds: float) -> float:
        """How much of a step's time its products, or the least traffic of its optimizer, would take at best."""
        return max(work.flop() / self.product, 30 * work.parameters / self.copy) / seconds


@dataclass(kw_only=True)
class Run:
    """One call of a suite: where, how long, and whom to report to."""

    device: torch.device
    pace: Pace
    clock: Clock
    tell: Tell = quiet
    speeds: Speeds | None = None
    """Of the machine, once they are measured."""

    def each(
        self, names: Iterable[str], measure: Callable[[str], dict[str, Any]], reserve: float, about: dict[str, Any]
    ) -> list[dict[str, Any]]:
        """What `measure` finds of each name, or why not: it failed, or no more than `reserve` seconds are left."""
        results = []
        for name in names:
            if self.clock.left <= reserve:
                about["cut short"] = f"left out: {self.clock.spent}"
                results.append({"name": name, "error": about["cut short"]})
                continue
            try:
                results.append({"name": name, **measure(name)})
            except Exception as error:
                results.append({"name": name, "error": failure(name, error, self.tell)})
            free_memory()
        return results


@dataclass
class _Entry:
    contender: Contender
    trainer: Trainer | None = None
    steps: int = 0
    rounds: list[list[float]] = field(default_factory=list)
    found: dict[str, Any] = field(default_factory=dict)
    error: str | None = None


def steps_row(
    run: Run, part: str, work: Work, contenders: Sequence[Contender], reserve: float = 0.0, name: str | None = None
) -> Row:
    """Train a work by every contender, by turns; the first one is the reference.

    One that fails is reported as failed, and one that would start when no more than `reserve` seconds are left as left
    out. Those of torch run without preamp's operator rules in the dispatcher.
    """
    if any(contender.compiled for contender in contenders):
        torch.compiler.reset()  # entries of other works would be looked through at every call
    entries = [_Entry(contender) for contender in contenders]
    about: dict[str, Any] = {"parameters": work.parameters, "flop": work.flop()}
    try:
        for entry in entries:
            if run.clock.left <= reserve:
                entry.error = about["cut short"] = f"left out: {run.clock.spent}"
            else:
                with _turn(entry, work, run.tell):
                    _begin(entry, work, run)
        for index in range(run.pace.rounds):
            if index and run.clock.left <= reserve / 2:
                about["cut short"] = f"{index} of {run.pace.rounds} rounds: {run.clock.spent}"
                break
            for entry in entries if index % 2 == 0 else entries[::-1]:
                if entry.trainer is not None:
                    with _turn(entry, work, run.tell):
                        entry.rounds.append(_round(entry, run.device))
    finally:
        for entry in entries:
            _end(entry)
        free_memory()
    reference = entries[0]
    results = [_result(entry, reference, work, run.speeds) for entry in entries]
    return Row(part=part, name=name or work.name, what=work.what, contenders=results, about=about)


@contextlib.contextmanager
def _turn(entry: _Entry, work: Work, tell: Tell) -> Iterator[None]:
    """Whatever goes wrong inside is the entry's error, reported at once; it gets no further turn."""
    away = contextlib.nullcontext() if entry.contender.ours else REGISTRY.away()  # torch's pay for no rules
    try:
        with away:
            yield
    except Exception as error:
        entry.error = failure(f"{work.name}: {entry.contender.name}", error, tell)
    if entry.error:
        _end(entry)
        free_memory()
        if entry.contender.captured:
            _reset_generator()


def _reset_generator() -> None:
    """Random numbers work again on the device after a capture that broke off, which leaves its generator at it."""
    if torch.cuda.is_available():
        fresh = torch.Generator("cuda")
        generator: Any = torch.cuda.default_generators[torch.cuda.current_device()]
        generator.graphsafe_set_state(fresh.graphsafe_get_state())


def _begin(entry: _Entry, work: Work, run: Run) -> None:
    """Make the trainer, warm it up, and measure what needs no race: memory, host syncs, kernels."""
    device, pace, before = run.device, run.pace, _allocated(run.device)
    trainer = entry.trainer = Trainer(entry.contender, work, device, backend=pace.backend)
    trainer.take_turn()
    took = warm_up(trainer, device, pace.warm_up)
    entry.steps = max(2, min(pace.steps, int(pace.seconds / took)))
    if device.type != "cuda":
        return
    if not entry.contender.captured:  # a graph's memory was taken while it was captured
        torch.cuda.reset_peak_memory_stats(device)
        for _ in range(2):
            trainer.step()
    torch.cuda.synchronize(device)
    entry.found["peak bytes"] = torch.cuda.max_memory_allocated(device) - before
    entry.found |= host_syncs(trainer, run.tell)
    entry.found |= counted_launches(trainer.step)


def _allocated(device: torch.device) -> int:
    if device.type != "cuda":
        return 0
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    return torch.cuda.memory_allocated(device)


def warm_up(trainer: Trainer, device: torch.device, fewest: int) -> float:
    """Take steps until two in a row take about the same time (compiling and capturing take steps too); that time."""
    times: list[float] = []
    while len(times) < fewest or (len(times) < 4 * fewest and abs(times[-1] / times[-2] - 1) > 0.25):
        started = seconds_now(device)
        trainer.step()
        times.append(seconds_now(device) - started)
    return min(times)


def host_syncs(trainer: Trainer, tell: Tell = quiet, steps: int = 3) -> dict[str, Any]:
    """The host syncs of a step. preamp's steps first run with host syncs forbidden, so that an error shows where."""
    found: dict[str, Any] = {}
    try:
        if trainer.contender.ours:
            torch.cuda.set_sync_debug_mode("error")
            try:
                for _ in range(steps):
                    trainer.step()
                return {"waits": 0.0}
            except RuntimeError as error:
                found["wait"] = failure(
                    f"{trainer.work.name}: {trainer.contender.name}: a step that waits", error, tell
                )
                torch.cuda.set_sync_debug_mode("default")
                trainer.recover()
        torch.cuda.set_sync_debug_mode("warn")
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(steps):
                trainer.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    counted = sum("called a synchronizing" in str(warning.message) for warning in caught)
    return {**found, "waits": counted / steps}


def _round(entry: _Entry, device: torch.device) -> list[float]:
    assert entry.trainer is not None
    entry.trainer.take_turn()
    for _ in range(2):  # (others' turns, and rules that come and go, leave cold caches behind)
        entry.trainer.step()
    return timed(entry.trainer.step, entry.steps, device)


def timed(work: Callable[[], Any], count: int, device: torch.device) -> list[float]:
    """Seconds of each of `count` calls, by events on the device, with one sync at the end."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        if device.type != "cuda":
            moments = [time.perf_counter()]
            for _ in range(count):
                work()
                moments.append(time.perf_counter())
            return [b - a for a, b in itertools.pairwise(moments)]
        events: list[Any] = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
        torch.cuda.synchronize(device)
        events[0].record()
        for event in events[1:]:
            work()
            event.record()
        torch.cuda.synchronize(device)
        return [a.elapsed_time(b) / 1e3 for a, b in itertools.pairwise(events)]
    finally:
        if collecting:
            gc.enable()


def _end(entry: _Entry) -> None:
    if entry.trainer is not None:
        entry.trainer.close()
        entry.trainer = None


def free_memory() -> None:
    """Return freed memory to the device, for the next contender."""
    if torch.cuda.is_available():
        gc.collect()
        torch.cuda.empty_cache()


def _result(entry: _Entry, reference: _Entry, work: Work, speeds: Speeds | None) -> dict[str, Any]:
    name = entry.contender.name
    if entry.error or not entry.rounds:
        return {"name": name, "error": entry.error or "no round was run", **entry.found}
    medians = [statistics.median(samples) for samples in entry.rounds]
    everything = [sample for samples in entry.rounds for sample in samples]
    median = statistics.median(everything)
    stats = {
        "median": median, "min": min(everything), "max": max(everything), "rounds": len(medians),
        "steps a round": entry.steps,
    }  # fmt: skip
    return {
        "name": name,
        "stats": stats,
        "seconds": medians,
        "samples": [[round(sample, 8) for sample in samples] for samples in entry.rounds],
        "ratio": None if reference.error else ratio(reference.rounds, entry.rounds),
        **entry.found,
        "roofline": None if speeds is None else speeds.share(work, median),
    }


def ratio(reference: Sequence[Sequence[float]], own: Sequence[Sequence[float]]) -> dict[str, float] | None:
    """How many times faster than the reference, by rounds, as `spread` has it. None without common rounds."""
    ratios = [statistics.median(theirs) / statistics.median(ours) for theirs, ours in zip(reference, own, strict=False)]
    return spread(ratios) if ratios else None
