"""`preamp doctor` around scripts that end in every way a script can end."""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
from torch import nn

from preamp.doctor.follow.watch import Watch
from preamp.doctor.places import is_users
from preamp.doctor.records import JsonLines, Recorder
from preamp.doctor.tell.report import schema

from .. import forks

TRAINING = """
import sys
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.2), nn.ReLU(), nn.Linear(16, 4))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
for step in range(STEPS):
    x, y = torch.randn(32, 8), torch.randint(4, (32,))
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=AMP):
        loss = nn.functional.cross_entropy(model(x).float(), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(loss.item().hex(), torch.rand(()).item().hex(), flush=True)
    MORE
"""


def _script(folder: Path, text: str = TRAINING, steps: int = 6, amp: bool = False, more: str = "pass") -> Path:
    path = folder / "train.py"
    path.write_text(text.replace("STEPS", str(steps)).replace("AMP", str(amp)).replace("MORE", more))
    return path


def _command(script: Path, *options: str) -> list[str]:
    out = str(script.parent / "out")
    return [sys.executable, "-m", "preamp", "doctor", "--out", out, *options, str(script)]


def _run(script: Path, *options: str) -> tuple[subprocess.CompletedProcess[str], dict[str, Any]]:
    ran = forks.run(_command(script, *options)[1:], cwd=script.parent)
    report = json.loads((script.parent / "out" / "report.json").read_text())
    jsonschema.validate(report, schema())
    page = (script.parent / "out" / "report.html").read_text()
    assert page.startswith("<!DOCTYPE html>")
    (data,) = re.findall(r'<script type="application/json" id="report-data">(.*?)</script>', page, re.DOTALL)
    assert json.loads(data) == report, "the page says that the raw data is in it"
    return ran, report


@pytest.mark.parametrize("amp", [False, True])
def test_output_is_the_script_s_own_bit_for_bit(tmp_path: Path, amp: bool) -> None:
    script = _script(tmp_path, amp=amp)
    alone = forks.run([str(script)])  # with as many threads: sums are not the same bits by any number of them
    ran, report = _run(script, "--every", "2")
    assert ran.stdout == alone.stdout
    assert ran.returncode == 0
    assert report["steps"] == 6
    assert [f for f in report["findings"] if f["severity"] != "info"] == []
    assert "Nothing is wrong" in report["verdict"]


@pytest.mark.slow
def test_a_script_may_import_preamp_before_torch(tmp_path: Path) -> None:
    script = _script(tmp_path, "import preamp\n" + TRAINING)
    ran, report = _run(script)
    assert ran.returncode == 0, ran.stderr
    assert report["steps"] == 6


@pytest.mark.slow
def test_a_crash_is_the_script_s_own_and_still_reported(tmp_path: Path) -> None:
    script = _script(tmp_path, more="if step == 3: raise KeyError('lost')")
    ran, report = _run(script)
    assert ran.returncode == 1
    assert "KeyError: 'lost'" in ran.stderr
    assert report["steps"] == 4
    assert "KeyError" in report["ended"]


@pytest.mark.slow
def test_a_report_names_no_folder_of_this_machine(tmp_path: Path) -> None:
    """Of a run with losses that are scaled, overflows and schedules: pages of it are passed on."""
    (tmp_path / "train.py").write_text("""
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), 1e-3)
scaler, schedule = torch.amp.GradScaler("cpu"), torch.optim.lr_scheduler.StepLR(optimizer, 10)
for step in range(6):
    with torch.autocast("cpu", dtype=torch.float16):
        loss = model(torch.randn(4, 8)).float().square().mean() * (1e6 if step == 2 else 1.0)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    schedule.step()
    optimizer.zero_grad()
""")
    _, report = _run(tmp_path / "train.py", "--every", "1")
    (process,) = report["processes"]
    assert any(step["skipped"] and step["loss_at"] == ["train.py", 12] for step in process["steps"])
    assert str(tmp_path) not in json.dumps(report["processes"])


def test_an_exit_status_is_passed_on(tmp_path: Path) -> None:
    ran, report = _run(_script(tmp_path, more="if step == 2: sys.exit(7)"))
    assert ran.returncode == report["exit_code"] == 7


def test_a_script_that_never_steps_says_so(tmp_path: Path) -> None:
    ran, report = _run(_script(tmp_path, "print('hello')\n"))
    assert ran.returncode == 0
    assert ran.stdout == "hello\n"
    assert report["steps"] == 0
    assert "No optimizer step was seen" in report["verdict"]
    assert report["verdict"].endswith(
        "Give the script that trains, with its arguments; a step is one of an optimizer of torch.optim."
    )


@pytest.mark.slow
def test_a_script_that_fails_before_its_first_step_is_told_what_to_mend(tmp_path: Path) -> None:
    ran, report = _run(_script(tmp_path, "import torch\nraise ValueError('no data')\n"))
    assert ran.returncode == 1 and "no data" in ran.stderr
    assert report["verdict"].endswith("Mend the script's own error first.")


def test_options_after_the_script_are_said_to_be_its_own(tmp_path: Path) -> None:
    script = _script(tmp_path, "import argparse\nargparse.ArgumentParser().parse_args()\n")
    line = [sys.executable, "-m", "preamp", "doctor", "--out", str(tmp_path / "out"), str(script), "--steps", "3"]
    ran = subprocess.run(line, capture_output=True, text=True, cwd=tmp_path)
    assert ran.returncode == 2
    told = " ".join(ran.stderr.split())
    assert "--steps was given to the script, since it stands after it: preamp's own options go before." in told


@pytest.mark.slow
def test_steps_end_the_script(tmp_path: Path) -> None:
    ran, report = _run(_script(tmp_path, steps=10_000), "--steps", "3")
    assert ran.returncode == 0
    assert report["steps"] == 3
    assert "stopped after" in report["ended"]


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_killed_script_yields_a_report(tmp_path: Path, number: signal.Signals) -> None:
    more = f"import os; step == 4 and os.kill(os.getpid(), {int(number)})"
    ran, report = _run(_script(tmp_path, steps=1000, more=more))
    assert ran.returncode == 128 + number
    assert report["steps"] == 5
    assert number.name in report["ended"]


@pytest.mark.slow
@pytest.mark.parametrize("number", [
    signal.SIGTERM, pytest.param(signal.SIGHUP, marks=pytest.mark.slow), signal.SIGINT,
])  # fmt: skip
@pytest.mark.parametrize("group", [False, True], ids=["doctor", "group"])
def test_a_doctor_that_is_told_to_end_passes_it_on_and_reports(
    tmp_path: Path, number: signal.Signals, group: bool
) -> None:
    script = _script(tmp_path, steps=100_000, more="import time; time.sleep(0.05)")
    # A shell's background job ignores Ctrl-C, one under nohup SIGHUP, and what they start inherits that; this does not.
    launch = (
        "import os, signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); "
        "signal.signal(signal.SIGHUP, signal.SIG_DFL); os.execv(*eval(sys.argv[1]))"
    )
    command = _command(script)
    line = [sys.executable, "-c", launch, repr((command[0], command))]
    process = subprocess.Popen(
        line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=tmp_path, start_new_session=True
    )
    assert process.stdout is not None
    process.stdout.readline()
    time.sleep(0.2)
    if group:
        os.killpg(process.pid, number)
    else:
        process.send_signal(number)
    process.communicate(timeout=60)
    assert process.returncode == 128 + number or (number == signal.SIGINT and process.returncode == 1)  # as Python does
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert report["steps"] >= 1
    assert number.name in report["ended"] or (number == signal.SIGINT and "KeyboardInterrupt" in report["ended"])


INDEX = """
import torch
from torch import nn
torch.manual_seed(0)
model = nn.Linear(16, 1000).bfloat16()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    ids = torch.arange(744, 1000)
    packed = torch.cat([torch.randn(256, 16), ids[:, None].float()], 1).bfloat16()
    loss = nn.functional.cross_entropy(model(packed[:, :-1]).float(), packed[:, -1].long())
    loss.backward()
    optimizer.step()
"""


def test_a_script_s_traceback_is_its_own_and_float32_is_not_blamed_for_an_index(tmp_path: Path) -> None:
    """The index comes from 16 bits before the model runs: the step done again in float32 gets the same one."""
    (tmp_path / "train.py").write_text(INDEX)
    ran, report = _run(tmp_path / "train.py")
    assert ran.returncode == 1
    trace, _, told = ran.stderr.partition("IndexError")
    files = re.findall(r'File "(.*?)"', trace)
    assert files[0].endswith("train.py") and files[-1].endswith("functional.py")
    assert not any("/doctor/" in each or each.endswith(("_compile.py", "eval_frame.py", "_ops.py")) for each in files)
    assert [one["code"] for one in report["findings"] if one["severity"] == "error"] == ["PA114"]
    assert "float32 the script ends" not in told and ".." not in report["ended"]


@pytest.mark.slow
def test_a_folder_that_cannot_be_written_is_told_before_the_script_runs(tmp_path: Path) -> None:
    script = _script(tmp_path)
    (tmp_path / "file").write_text("")
    for options in (["--out", str(tmp_path / "file")], ["--json", str(tmp_path / "file" / "report.json")]):
        command = [sys.executable, "-m", "preamp", "doctor", *options, str(script)]
        ran = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
        assert ran.returncode == 2
        assert ran.stdout == ""
        assert "no report can be written" in ran.stderr
        assert "Traceback" not in ran.stderr


@pytest.mark.slow
def test_a_full_disk_takes_the_report_and_not_what_was_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from preamp.cli import _doctor

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "report.html")

    monkeypatch.setattr(_doctor, "write", full)
    script = _script(tmp_path, TRAINING.replace("(x).float()", "(x).sqrt()"))
    status = _doctor.run_doctor(
        str(script), [], False, out=tmp_path / "out", json_file=None, every=50, steps=None, replay=True, strict=False
    )
    told = capsys.readouterr().err
    assert status == 1
    assert "No space left on device" in told
    assert "error PA201" in told
    assert "Traceback" not in told


@pytest.mark.slow
def test_a_cell_of_a_notebook_is_the_user_s(tmp_path: Path) -> None:
    code = "import torch\nmodel = torch.nn.Linear(8, 8).half()\noptimizer = torch.optim.Adam(model.parameters())\n"
    code += "for _ in range(2):\n    model(torch.ones(4, 8).half()).float().square().mean().backward()\n"
    code += "    optimizer.step()\n"
    script = tmp_path / "train.py"
    script.write_text(f"exec(compile({code!r}, '<cell 3>', 'exec'), {{'__name__': '__main__'}})\n")
    _, report = _run(script)
    places = {finding["code"]: (finding["file"], finding["line"]) for finding in report["findings"]}
    assert places["PA101"] == ("<cell 3>", 3)
    assert places["PA107"] == ("<cell 3>", 5)
    assert not is_users("<string>")
    assert not is_users("<frozen importlib._bootstrap>")


@pytest.mark.slow
def test_strict_fails_on_an_error_only(tmp_path: Path) -> None:
    ran, _ = _run(_script(tmp_path), "--strict")
    assert ran.returncode == 0
    ran, report = _run(_script(tmp_path, TRAINING.replace("(x).float()", "(x).sqrt()")), "--strict")
    assert ran.returncode == 3
    assert report["findings"][0]["code"] == "PA201"


@pytest.mark.slow
def test_no_replay_finds_no_origin_and_harms_nothing(tmp_path: Path) -> None:
    _, report = _run(_script(tmp_path, TRAINING.replace("(x).float()", "(x).sqrt()")), "--no-replay")
    assert "PA201" not in {finding["code"] for finding in report["findings"]}
    assert report["processes"][0]["steps"][0]["bad"] == "loss"


@pytest.mark.slow
def test_names_from_the_script_are_escaped(tmp_path: Path) -> None:
    text = TRAINING.replace("optimizer = ", "model.add_module('<img src=x>', nn.Identity())\noptimizer = ", 1)
    _run(_script(tmp_path, text))
    assert "<img src=x>" not in (tmp_path / "out" / "report.html").read_text()


def test_a_missing_script_is_one_clear_line(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "preamp", "doctor", "nowhere.py"]
    ran = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert ran.returncode == 2
    assert "there is no script 'nowhere.py'" in ran.stderr
    assert "Traceback" not in ran.stderr
    ran = subprocess.run([*command[:-1], "--nosuch", "nowhere.py"], capture_output=True, text=True, cwd=tmp_path)
    assert ran.returncode == 2
    assert "there is no option --nosuch; this command's own are listed by --help, and come first" in ran.stderr


@pytest.mark.slow
def test_another_sitecustomize_still_runs(tmp_path: Path) -> None:
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text("import builtins\nbuiltins.OTHER = 41\n")
    script = _script(tmp_path, "import builtins, torch\nprint(builtins.OTHER + 1)\n")
    env = {**os.environ, "PYTHONPATH": str(tmp_path / "site")}
    ran = subprocess.run(_command(script), capture_output=True, text=True, env=env, cwd=tmp_path, timeout=60)
    assert ran.stdout == "42\n", ran.stderr


def test_everything_is_taken_back(tmp_path: Path) -> None:
    import torch.optim.optimizer as base

    def state() -> list[Any]:
        return [
            torch.autograd.backward, torch.amp.GradScaler.step, torch.optim.Optimizer.__init__, nn.Module.to,
            torch.autocast.__enter__, torch.nn.utils.clip_grad_norm_, torch.compile, sys.excepthook,
            torch.optim.lr_scheduler.LRScheduler.step,
            len(base._global_optimizer_pre_hooks), len(base._global_optimizer_post_hooks),
            len(nn.modules.module._global_forward_pre_hooks), len(nn.modules.module._global_forward_hooks),
        ]  # fmt: skip

    before = state()
    watch = Watch(Recorder(JsonLines(tmp_path / "rank0.jsonl")), tmp_path, 50, None, True)
    watch.start()
    assert state() != before
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.randn(3, 4)).sum().backward()
    optimizer.step()
    watch.end()
    assert state() == before
    assert not model._forward_hooks
    assert torch.utils._python_dispatch._get_current_dispatch_mode() is None
