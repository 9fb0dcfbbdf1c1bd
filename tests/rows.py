"""Tables of cases that are one test: every row is checked, and a failure names the rows that fail."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch

NAMED_BY = 100
"""Characters of a row that name it, its number among them."""


def check_rows(rows: Iterable[Any], check: Callable[..., None]) -> None:
    """Call `check` with each row, with the entries of one that is a tuple, and with a fresh seed as every test has.

    A row that skips is left out; where all of them do, so does the test.
    """
    failed: dict[str, BaseException] = {}
    checked, skipped = 0, None
    for number, row in enumerate(rows):
        torch.manual_seed(0)
        try:
            check(*row) if isinstance(row, tuple) else check(row)
        except pytest.skip.Exception as skip:
            skipped = skip
        except (Exception, pytest.fail.Exception) as error:
            failed[f"{number}: {row!r}"[:NAMED_BY]] = error
        else:
            checked += 1
    if failed:
        raise AssertionError(f"{len(failed)} rows fail: {'; '.join(failed)}") from next(iter(failed.values()))
    if skipped is not None and not checked:
        raise skipped


def over(**values: Iterable[Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Make one test of all combinations of such values; what else it takes are fixtures, the same for each of them."""

    def decorate(check: Callable[..., None]) -> Callable[..., None]:
        def test(**fixtures: Any) -> None:
            rows = itertools.product(*map(list, values.values()))
            check_rows(rows, lambda *row: check(**dict(zip(values, row, strict=True)), **fixtures))

        test.__name__, test.__qualname__, test.__doc__ = check.__name__, check.__qualname__, check.__doc__
        test.__module__ = check.__module__
        test.__dict__.update(check.__dict__)  # marks
        others = [p for name, p in inspect.signature(check).parameters.items() if name not in values]
        test.__signature__ = inspect.Signature(others)  # type: ignore[attr-defined]
        return test

    return decorate
