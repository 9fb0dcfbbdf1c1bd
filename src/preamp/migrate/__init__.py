"""From Apex to preamp: scripts that run without Apex, with preamp's own line at each of its calls."""

from ._files import migrate_source, run
from ._notes import CannotParse, Migration, Note

__all__ = ["CannotParse", "Migration", "Note", "migrate_source", "run"]
