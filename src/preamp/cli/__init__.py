"""The command line: `preamp VERB`. Verbs only parse, call an instrument, and print what it returns."""

from ._app import main

__all__ = ["main"]
