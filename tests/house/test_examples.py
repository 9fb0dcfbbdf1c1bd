"""Examples in docstrings run as they stand, and what users call has one."""

from __future__ import annotations

import doctest
import functools
import importlib
import inspect
import pkgutil
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import preamp

from .test_site import PUBLIC, public

FRAMEWORKS = "preamp.integrations."
"""Its examples need a framework each, whose tests run such lines; here they are compiled."""


class Names(dict[str, Any]):
    """What examples take for granted, made when they ask for it."""

    made: dict[str, Callable[[Any], Any]] = {  # noqa: RUF012
        "preamp": lambda _: preamp,
        "Series": lambda _: preamp.report.Series,
        "torch": lambda _: torch,
        "model": lambda _: nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 8)),
        "params": lambda its: list(its["model"].parameters()),
        "ddp": lambda _: Mock(spec=nn.parallel.DistributedDataParallel),
        "optimizer": lambda its: preamp.optim.AdamW(its["params"], eps=1e-4),
        "schedule": lambda its: torch.optim.lr_scheduler.StepLR(its["optimizer"], 10),
        "session": lambda its: preamp.prepare(its["model"], its["optimizer"], level="O4"),
        "x": lambda _: torch.randn(8, 16),
        "y": lambda _: torch.arange(8),
        "batch": lambda its: its["x"],
        "loader": lambda its: [(its["x"], its["y"])] * 2,
        "loss_fn": lambda _: F.cross_entropy,
        "loss": lambda its: its["loss_fn"](its["model"](its["x"]), its["y"]),
        "matrices": lambda its: [p for p in its["model"].parameters() if p.dim() == 2],
        "others": lambda its: [p for p in its["model"].parameters() if p.dim() < 2],
        "train": lambda its: lambda session: its["train_step"](its["x"], its["y"]),
        "train_another_epoch": lambda _: lambda: None,
        "train_step": lambda its: lambda x, y: step(its, x, y),
    }

    def __missing__(self, name: str) -> Any:
        self[name] = self.made[name](self)
        return self[name]


def step(its: Names, x: Any, y: Any) -> Any:
    session = its["session"]
    with session.autocast():
        loss = its["loss_fn"](its["model"](x), y)
    session.backward(loss)
    session.step()
    session.zero_grad()
    return loss


BEFORE: dict[str, tuple[Callable[..., None], str]] = {
    "preamp.checkpoint._load.load": (preamp.checkpoint.save, "last.pt"),
    "preamp.checkpoint._sharded.load_sharded": (preamp.checkpoint.save_sharded, "last"),
}
"""What is on the disk before an example."""


class Checker(doctest.OutputChecker):
    """What an example shows has to come out; one that shows nothing may print what it likes."""

    def check_output(self, want: str, got: str, optionflags: int) -> bool:
        return not want or super().check_output(want, got, optionflags)


def modules() -> Iterator[ModuleType]:
    for found in pkgutil.walk_packages(preamp.__path__, "preamp."):
        source = Path(str(importlib.util.find_spec(found.name).origin))  # type: ignore[union-attr]
        if ">>>" in source.read_text(encoding="utf-8") and not found.name.startswith(FRAMEWORKS):
            yield importlib.import_module(found.name)


def examples() -> list[doctest.DocTest]:
    finder = doctest.DocTestFinder(exclude_empty=True)
    return [test for module in modules() for test in finder.find(module, globs=vars(module)) if test.examples]


@pytest.mark.parametrize("example", examples(), ids=lambda test: test.name)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_an_example_runs(
    example: doctest.DocTest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    example.globs = names = Names(example.globs)
    if example.name in BEFORE:
        save, path = BEFORE[example.name]
        save(path, **{name: names[name] for name in ("model", "optimizer", "session")})
    runner = doctest.DocTestRunner(Checker(), optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    failed = runner.run(example, clear_globs=False).failed
    for each in example.globs.values():
        if isinstance(each, preamp.Session):
            each.close()
    preamp.uninstall_as_apex()
    assert not failed, capsys.readouterr().out


def test_examples_of_frameworks_compile() -> None:
    sources = [*(Path(preamp.__file__).parent / "integrations").glob("*.py")]
    texts = [path.read_text(encoding="utf-8") for path in sources]
    found = [each for text in texts for each in doctest.DocTestParser().get_examples(text.replace('"""', "\n"))]
    assert len(found) > 8
    for each in found:
        compile(each.source, each.source, "single")


GIVEN = {
    "NoScale", "doctor.LogprobComparison", "doctor.Sink", "doctor.Watching", "lr_finder.LrCurve",
    "optim.FusedOptimizer", "parallel.Agreement", "parallel.ShardReduction", "plan.MemoryPlan", "report.BarChart",
    "report.Bars", "report.Column", "report.ExponentHistogram", "report.Finding", "report.HeatMap", "report.Marker",
    "report.Span", "report.count_severities", "report.smoothed", "report.to_json", "zoo.Recipe", "zoo.Task",
    "zoo.task_named",
}  # fmt: skip
"""What examples of other names return, or take, or what serves reports."""


def test_public_names_have_an_example() -> None:
    """In their own docstring, in that of a method, or in another's."""
    source = " ".join(each.source for test in examples() for each in test.examples)
    missing = set()
    for path in {name for module in PUBLIC for name in public(module)}:
        made = functools.reduce(getattr, path.split(".")[1:], preamp)
        called = inspect.isfunction(made) or (inspect.isclass(made) and not issubclass(made, Exception))
        own = ">>>" in (made.__doc__ or "")
        if called and not own and not re.search(rf"\b{path.rpartition('.')[2]}\(", source):
            missing.add(path.removeprefix("preamp."))
    assert missing - GIVEN == {"errors.kind_of"} and missing >= GIVEN
