"""The command line: `preamp VERB`. Verbs only parse, call an instrument, and print what it returns."""

import sys

from .._version import __version__

__all__ = ["main"]


def main() -> None:
    """Run the command line; one line and status 2 where the packages of the extra `cli` are not installed."""
    if sys.argv[1:] == ["--version"]:
        print(f"preamp {__version__}")  # at once, and whatever is installed
        return
    try:
        from ._app import main as run
    except ModuleNotFoundError as error:
        package = str(error.name).partition(".")[0]
        if package not in ("typer", "rich"):
            raise
        print(
            f"error: the command preamp needs the package {package!r}, which is not installed: "
            'pip install "preamp[cli]"',
            file=sys.stderr,
        )
        sys.exit(2)
    run()
