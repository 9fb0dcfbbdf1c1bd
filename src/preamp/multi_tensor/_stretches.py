"""How many tensors torch is given at once to lay one behind the other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

GRAIN = 32768
"""Entries from which on torch, if it has several threads, no longer concatenates in one loop, but by a copying operator
for each tensor, made anew where sizes differ."""


def stretches(sizes: Sequence[int]) -> Iterator[slice]:
    """Stretches of fewer than `GRAIN` entries, or of one tensor; all at once if they are of one size (in entries)."""
    if sizes and min(sizes) == max(sizes):
        yield slice(0, len(sizes))
        return
    begin = taken = 0
    for end, size in enumerate(sizes):
        taken += size
        if taken >= GRAIN and end > begin:
            yield slice(begin, end)
            begin, taken = end, size
    if sizes:
        yield slice(begin, len(sizes))
