"""Fewer points, the same picture: thinning that keeps every minimum, maximum and gap."""

from __future__ import annotations

from collections.abc import Sequence

Point = tuple[float, float] | None
"""A point in axis coordinates, or None for a gap."""


def thin(points: Sequence[Point], limit: int) -> list[Point]:
    """About `limit` of `points` at most, with the first, the last, and the extremes of each stretch kept.

    The points are cut into stretches of equal count; of each, the lowest, the highest and one gap (if any)
    stay, in their order. So the smallest and the largest y of all survive, and a gap never closes.
    """
    if len(points) <= limit:
        return list(points)
    buckets = max(1, limit // 3)
    kept = {0, len(points) - 1}
    for bucket in range(buckets):
        start, stop = bucket * len(points) // buckets, (bucket + 1) * len(points) // buckets
        lowest = highest = gap = None
        low = high = 0.0
        for index in range(start, stop):
            point = points[index]
            if point is None:
                gap = index if gap is None else gap
                continue
            if lowest is None or point[1] < low:
                lowest, low = index, point[1]
            if highest is None or point[1] > high:
                highest, high = index, point[1]
        kept.update(index for index in (lowest, highest, gap) if index is not None)
    return [points[index] for index in sorted(kept)]


def runs(points: Sequence[Point]) -> list[list[tuple[float, float]]]:
    """The stretches of `points` between gaps, none of them empty."""
    found: list[list[tuple[float, float]]] = [[]]
    for point in points:
        if point is None:
            found.append([])
        else:
            found[-1].append(point)
    return [run for run in found if run]
