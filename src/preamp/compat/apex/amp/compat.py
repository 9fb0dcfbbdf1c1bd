"""What Apex asked of the torch of its day, as far as scripts import it."""

from __future__ import annotations

from collections.abc import Iterable
from types import ModuleType


def filter_attrs(module: ModuleType | type, names: Iterable[str]) -> list[str]:
    """Those of `names` that `module` has."""
    return [name for name in names if hasattr(module, name)]
