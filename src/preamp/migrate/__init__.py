"""From `apex.amp` to preamp's own API: scripts rewritten, with notes where a person has to look."""

from ._files import NoSuchFile, migrate_source, run
from ._notes import CannotParse, Migration, Note

__all__ = ["CannotParse", "Migration", "NoSuchFile", "Note", "migrate_source", "run"]
