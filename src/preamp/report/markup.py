"""The smallest SVG writer that cannot forget to escape, and how wide its text will be."""

from __future__ import annotations

import math
import re
import unicodedata
from dataclasses import dataclass

_NOT_XML = re.compile("[^\\t\\n\\r\\x20-\\ud7ff\\ue000-\\ufffd\\U00010000-\\U0010ffff]")
_ENTITIES = {"&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;", "'": "&#39;"}
_ENTITY = re.compile("[&<>\"']")

FONT = 12.0
"""Size of chart text, in units of the view box."""

_NARROW, _WIDE = frozenset("ijltfrI.,:;'|!()[]/ -"), frozenset("mwMW@%#")


@dataclass(frozen=True, slots=True)
class Element:
    """A piece of SVG; text children and attribute values are escaped when it is rendered."""

    name: str
    attributes: tuple[tuple[str, str | float], ...] = ()
    children: tuple[Element | str, ...] = ()

    def render(self) -> str:
        """The element as XML text."""
        attributes = "".join(
            f' {key}="{escape(value) if isinstance(value, str) else number(value)}"' for key, value in self.attributes
        )
        if not self.children:
            return f"<{self.name}{attributes}/>"
        inner = "".join(escape(child) if isinstance(child, str) else child.render() for child in self.children)
        return f"<{self.name}{attributes}>{inner}</{self.name}>"


def element(name: str, *children: Element | str, **attributes: str | float) -> Element:
    """An `Element`; in attribute names a trailing underscore goes and others become hyphens (`class_`)."""
    pairs = tuple((key.rstrip("_").replace("_", "-"), value) for key, value in attributes.items())
    return Element(name, pairs, children)


def escape(text: str) -> str:
    """`text` as XML shows it literally; characters that XML has no place for become U+FFFD."""
    return _ENTITY.sub(lambda match: _ENTITIES[match.group()], clean(text))


def clean(text: str) -> str:
    """`text` with every character that XML or UTF-8 cannot hold replaced by U+FFFD."""
    return _NOT_XML.sub("\ufffd", text)


def number(value: float) -> str:
    """A coordinate with one decimal, and none where it is zero."""
    assert math.isfinite(value), f"coordinate {value} would break the drawing"
    text = f"{value:.1f}"
    text = text[:-2] if text.endswith(".0") else text
    return "0" if text == "-0" else text


def path(points: list[tuple[float, float]], *, close: bool = False) -> str:
    """Path data through `points`, absolute coordinates."""
    body = "L".join(f"{number(x)} {number(y)}" for x, y in points)
    return f"M{body}{'Z' if close else ''}"


def text_width(text: str, size: float = FONT) -> float:
    """A safe estimate of the width of `text` in a system sans-serif, in units of the view box."""
    em = 0.0
    for char in text:
        if char in _NARROW:
            em += 0.36
        elif char in _WIDE:
            em += 0.92
        elif unicodedata.east_asian_width(char) in "WF":
            em += 1.05
        else:
            em += 0.68 if char.isupper() else 0.58
    return em * size


def ellipsize(text: str, width: float, size: float = FONT) -> str:
    """`text` on one line, cut with an ellipsis where it would be wider than `width`."""
    line = " ".join(clean(text).split())
    if text_width(line, size) <= width:
        return line
    room = width - 0.9 * size
    used, kept = 0.0, 0
    for char in line:
        used += text_width(char, size)
        if used > room:
            break
        kept += 1
    return line[:kept].rstrip() + "\u2026"


def label(text: str, width: float, *, x: float, y: float, size: float = FONT, **attributes: str) -> Element:
    """A text element no wider than `width`; a cut one tells its full text on hover."""
    shown = ellipsize(text, width, size)
    whole = " ".join(text.split())
    children: tuple[Element | str, ...] = (shown,) if shown == clean(whole) else (shown, element("title", whole))
    return element("text", *children, x=x, y=y, **attributes)
