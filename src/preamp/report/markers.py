"""Markers of a line chart, their labels put where they cover neither each other nor, if possible, a line."""

from __future__ import annotations

import math
from collections.abc import Sequence

from .charts import Marker
from .frame import Box, Frame
from .markup import FONT, Element, element, label, path, text_width

MOST = 200
"""So many markers are drawn at most, evenly chosen; a report stays small however many steps were skipped."""

_CELL = 5.0
_AWAY = 20.0
_DROPS = (-9.0, 17.0, -24.0, 32.0, -39.0, 47.0, -54.0, 62.0)

Cells = set[tuple[int, int]]


def draw_markers(markers: Sequence[Marker], frame: Frame, lines: Sequence[list[tuple[float, float]]]) -> list[Element]:
    """A ring or a rule for each marker, and its label where there is room; all labels are told on hover.

    `lines` are the drawn lines in the drawing's coordinates, which labels keep off where they can.
    """
    if len(markers) > MOST:
        markers = [markers[index * len(markers) // MOST] for index in range(MOST)]
    inked = ink(lines)
    shapes: list[Element] = []
    labels: list[Element] = []
    taken = list(frame.taken)
    anchors: list[tuple[str, float, float, bool]] = []
    for marker in markers:
        x, y = frame.x.project(marker.x), frame.y.project(marker.y)
        if x is None or (y is None and marker.y is not None):
            continue
        hover = element("title", marker.label or "marker")
        if y is None:
            shapes.append(element("line", hover, x1=x, y1=frame.top, x2=x, y2=frame.bottom, class_="marker rule"))
            taken.append((x - 1, frame.top, x + 1, frame.bottom))
            anchors.append((marker.label, x, frame.top + 4, False))
        else:
            shapes.append(element("circle", hover, cx=x, cy=y, r=4, class_="marker"))
            taken.append((x - 5, y - 5, x + 5, y + 5))
            anchors.append((marker.label, x, y, True))
    for text, x, y, ring in anchors:
        placed = _place(text, (x, y), ring, frame, taken, inked) if text else None
        if placed is not None:
            labels.append(placed)
    return labels + shapes


def ink(lines: Sequence[list[tuple[float, float]]]) -> Cells:
    """The cells of a coarse grid that the lines pass through."""
    cells: Cells = set()
    for line in lines:
        for index, (x, y) in enumerate(line):
            x0, y0 = line[index - 1] if index else (x, y)
            steps = math.ceil(max(abs(x - x0), abs(y - y0)) / _CELL) or 1
            for step in range(steps + 1):
                share = step / steps
                cells.add((int((x0 + (x - x0) * share) // _CELL), int((y0 + (y - y0) * share) // _CELL)))
    return cells


def _place(
    text: str, anchor: tuple[float, float], ring: bool, frame: Frame, taken: list[Box], inked: Cells
) -> Element | None:
    """The label beside its point, at the first free place inside the plot, one without ink if there is any.

    A ring whose label had to go further away gets a thin line to it.
    """
    x, y = anchor
    room = frame.right - frame.left - 16
    wide = min(text_width(text), room)
    free: list[tuple[float, float, Box]] = []
    for drop in _DROPS:
        for left in (x + 7, x - 7 - wide, x - wide / 2):
            box = (left, y + drop - FONT, left + wide, y + drop + 3)
            inside = box[0] >= frame.left and box[2] <= frame.right
            inside = inside and box[1] >= frame.top and box[3] <= frame.bottom
            if inside and not any(_touch(box, other) for other in taken):
                free.append((left, y + drop, box))
    if not free:
        return None
    left, baseline, box = next((place for place in free if not _covers(place[2], inked)), free[0])
    taken.append(box)
    shown = label(text, room + 1, x=left, y=baseline, class_="halo")
    if not ring or abs(baseline - y) < _AWAY:
        return shown
    end = (min(max(x, box[0]), box[2]), box[3] if baseline < y else box[1] + 2)
    return element("g", element("path", d=path([(x, y), end]), class_="leader"), shown)


def _touch(a: Box, b: Box) -> bool:
    """Whether two boxes overlap."""
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]


def _covers(box: Box, inked: Cells) -> bool:
    """Whether a line passes through the box."""
    left, top, right, bottom = (int(edge // _CELL) for edge in box)
    return any((x, y) in inked for x in range(left, right + 1) for y in range(top, bottom + 1))
