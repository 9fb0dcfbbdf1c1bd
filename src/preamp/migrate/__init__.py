"""From `apex.amp` to preamp's own API: scripts rewritten, with notes where a person has to look."""

from __future__ import annotations

from ..errors import MissingExtra
from ._files import NoSuchFile, run
from ._notes import CannotParse, Migration, Note

__all__ = ["CannotParse", "Migration", "NoSuchFile", "Note", "migrate_source", "run"]


def migrate_source(source: str, filename: str = "script.py") -> Migration:
    """A script for `apex.amp` as one for preamp, formatting and comments kept.

    `filename` is what the difference and the notes call it; nothing is read or written. What cannot be translated is
    left as it is, with a `Note` of what to write. Raises `CannotParse` for what is not Python, and `MissingExtra`
    without libcst.

    >>> found = migrate_source(source, "train.py")
    >>> print(found.diff(), *(note.text("train.py") for note in found.notes), sep="\\n")
    """
    try:
        import libcst  # noqa: F401
    except ImportError as error:
        raise MissingExtra("libcst", "migrate", "rewriting a script") from error
    from ._migrate import migrate_text

    return migrate_text(source, filename)
