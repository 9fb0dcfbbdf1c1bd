"""The command line: every verb runs, errors are one message, JSON lies beside what is printed."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

import preamp
from preamp.cli import main
from preamp.cli._app import FIRST, app, show
from preamp.cli._doctor import _show_finding
from preamp.cli._tables import levels_table
from preamp.doctor.findings import codes, page
from preamp.machine import device_named
from preamp.report import Column, Finding, Table
from preamp.rules import TABLE

runner = CliRunner()
NOTEBOOK = str(Path(__file__).parents[2] / "examples" / "tour.ipynb")


def invoke(*arguments: str) -> str:
    done = runner.invoke(app, list(arguments))
    assert done.exit_code == 0, done.output
    return done.output


def on_a_terminal(table: Table, width: int) -> list[str]:
    file = io.StringIO()
    show(table, Console(file=file, force_terminal=True, width=width))
    return re.sub("\x1b\\[[0-9;]*m", "", file.getvalue()).splitlines()


def test_verbs_are_frozen() -> None:
    names = [command.name or command.callback.__name__ for command in app.registered_commands]
    verbs = "demo lr-find run doctor compare explain migrate plan levels rules env"
    assert names == verbs.split()


def test_version() -> None:
    assert invoke("--version").strip() == f"preamp {preamp.__version__}"


@pytest.mark.parametrize("how", ["-m", "-c"])
def test_the_version_is_told_at_once(how: str) -> None:
    installed = "import sys; sys.argv[0] = '/bin/preamp'; from preamp.cli import main; main()"
    line = [sys.executable, "-X", "importtime", how, {"-m": "preamp", "-c": installed}[how], "--version"]
    ran = subprocess.run(line, capture_output=True, text=True, check=True)
    assert ran.stdout == f"preamp {preamp.__version__}\n"
    loaded = {line.rpartition("|")[2].strip().partition(".")[0] for line in ran.stderr.splitlines()}
    assert "preamp" in loaded and not loaded & {"torch", "numpy", "typer", "rich", "jinja2"}


def test_the_command_alone_shows_what_to_do_first() -> None:
    assert invoke() == FIRST
    verbs = {command.name or command.callback.__name__ for command in app.registered_commands}
    asked = re.findall(r"\bpreamp ([a-z]+)", FIRST)
    assert asked[:4] == ["env", "demo", "doctor", "compare"] and set(asked) <= verbs


@pytest.mark.parametrize(
    ("words", "found"),
    [("preamp d", ["demo", "doctor"]), ("preamp doctor --s", ["--steps", "--strict"])],
)
def test_completion_does_not_wait_for_torch(words: str, found: list[str]) -> None:
    asked = {"_PREAMP_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
    installed = "import sys; sys.argv[0] = '/bin/preamp'; from preamp.cli import main; main()"
    line = [sys.executable, "-X", "importtime", "-c", installed]
    ran = subprocess.run(line, capture_output=True, text=True, check=True, env={**os.environ, **asked})
    assert ran.stdout.split() == found
    assert "preamp.cli._app" in ran.stderr and " torch" not in ran.stderr


WITHOUT = """
import sys
for name in {names!r}:
    sys.modules[name] = None  # Python's way to say that it cannot be imported
sys.argv = ["preamp", "levels"]
from preamp.cli import main
main()
"""


@pytest.mark.parametrize("names", [("typer", "rich"), ("rich", "rich.box", "rich.console")])
def test_the_command_without_its_extra_is_one_line_and_status_2(names: tuple[str, ...]) -> None:
    ran = subprocess.run([sys.executable, "-c", WITHOUT.format(names=names)], capture_output=True, text=True)
    assert ran.returncode == 2 and ran.stdout == "" and ran.stderr.count("\n") == 1
    assert f"needs the package '{names[0]}'" in ran.stderr and 'pip install "preamp[cli]"' in ran.stderr


@pytest.mark.slow
def test_another_missing_package_is_not_blamed_on_the_extra() -> None:
    ran = subprocess.run([sys.executable, "-c", WITHOUT.format(names=["jinja2"])], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr  # levels writes no page
    ran = subprocess.run([sys.executable, "-c", WITHOUT.format(names=["torch"])], capture_output=True, text=True)
    assert ran.returncode == 1 and "preamp[cli]" not in ran.stderr


def test_help_shows_code_as_code() -> None:
    lines = str(preamp.__doc__).splitlines()
    assert "    for x, y in loader:" in lines and "            loss = loss_fn(model(x), y)" in lines


def test_the_list_of_commands_has_whole_sentences() -> None:
    assert "..." not in invoke("--help").partition("Commands:")[2]


def test_levels(tmp_path: Path) -> None:
    out = invoke("levels", "--json", str(tmp_path / "l.json"))
    for name in ("O0", "O5", "bf16-master", "auto is"):
        assert name in out
    table = json.loads((tmp_path / "l.json").read_text())
    assert [row[0] for row in table["rows"]] == ["O0", "O1", "O2", "O3", "O4", "O5"]


def test_the_levels_fit_one_screen() -> None:
    lines = on_a_terminal(levels_table(), 80)
    assert len(lines) < 24 and max(map(len, lines)) <= 80
    assert any(line.split()[:2] == ["O5", "bf16-master"] for line in lines)


def test_rules_have_reasons() -> None:
    out = invoke("rules")
    for row in TABLE:
        assert row.family in out and row.reason in out
    assert {len(line.split("\t")) for line in out.splitlines()} == {4}, "in a pipe a row a line, and nothing else"
    assert "changed by OpRules" in invoke("rules", "--policy", "O1; op gelu -> full")


def test_explain_alone_lists_what_there_is() -> None:
    lines = invoke("explain").splitlines()
    assert [line.partition(":")[0] for line in lines] == codes()
    assert "PA107: float16 gradients without a loss scale" in lines
    assert invoke("explain", "107") == invoke("explain", "pa107") == invoke("explain", "PA107")


@pytest.mark.parametrize("code", codes())
def test_a_page_reads_as_text(code: str) -> None:
    """Without what only a site shows; the scripts stay as they are."""
    text = invoke("explain", code)
    for mark in ("<!--", ".md)", "**What it is.**"):
        assert mark not in text
    assert "What it is. " in text
    blocks = re.findall(r"(?<=```python\n).*?(?=```)", page(code), re.DOTALL)
    assert blocks and all(block in text for block in blocks)


def test_env() -> None:
    out = invoke("env")
    for name in ("torch", "commit", "cpu", "auto level"):
        assert name in out


def test_lr_find_writes_report_and_data(tmp_path: Path) -> None:
    out = invoke("lr-find", "-m", "flights", "-l", "O4", "--steps", "12", "--batch-size", "64", "--out", str(tmp_path))
    assert {p.name for p in tmp_path.iterdir()} == {"lr.html", "lr.json"}
    data = json.loads((tmp_path / "lr.json").read_text())
    assert data["level"] == "O4" and len(data["curve"]["lrs"]) + data["curve"]["skipped"] <= 12
    assert "report:" in out


def test_what_a_finding_saw_keeps_its_indent_on_a_terminal() -> None:
    pasted = "x = " + " + ".join(["value"] * 30)
    finding = Finding("PA205", "warning", "near the top", evidence={f"value {i}": 2**i for i in range(20)}, fix=pasted)
    for on_terminal in (True, False):
        shown = Console(file=io.StringIO(), width=80, force_terminal=on_terminal, color_system=None)
        _show_finding(shown, finding)
        _, seen, *more = shown.file.getvalue().rstrip().splitlines()  # type: ignore[attr-defined]
        assert seen.startswith("  seen:  value 0 1")
        *rest, head, fix = more
        assert head == "  fix:" and fix == f"    {pasted}"
        assert bool(rest) == on_terminal
        assert all(len(line) <= 80 and line[:9].isspace() and not line[9].isspace() for line in rest)


def test_a_table_on_a_terminal() -> None:
    table = Table("T", (Column("ms", digits=1), "what"), [(2.5, "[bold]"), (None, "b")], notes=("note",))
    text = "\n".join(on_a_terminal(table, 60))
    assert "[bold]" in text and "2.5" in text and text.rstrip().endswith("note")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("verb", ["lr-find", "demo"])
def test_an_unusable_device_is_named(verb: str) -> None:
    for device, why in (
        ("tpu9", "torch knows no such device. Write cpu, cuda, or cuda:1"),
        ("cuda", f"torch {torch.__version__} "),
        ("xpu", "Leave it out to use what this machine has: preamp env"),
    ):
        done = runner.invoke(app, [verb, "--device", device])
        assert isinstance(done.exception, preamp.PreampError)
        assert str(done.exception).startswith(f"--device {device}: ") and why in str(done.exception)


def test_a_gpu_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(preamp.PreampError, match="--device cuda:2: the last GPU of this machine is cuda:1"):
        device_named("cuda:2")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("demo", "-m", "nothing"), "no model 'nothing'"),
        (("lr-find", "-m", "nothing"), "no model 'nothing'"),
        (("rules", "--policy", "O3"), "ops=none"),
        (("plan", "--params", "-7e9"), "no number of parameters"),
        (("plan", "--model", "nowhere:x:"), "nowhere:x:: ModuleNotFoundError"),  # :x: is no picture here
        (("plan",), "write --params 7B or --model module:name"),
        (("plan", "--params", "1M", "--optimizer", "adamx"), "there is no adamx; write adagrad, adam, adamw"),
        (("plan", "--params", "1M", "--optimizer", "adam,states=8"), "states=8.0: write 'float32', or '8bit'"),
        (("plan", "--params", "1M", "--optimizer", "adam,speed=9"), "unexpected keyword argument 'speed'"),
        (("doctor", "nowhere.py"), "Write its path, as in path/to/script.py, or -m package.module"),
        (("run", "torchrun"), "torchrun is -m torch.distributed.run"),
        *(((verb, NOTEBOOK), "jupyter nbconvert --to script makes a script") for verb in ("doctor", "compare", "run")),
    ],
)
def test_an_error_is_one_message_and_status_2(
    arguments: tuple[str, ...], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["preamp", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    said = capsys.readouterr().err
    assert ended.value.code == 2 and message in " ".join(said.split()) and "Traceback" not in said


def test_a_plan_of_a_model_and_of_a_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "net.py").write_text("import torch\nbuild = lambda: torch.nn.Linear(1000, 1000)\n")
    options = ["--level", "O5", "--optimizer", "adamw,master=split"]
    out = invoke("plan", "--model", "net:build", *options, "--json", str(tmp_path / "plan.json"))
    assert "1,001,000 parameters at O5" in out and "int16" in out
    data = json.loads((tmp_path / "plan.json").read_text())
    assert data["total"] == 1_001_000 * 14 + 8  # and two step counters
    assert "14,014,008" in out and "\nA rank holds 0.01 GiB at most, without activations.\n" in out
    assert " GiB at most, without activations, and sends 0.01 GiB in a step.\n" in invoke(
        "plan", "--params", "1M", "--shard", "ddp", "--world", "8"
    )
    assert "torch" not in invoke("plan", "--params", "1M", "--optimizer", "torch.sgd,momentum=0.9", "--level", "O2")


def test_migrate_prints_and_writes(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("from apex import amp\nmodel = amp.initialize(model)\n")
    done = runner.invoke(app, ["migrate", str(script)])
    assert "+preamp.install_as_apex()" in done.output and "+# preamp: session = preamp.prepare(model" in done.output
    assert done.exit_code == 0 and f"{script}:2: note: Apex's calls stay" in done.output
    assert script.read_text().startswith("from apex import amp\n")
    assert "rewritten" in invoke("migrate", "--write", str(script))
    assert "preamp.install_as_apex()" in script.read_text()
    script.write_text("import apex.RNN\n")
    assert runner.invoke(app, ["migrate", str(script)]).exit_code == 1
    assert "no file or folder" in str(runner.invoke(app, ["migrate", str(tmp_path / "nowhere.py")]).exception)
