"""Makes the gallery of reports anew: runs the commands of `docs/gallery.md` and takes a picture of each first screen.

Run as `python -m tools.gallery ROOT [REPORT...]`, from a clean commit, for all reports or for those named. The demo
and the comparison train networks for minutes. Needs Chromium for the pictures.
"""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image

COMMAND = re.compile(r"```sh\npreamp (.*)\n```\n\n\[The report\]\(gallery/(\w+)\.html\)")
PICTURE = re.compile(r"\[!\[.*\]\((\S+)\)\]\(gallery/(\w+)\.html\)")
SIZE = (1000, 900)
"""Of the pictures, in pixels."""


def make(root: Path, name: str, command: str, picture: str) -> None:
    """Run a command and keep its report, and the picture that the page shows of it."""
    docs = root / "docs"
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder)
        verb, *rest = shlex.split(command)
        line = [verb, "--out", str(out), *rest]
        print("+ preamp", *line, flush=True)
        subprocess.run([sys.executable, "-m", "preamp", *line], cwd=docs / "gallery", check=True)
        (report,) = out.glob("*.html")
        page = docs / "gallery" / f"{name}.html"
        shutil.copyfile(report, page)
        shot = out / "shot.png"
        size = f"--window-size={SIZE[0]},{SIZE[1]}"
        options_of_chromium = ["--headless", "--no-sandbox", "--hide-scrollbars", size, f"--screenshot={shot}"]
        subprocess.run(["chromium", *options_of_chromium, page.as_uri()], check=True, capture_output=True)
        with Image.open(shot) as image:
            image.convert("P", palette=Image.Palette.ADAPTIVE, colors=256).save(docs / picture, optimize=True)


def main(arguments: list[str]) -> int:
    """Make the reports that are named, or all."""
    root, asked = Path(arguments[0]), arguments[1:]
    text = (root / "docs" / "gallery.md").read_text(encoding="utf-8")
    pictures = {name: picture for picture, name in PICTURE.findall(text)}
    found = {name: command for command, name in COMMAND.findall(text)}
    if strange := set(asked) - set(found):
        sys.exit(f"the gallery has no {', '.join(sorted(strange))}; it has {', '.join(found)}")
    for name in asked or found:
        make(root.resolve(), name, found[name], pictures[name])
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
