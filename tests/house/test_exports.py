"""The public names: frozen, documented, typed, and light to import."""

from __future__ import annotations

import ast
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

import preamp

SOURCE = Path(preamp.__file__).parent

PUBLIC = [
    "DynamicScale", "GradScaler", "HysteresisScale", "NoScale", "OpRules", "Policy", "PreampError", "PreampWarning",
    "Session", "SessionScaler", "StaticScale", "StepReport", "__version__", "autocast", "checkpoint",
    "compat", "doctor", "errors", "float_function", "half_function", "install_as_apex", "lr_finder", "optim",
    "parallel", "plan", "policy", "prepare", "promote_function", "report", "safe_eps", "uninstall_as_apex", "zoo",
]  # fmt: skip


def test_public_names_are_frozen() -> None:
    assert preamp.__all__ == PUBLIC
    for name in PUBLIC:
        assert getattr(preamp, name) is not None


def test_public_objects_are_documented() -> None:
    for name in PUBLIC:
        thing = getattr(preamp, name)
        if name != "__version__":
            assert thing.__doc__, name
        if inspect.isclass(thing):
            for key, member in vars(thing).items():
                if not key.startswith("_") and (inspect.isfunction(member) or isinstance(member, property)):
                    assert member.__doc__, f"{name}.{key}"


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="nothing"):
        preamp.nothing


@pytest.mark.parametrize(
    ("line", "error", "hint"),
    [
        ("preamp.initialize", AttributeError, "write preamp.prepare"),
        ("preamp.amp", AttributeError, "write from preamp.compat.apex import amp"),
        ("from preamp import amp", ImportError, "write from preamp.compat.apex import amp"),
        ("import preamp.amp", ImportError, "write from preamp.compat.apex import amp"),
        ("preamp.FusedAdam", AttributeError, "write preamp.optim.Adam$"),
        ("preamp.LAMB", AttributeError, "write preamp.optim.LAMB$"),
        ("preamp.RMSprop", AttributeError, "write torch.optim.RMSprop"),
        ("preamp.Nothing", AttributeError, "has no attribute 'Nothing'$"),
        ("preamp.optim.RMSprop", AttributeError, "write torch.optim.RMSprop, which preamp.prepare takes too$"),
        ("preamp.optim.AdamW8bit", AttributeError, 'write preamp.optim.AdamW\\(..., states="8bit"\\)$'),
        ("preamp.optim.PagedAdamW8bit", AttributeError, 'write preamp.optim.AdamW\\(..., states="8bit"\\)$'),
        ("preamp.optim.FusedLAMB", AttributeError, "write preamp.optim.LAMB$"),
        ("preamp.optim.nothing", AttributeError, "has no attribute 'nothing'$"),
        *(
            (
                f"preamp.checkpoint.{name}({{'model': 1}}, 'x.pt', optimizer=1)",
                preamp.PreampError,
                "pathlib.Path, first and what belongs there by name",
            )
            for name in ("save", "save_async", "load", "save_sharded", "save_sharded_async", "load_sharded")
        ),
        ("preamp.SessionScaler()", preamp.PreampError, "takes what preamp.prepare.model, optimizer. returns"),
        ("preamp.policy('O2 scale=128')", preamp.PreampError, "write 'O2,scale=128'"),
    ],
)
def test_what_is_written_by_mistake_is_answered_with_what_to_write(
    line: str, error: type[Exception], hint: str
) -> None:
    with pytest.raises(error, match=hint):
        exec(line, {"preamp": preamp})


def test_whoever_asks_for_apexs_names_is_told_no_and_nothing_else() -> None:
    assert not any(hasattr(preamp, name) for name in ("amp", "initialize", "FusedAdam", "RMSprop"))
    assert not hasattr(preamp.optim, "RMSprop") and not hasattr(preamp.doctor, "amp")


LEAN = """
import sys
import torch, numpy
before = set(sys.modules)
import preamp
preamp.prepare, preamp.optim
new = set(sys.modules) - before
foreign = {name.partition(".")[0] for name in new} - {"preamp", "torch"} - sys.stdlib_module_names
assert not foreign, foreign
loaded = {name for name in new if name.startswith(("torch._dynamo", "torch._inductor"))}
assert not loaded, sorted(loaded)[:5]
assert not torch.cuda.is_initialized()
upstairs = ("zoo", "demo", "cli", "report", "checkpoint", "lr_finder", "plan", "compat", "doctor")
assert not {f"preamp.{room}" for room in upstairs} & new
"""


@pytest.mark.slow
def test_import_is_lean() -> None:
    """No CUDA, no command line, no pictures: no package at all but torch."""
    subprocess.run([sys.executable, "-c", LEAN], check=True)


def lines_of_code(text: str) -> int:
    """Those that are neither empty nor a comment nor of a docstring, of which a file may have many."""
    told: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            told.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    lines = enumerate(text.splitlines(), 1)
    return sum(bool(line.strip()) and not line.strip().startswith("#") and i not in told for i, line in lines)


ALONE = """
import sys
import preamp
assert set(preamp.__all__) <= set(dir(preamp))
heavy = {"torch", "numpy", "typer", "rich", "jinja2"} & set(sys.modules)
assert not heavy, heavy
"""

ORDERS = """
import pickle, sys, torch

def check(first):
    for name in [name for name in sys.modules if name.partition(".")[0] == "preamp"]:
        del sys.modules[name]
    exec(first, {})
    import preamp
    from preamp import autocast, policy
    assert preamp.policy is policy and policy("O1").compute == torch.float16, first
    assert preamp.autocast is autocast and issubclass(autocast, torch.autocast), first
    assert sys.modules["preamp.policy"].policy is policy and preamp.scaling.SCHEDULES and preamp.optim.AdamW, first
    assert pickle.loads(pickle.dumps(preamp.Policy)) is preamp.Policy, first

check("import preamp; preamp.prepare")
check("import preamp.policy, preamp.autocast")
check("import preamp.policy._levels, preamp.autocast._region")
check("from preamp.policy import LEVELS; from preamp.autocast import MARKER")
check("from importlib import import_module; import_module('preamp.policy'); import_module('preamp.autocast')")
check("import preamp.session, preamp.doctor, preamp.compat.install")
check("from preamp import *")
"""


def test_import_alone_loads_nothing() -> None:
    subprocess.run([sys.executable, "-c", ALONE], check=True)


@pytest.mark.slow
def test_names_are_the_same_in_every_order_of_imports() -> None:
    subprocess.run([sys.executable, "-c", ORDERS], check=True)


def test_sources_keep_the_rules() -> None:
    for path in SOURCE.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        lines = lines_of_code(text)
        assert lines <= 350, f"{path.name} has {lines} lines of code: split it by idea"
        assert text.isascii(), path.name
        assert not re.search(r"\b(TODO|FIXME|XXX)\b", text), path.name
        assert not re.search(r"except (Base)?Exception:\s*pass", text), path.name
    assert (SOURCE / "py.typed").exists()
