"""What is published: the sdist and the wheel, and preamp installed from it beside torch and numpy alone."""

from __future__ import annotations

import re
import subprocess
import sys
import tarfile
import venv
import zipfile
from email.message import Message
from email.parser import Parser
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest

import preamp

pytest.importorskip("hatchling")

ROOT = Path(__file__).resolve().parents[2]


def build(source: Path, out: Path, target: str) -> Path:
    """As a release builds it, but by the hatchling that is installed, so that nothing is downloaded."""
    line = [sys.executable, "-m", "hatchling", "build", "-t", target, "-d", str(out)]
    subprocess.run(line, cwd=source, check=True, capture_output=True)
    (made,) = out.iterdir()
    return made


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(ROOT, tmp_path_factory.mktemp("wheel"), "wheel")


def metadata(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as opened:
        return Parser().parsestr(opened.read(f"preamp-{preamp.__version__}.dist-info/METADATA").decode())


def files_under(folder: Path, at: str) -> set[str]:
    paths = (path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return {f"{at}/{path.relative_to(folder).as_posix()}" for path in paths}


def test_the_wheel_has_the_package_and_nothing_else(wheel: Path) -> None:
    assert wheel.name == f"preamp-{preamp.__version__}-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as opened:
        names = {name for name in opened.namelist() if ".dist-info/" not in name}
        licences = [name for name in opened.namelist() if name.endswith("licenses/LICENSE")]
    pages = files_under(ROOT / "docs" / "findings", "preamp/doctor/pages")  # for `preamp explain`
    assert names == files_under(ROOT / "src" / "preamp", "preamp") | pages
    assert licences


@pytest.mark.slow
def test_the_sdist_makes_the_same_wheel(wheel: Path, tmp_path: Path) -> None:
    sdist = build(ROOT, tmp_path / "sdist", "sdist")
    with tarfile.open(sdist) as opened:
        opened.extractall(tmp_path, filter="data")
    (source,) = tmp_path.glob("preamp-*")
    assert (source / "tests" / "house").is_dir() and (source / "CHANGELOG.md").is_file()
    again = build(source, tmp_path / "wheel", "wheel")
    with zipfile.ZipFile(wheel) as first, zipfile.ZipFile(again) as second:
        assert {each.filename: each.CRC for each in first.infolist()} == {
            each.filename: each.CRC for each in second.infolist()
        }


def test_what_the_package_index_is_told(wheel: Path) -> None:
    told = metadata(wheel)
    assert told["Requires-Python"] == ">=3.10"
    core, extras = set(), {}
    for line in told.get_all("Requires-Dist", []):
        requirement, _, condition = line.partition(";")
        of_extra = re.search(r"extra == '(\w+)'", condition)
        if of_extra:
            extras.setdefault(of_extra[1], set()).add(re.split(r"\W", requirement)[0])
        else:
            core.add(requirement.strip())
    assert core == {"torch>=2.6", "numpy>=1.24", "jinja2>=3.1"}  # no upper bounds, on Python neither
    assert extras["cli"] == {"rich", "typer"} <= extras["demo"] & extras["migrate"]  # of commands
    links = dict(each.split(", ") for each in told.get_all("Project-URL", []))
    assert links.keys() == {"Homepage", "Documentation", "Repository", "Changelog", "Issues"}
    assert all(link.startswith("https://") for link in links.values())


def test_the_readme_can_be_read_on_the_package_index(wheel: Path) -> None:
    told = metadata(wheel)
    assert told["Description-Content-Type"] == "text/markdown"
    text = str(told.get_payload())
    links = re.findall(r"\]\(([^)\s]+)\)", text) + re.findall(r'(?:src|href)="([^"]+)"', text)
    assert links and not [link for link in links if not link.startswith(("https://", "#"))]


def link(names: tuple[str, ...], site: Path) -> None:
    """Put packages that are installed here, and what they require, into another environment."""
    wanted, seen = list(names), set[str]()
    while wanted:
        name = wanted.pop()
        if name in seen:
            continue
        seen.add(name)
        try:
            found = distribution(name)
        except PackageNotFoundError:  # for another platform, say
            continue
        for top in {file.parts[0] for file in found.files or ()} - {"..", "__pycache__"}:
            if not (site / top).exists():
                (site / top).symlink_to(Path(str(found.locate_file(top))))
        wanted += [re.split(r"[^\w.-]", line)[0] for line in found.requires or () if "extra ==" not in line]


def installed(wheel: Path, folder: Path, *names: str) -> Path:
    """The folder of programs of an environment that has these packages and, from the wheel, preamp."""
    venv.create(folder, symlinks=True)
    python = folder / "bin" / "python"
    link(names, next((folder / "lib").glob("python3*/site-packages")))
    line = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-index", str(wheel)]
    ran = subprocess.run(line, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr  # a requirement of the core that torch and numpy do not bring
    return python.parent


def run(programs: Path, *line: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(programs / line[0]), *line[1:]], cwd=programs, env={"OMP_NUM_THREADS": "1"}, capture_output=True, text=True
    )


CORE = """
from importlib.util import find_spec
import pathlib, torch, preamp
assert not any(map(find_spec, ("typer", "rich", "pandas"))), "the environment is not clean"
assert pathlib.Path(preamp.__file__).is_relative_to(pathlib.Path.cwd().parent), preamp.__file__

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.LayerNorm(8), torch.nn.Linear(8, 1))
optimizer = preamp.optim.AdamW(model.parameters(), lr=0.1)
losses = []
with preamp.prepare(model, optimizer, level="O5") as session:
    for _ in range(8):
        with session.autocast():
            loss = model(torch.ones(16, 4)).square().mean()
        session.backward(loss)
        session.step()
        session.zero_grad()
        losses.append(loss.item())
assert losses[-1] < losses[0], losses

report = preamp.doctor.examine(model, torch.optim.Adam(model.parameters(), eps=1e-9), "O3")
print(report.findings[0].to_text())
assert report.findings[0].code in report.to_html()
"""


def test_a_session_trains_with_torch_and_numpy_alone(wheel: Path, tmp_path: Path) -> None:
    programs = installed(wheel, tmp_path / "core", "torch", "numpy")
    ran = run(programs, "python", "-W", "error", "-c", CORE)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.startswith("error PA101: "), ran.stdout
    asked = run(programs, "preamp", "levels")
    assert asked.returncode == 2 and asked.stdout == ""
    assert asked.stderr.count("\n") == 1 and 'pip install "preamp[cli]"' in asked.stderr
    assert run(programs, "preamp", "--version").stdout == f"preamp {preamp.__version__}\n"


@pytest.mark.slow
def test_the_command_with_its_extra_alone(wheel: Path, tmp_path: Path) -> None:
    programs = installed(wheel, tmp_path / "cli", "torch", "numpy", "typer", "rich")
    levels = run(programs, "preamp", "levels")
    assert levels.returncode == 0 and "bf16-master" in levels.stdout, levels.stderr
    assert "PA202" in run(programs, "preamp", "explain", "PA202").stdout  # a page from outside the package
    script = programs / "train.py"
    script.write_text("import torch\nmodel = torch.nn.Linear(2, 1)\noptimizer = torch.optim.SGD(model.parameters())\n")
    script.write_text(script.read_text() + "model(torch.ones(4, 2)).sum().backward()\noptimizer.step()\n")
    watched = run(programs, "preamp", "doctor", "train.py")
    assert watched.returncode == 0, watched.stderr
    assert (programs / "preamp-doctor" / "report.html").is_file()
    rewritten = run(programs, "preamp", "migrate", "train.py")
    assert rewritten.returncode == 2 and 'pip install "preamp[migrate]"' in " ".join(rewritten.stderr.split())
