"""A sink for tests."""

from __future__ import annotations

from typing import Any


class Kept:
    """Keeps every record."""

    def __init__(self) -> None:
        self.records: list[tuple[str, dict[str, Any]]] = []

    def write(self, kind: str, facts: Any) -> None:
        self.records.append((kind, dict(facts)))

    def of(self, kind: str) -> list[dict[str, Any]]:
        """The records of one kind, in order."""
        return [facts for name, facts in self.records if name == kind]
