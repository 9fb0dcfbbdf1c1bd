"""The command line: `preamp VERB`. Verbs only parse, call an instrument, and print what it returns."""

from .._version import __version__, only_version_is_asked

__all__ = ["main"]


def main() -> None:
    """Run the command line; an error of preamp's is one message and exit status 2."""
    if only_version_is_asked():
        print(f"preamp {__version__}")
        return
    from ._app import main as run

    run()
