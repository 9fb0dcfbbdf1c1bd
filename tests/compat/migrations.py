"""What the tests of `preamp migrate` share: scripts run as they are on `preamp run`'s Apex, and rewritten without."""

from __future__ import annotations

import ast
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path

from preamp.compat.install import environment
from preamp.migrate import Migration, migrate_source

from .. import forks

SOURCE = Path(__file__).resolve().parents[2] / "src"

EACH = """
import io, json, os, runpy, sys, warnings
from contextlib import redirect_stdout
warnings.simplefilter("ignore")
found = {}
for file in sys.argv[2:]:
    reading, writing = os.pipe()
    if os.fork() == 0:  # each in a process of its own, with torch imported
        out = io.StringIO()
        try:
            with redirect_stdout(out):
                sys.path.insert(0, os.path.dirname(file))
                sys.argv = [file]
                runpy.run_path(file, run_name="__main__")
        except BaseException as error:
            out.write(f"{type(error).__name__}: {error}")
        os.write(writing, out.getvalue().encode())
        os._exit(0)
    os.close(writing)
    with open(reading) as pipe:
        found[os.path.relpath(file, sys.argv[1])] = pipe.read()
    os.wait()
sys.stderr.write(json.dumps(found))
"""


def outputs(folder: Path, *, with_apex: bool) -> dict[str, str]:
    """What the scripts of a folder print; `with_apex`: as `preamp run` starts them."""
    harness = folder.parent / "each.py"
    harness.write_text(EACH, encoding="utf-8")
    env = {**os.environ, "PYTHONPATH": str(SOURCE)}
    scripts = sorted(map(str, folder.glob("*.py")))
    done = forks.run([str(harness), str(folder), *scripts], env=environment(env) if with_apex else env)
    assert done.returncode == 0, done.stderr
    return {name: re.sub("at 0x[0-9a-f]+", "", out) for name, out in json.loads(done.stderr).items()}


def both(tmp_path: Path, scripts: Mapping[str, str]) -> tuple[dict[str, str], dict[str, str]]:
    """What scripts print before, under `preamp run`, and rewritten, without Apex."""
    found = []
    for name, with_apex in (("before", True), ("after", False)):
        folder = tmp_path / name
        folder.mkdir()
        for script, text in scripts.items():
            new = text if with_apex else migrated(text).after
            (folder / f"{script}.py").write_text(new, encoding="utf-8")
        found.append(outputs(folder, with_apex=with_apex))
    return found[0], found[1]


def migrated(text: str) -> Migration:
    """A rewriting, which has to be stable: a second one changes nothing."""
    found = migrate_source(text, "s.py")
    compile(found.after, "s.py", "exec")
    assert migrate_source(found.after, "s.py").after == found.after
    return found


def same_code(found: Migration) -> bool:
    """Whether nothing but comments and the installation of Apex has come in."""
    before, after = ast.parse(found.before), ast.parse(found.after)
    new = [each for each in after.body if ast.unparse(each) not in ("import preamp", "preamp.install_as_apex()")]
    return [ast.dump(each) for each in new] == [ast.dump(each) for each in before.body]
