"""`preamp migrate`: scripts that import Apex in any form run without it, with a comment at each of its calls."""

from __future__ import annotations

import functools
import importlib
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import preamp
from preamp.errors import MissingExtra, PreampError
from preamp.migrate import CannotParse, migrate_source, run
from preamp.migrate._notes import LINES, lacking

from .migrations import both, migrated, outputs, same_code

pytest.importorskip("libcst")

LOOP = """\
from apex import amp
model, optimizer = amp.initialize(model, optimizer, opt_level="O2")
for x in data:
    loss = model(x)
    with amp.scale_loss(loss, optimizer) as scaled:
        scaled.backward()
    optimizer.step()
"""
INSTALLED = "import preamp\n\npreamp.install_as_apex()  # `import apex` finds preamp's from here on\n\n"

# -- imports

IMPORTS = {
    "plain": "import apex\nprint(apex.amp.__name__, apex.optimizers.FusedAdam)",
    "dotted": "import apex.amp\nprint(apex.amp.scale_loss)",
    "alias": "import apex.amp as A, apex.parallel as P\nprint(A.initialize, P.SyncBatchNorm)",
    "names": "from apex import amp, optimizers as o\nprint(amp.state_dict, o.FusedLAMB)",
    "class": "from apex.parallel import DistributedDataParallel as DDP\nprint(DDP)",
    "inner": "from apex.optimizers.fused_adam import FusedAdam\nfrom apex.amp import _amp_state\nprint(FusedAdam)",
    "star": "from apex.fp16_utils import *\nprint(network_to_half)",
    "fallback": "try:\n    from apex import amp\nexcept ImportError:\n    amp = None\nprint(amp)",
    "missing": "try:\n    from apex.contrib.sparsity import ASP\nexcept ImportError:\n    ASP = None\nprint(ASP)",
    "nothing": "try:\n    import apex.transformer\nexcept ModuleNotFoundError as error:\n    print(error.name)",
    "class_instead": """
from torch import nn
try:
    from apex.normalization import FusedLayerNorm as Norm
except ImportError:
    class Norm(nn.Module):
        pass
print(Norm, Norm(4).weight.shape)""",
    "function": "def f():\n    from apex import amp\n    import apex.mlp\n    return amp, apex.mlp.MLP\nprint(f())",
    "global": "def f():\n    global amp\n    from apex import amp\nf()\nprint(amp)",
    "method": "class A:\n    def f(self):\n        import apex\n        return apex.amp\nprint(A().f())",
    "condition": "import sys\nif len(sys.argv) > 5:\n    amp = 0\nelse:\n    from apex import amp\nprint(amp)",
    "typing": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import apex\nprint('ok')",
    "by_name": "import importlib\namp = importlib.import_module('apex.amp')\nprint(amp.initialize)",
    "package": "from importlib import import_module\nprint(import_module('.amp', package='apex'))",
    "f_string": "from importlib import import_module\nx = 'amp'\nprint(import_module(f'apex.{x}'))",
    "sum": "import importlib as i\nx = 'amp'\nprint(i.import_module('apex.' + x))",
    "computed": "import importlib\nfor x in ('torch', 'apex.amp'):\n    print(importlib.import_module(x).__name__)",
    "dunder": "print(__import__('apex.amp').amp, __import__('apex', fromlist=['amp']))",
    "spec": "import importlib.util\nprint(importlib.util.find_spec('apex') is not None)",
    "exec": "exec('from apex import amp')\nprint(amp)",
    "compiled": "import apex, amp_C\nfrom apex_C import flatten\nprint(amp_C.multi_tensor_scale, flatten)",
    "compiled_missing": "try:\n    import distributed_adam_cuda\nexcept ImportError:\n    print('none')",
    "one_line": "import os; import torch; from apex import amp; print(amp)",
    "future": "'''Doc.'''\nfrom __future__ import annotations; import apex\nprint(__doc__, apex.amp)",
    "docstring": "#!/usr/bin/env python\n# -*- coding: utf-8 -*-\n'''Doc.'''; import apex\nprint(__doc__, apex.amp)",
    "decorated": "import functools\n@functools.lru_cache\ndef f():\n    import apex\n    return apex.amp\nprint(f())",
    "main": "def main():\n    import apex.amp as amp\n    print(amp)\nif __name__ == '__main__': main()",
    "early": "import os\nos.environ['A'] = '1'\nimport torch\nfrom apex import amp\nprint(os.environ['A'], amp)",
    "multi_process": """
import torch
from apex import amp
class D(torch.utils.data.Dataset):
    def __len__(self): return 2
    def __getitem__(self, i):
        from apex.amp import state_dict
        return len(state_dict.__name__)
if __name__ == '__main__':
    print([int(x) for x in torch.utils.data.DataLoader(D(), num_workers=1, multiprocessing_context='spawn')])""",
}  # fmt: skip


@pytest.mark.slow
def test_every_form_of_import_does_what_it_does_under_preamp_run(tmp_path: Path) -> None:
    before, after = both(tmp_path, IMPORTS)
    assert before == after and len(before) == len(IMPORTS)
    assert not [name for name, out in before.items() if "Error" in out or not out], before
    for name, text in IMPORTS.items():
        assert same_code(migrated(text)), name


@pytest.mark.parametrize(
    "text",
    [
        "from .apex import amp\namp.initialize(m, o)\n",
        "from . import apex\nprint(apex.amp)\n",
        "from mylib import apex, amp\namp.state_dict()\n",
        "from torch.cuda import amp  # not apex\nwith amp.autocast():\n    pass\n",
        "game = 'apex'\nimport apex_legends\n",
        "import importlib\nimportlib.import_module(name)\n",
        "parser.add_argument('--backend', choices=['native', 'apex'])\neval(x)\n",
        "def __getattr__(name):\n    return apex\n",
        "",
    ],
)
def test_what_is_not_apex_is_left_alone(text: str) -> None:
    found = migrated(text)
    assert found.after == text and not found.uses_apex and not found.notes


def test_the_place_of_the_installation() -> None:
    head = '"""Doc."""\n\nfrom __future__ import annotations\n\nimport os\n\nos.environ["OMP_NUM_THREADS"] = "1"\n'
    after = migrated(f"{head}# computing\nimport torch\nimport apex\n").after
    assert after == f"{head}\n{INSTALLED}# computing\nimport torch\nimport apex\n"
    licence = "# Licence\n# of somebody\nimport torch\nimport apex\n"
    assert migrated(licence).after == licence.replace("import torch", "\n" + INSTALLED + "import torch")
    assert migrated(INSTALLED + "import apex\n").after == INSTALLED + "import apex\n"
    assert migrated("import apex\n" + INSTALLED).after.startswith(INSTALLED)  # too late there


HEADS = ("", "#!/usr/bin/python3\n", "# -*- coding: utf-8 -*-\n# (c)\n", '"""A\n# preamp: b"""\n', "\n\n# c\n", "\f\n")
BETWEEN = (
    "from __future__ import annotations\n", "import os, sys\n", "import sys; x = 1\n", "A = '''\n  a\n'''\n",
    "if True:\n\tB = 1\n", "C = (1,  # one\n  2)\n", "def f(a, b=\\\n 2): return a\n", "\n", "# a comment\n",
)  # fmt: skip
FORMS = (
    "import apex\n", "import torch, apex.amp as amp\n", "from apex.amp import (\n    scale_loss,\n    initialize)\n",
    "try: import apex\nexcept ImportError: pass\n", "def g():\n  from apex import amp; amp.init()\n",
    "if 1:\n\tfrom apex import amp\n\tamp.state_dict()\n",
    "@dec\nclass K:\n  from apex import parallel\n  p = parallel.LARC\n",
    "import apex\nx = [apex.amp.initialize(\n    m,\n    o), '''\n''' + apex.mlp.MLP]\n",
)  # fmt: skip


@pytest.mark.slow
@settings(deadline=None, max_examples=40)
@given(
    st.sampled_from(HEADS), st.lists(st.sampled_from(BETWEEN), max_size=3),
    st.lists(st.sampled_from(FORMS), min_size=1), st.sampled_from(("\n", "\r\n", "\r")), st.booleans(),
)  # fmt: skip
def test_nothing_but_comments_and_the_installation_comes_in(
    head: str, between: list[str], forms: list[str], newline: str, ended: bool
) -> None:
    text = head + "".join(sorted(between, key=lambda each: "__future__" not in each)) + "".join(forms)
    text = (text if ended else text.rstrip("\n")).replace("\n", newline)
    found = migrated(text)
    assert same_code(found) and found.uses_apex and found.after.count("install_as_apex") == 1
    assert {*re.findall(r"\r\n?|\n", found.after)} <= {newline}
    lines = iter(found.after.replace("\r\n", "\n").replace("\r", "\n").split("\n"))
    assert all(line in lines for line in text.replace("\r\n", "\n").replace("\r", "\n").split("\n"))  # in this order


@pytest.mark.slow
def test_a_project_of_several_files(tmp_path: Path) -> None:
    files = {
        "project/train.py": "from lib import norms\nfrom lib.amped import scale\nprint(norms.Norm, scale())\n",
        "project/lib/__init__.py": "",
        "project/lib/norms.py": "from apex.normalization import FusedLayerNorm as Norm\n",
        "project/lib/amped.py": "from .norms import Norm\n\ndef scale():\n    import apex\n    return apex.amp, Norm\n",
        "project/.venv/apex_user.py": "import apex\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).write_text(text)
    before = outputs(tmp_path / "project", with_apex=True)
    text, status = run([tmp_path / "project"])
    assert status == 0 and text.count("+++ b/") == 2 and (tmp_path / "project/lib/norms.py").read_text() == files[
        "project/lib/norms.py"
    ]  # fmt: skip
    text, status = run([tmp_path / "project"], write=True)
    assert status == 0 and text.count(": rewritten\n") == 2
    assert (tmp_path / "project/.venv/apex_user.py").read_text() == "import apex\n"
    assert outputs(tmp_path / "project", with_apex=False) == before and "Error" not in before["train.py"]
    (tmp_path / "project/apex.py").write_text("amp = None\n")
    text, status = run([tmp_path / "project" / "lib"], write=True)
    assert status == 0 and text.count(f"left as it is, since apex is {tmp_path}/project/apex.py here") == 2


FORMS = {
    "modes": """
def main(fp16):
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if fp16:
        try:
            from apex import amp
            model, optimizer = amp.initialize(model, optimizer, opt_level="O1", verbosity=0)
        except Exception as error:
            print(error)
            return
    else:
        model = torch.nn.DataParallel(model)
    for _ in range(3):
        model.zero_grad()
        loss = (model(torch.ones(8, 4)) - 1).pow(2).mean() / 64
        if fp16:
            with amp.scale_loss(loss, optimizer) as scaled_loss:
                scaled_loss.backward()
        else:
            loss.backward()
        optimizer.step()
    print(loss.item())
main(True)
main(False)""",
    "inference": """
try:
    from apex import amp
except ImportError:
    amp = None
torch.manual_seed(0)
for level in ("O0", "O1", "O2", "O3"):
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.PReLU(), torch.nn.Linear(4, 2)).eval()
    if amp:
        model = amp.initialize(model, opt_level=level, verbosity=0)
    with torch.no_grad():
        print(model(torch.ones(1, 4)))
    amp.close()""",
}


def test_modes_and_inference_are_left_as_they_are(tmp_path: Path) -> None:
    texts = {name: f"import torch{text}" for name, text in FORMS.items()}
    before, after = both(tmp_path, texts)
    assert before == after and not any("Error" in out for out in before.values())
    found = {name: migrated(text) for name, text in texts.items()}
    assert all(map(same_code, found.values()))
    fallback = migrated(IMPORTS["class_instead"].strip() + "\n")
    assert fallback.after.count("# preamp: torch.nn") == 1  # above print, and not in the handler


# -- comments


@pytest.mark.parametrize(
    ("call", "line"),
    [
        ("m, o = amp.initialize(m, o, opt_level='O2')", "session = preamp.prepare(m, o, level='O2')"),
        ("amp.initialize(models=m,\n   opt_level=a)", "session = preamp.prepare(m, None, level=a)"),
        ("m = amp.initialize(m, opt_level='O1')", "session = preamp.prepare(m, None, level='O1')"),
        ("m, o = amp.initialize(*both)", "session = preamp.prepare(both, ..., level=...)"),
        ("if fp16: m, o = apex.amp.initialize(m, o)", "session = preamp.prepare(m, o, level=...)"),
        ("with amp.scale_loss(a +\n   b, o) as s: s.backward()", "session.backward(a + b), "),
        ("clip(amp.master_params(o), 1.0)", "session.clip_grad_norm_(max_norm)"),
        ("self.amp.scale_loss(loss, o)", "session.backward(loss)"),
        ("{'amp': amp.state_dict()}", "session.state_dict()"),
        (
            "ms, os = amp.initialize([g, d], [a, b], opt_level='O1', loss_scale=args.s, num_losses=3)",
            "session = preamp.prepare([g, d], [a, b], level='O1', scale=args.s, losses=[str(i) for i in range(3)])",
        ),
        (
            "m, o = amp.initialize(m, o, opt_level='O2', keep_batchnorm_fp32=True, loss_scale=None)",
            "session = preamp.prepare(m, o, level='O2', norms=\"fp32\" (if True))",
        ),
        ("with amp.scale_loss(l, o, loss_id=1) as s: s.backward()", "session.backward(l, name=str(1)), "),
        ("norm = apex.normalization.MixedFusedRMSNorm(8)", "torch.nn.RMSNorm("),
        ("@amp.float_function\ndef f(x): pass", "preamp.float_function"),
        ("class Norm(apex.normalization.FusedLayerNorm): pass", "torch.nn.LayerNorm"),
        ("opt = apex.optimizers.fused_adam.FusedAdam(p)", "preamp.optim.AdamW, weight_decay=0.0 if none is given"),
        ("o = apex.contrib.optimizers.FP16_Optimizer(o)", "session = preamp.prepare("),
        ("scale = amp._amp_state.loss_scalers[0].loss_scale()", "session.loss_scale()"),
        ("module = apex.parallel.convert_syncbn_model(module)", "torch.nn.SyncBatchNorm.convert_sync_batchnorm"),
    ],
)
def test_a_call_has_the_line_of_preamps_own_api_above_it(call: str, line: str) -> None:
    first = call.partition("\n")[0]
    after = migrated(f"import apex\nfrom apex import amp\nif x:\n    {call.replace(chr(10), chr(10) + '    ')}\n").after
    _, mark, comment = after.partition(f"    {first}")[0].rpartition("    # preamp: ")
    assert mark and comment.startswith(line) and comment.count("\n") == 1


def test_stars_and_texts_are_followed() -> None:
    assert (
        "# preamp: session = preamp.prepare("
        in migrated("from apex.fp16_utils import *\nn = network_to_half(n)\n").after
    )
    own = "w = 1\ndef f(parser):\n    global w\n    loss = parser.add(type=int)\n    print(loss, w)\n"
    own = f"from apex.fp16_utils import *\n{own}"
    assert "# preamp: " not in migrated(own).after, "its own names, keywords and builtins are not the star's"
    text = "import importlib\na = importlib.import_module('apex.amp')\na.state_dict()\n"
    assert "# preamp: session.state_dict()\na.state_dict()\n" in migrated(text).after


def test_comments_follow_their_calls() -> None:
    after = migrated(LOOP).after
    changed = after.replace('"O2"', '"O5"').replace("amp.scale_loss(loss", "nothing(loss")
    again = migrated(changed[: changed.index("# preamp")] + "# preamp: old\n" + changed[changed.index("# preamp") :])
    assert "old" not in again.after and 'level="O5")\n' in again.after and "session.backward" not in again.after


def test_the_lines_are_true() -> None:
    model = torch.nn.Linear(1, 1)
    session = preamp.prepare(model, torch.optim.SGD(model.parameters()), level="O0")
    for name, line in LINES.items():
        door = {"amp_C": "_amp_c", "apex_C": "parallel.distributed"}.get(name, name)
        module, _, last = f"preamp.compat.apex.{door}".rpartition(".")
        found = importlib.import_module(module)
        assert hasattr(found, last) or importlib.import_module(f"{module}.{last}"), name
        for text in re.findall(r"(?:preamp|torch)(?:\.\w+)+(?![\w*])", line):
            functools.reduce(getattr, text.split(".")[1:], sys.modules[text.partition(".")[0]])
        assert all(hasattr(session, each) for each in re.findall(r"\bsession\.(\w+)", line)), line


@pytest.mark.parametrize(
    "name",
    ["amp", "parallel", "mlp", "RNN", "transformer", "pyprof", "contrib.xentropy", "contrib.sparsity", "contrib"],
)
def test_what_preamps_apex_lacks(name: str) -> None:
    assert lacking(f"{name}.Thing") in (None, f"apex.{name}", "apex.contrib.Thing")
    try:
        importlib.import_module(f"preamp.compat.apex.{name}")
    except ModuleNotFoundError:
        (note,) = migrated(f"import apex.{name}\n").notes
        assert note.by_hand and f"preamp's Apex has no apex.{name}" in note.text and note.line == 1
        (note,) = migrated(f"try:\n    from apex.{name} import A\nexcept ImportError: pass\n").notes
        assert not note.by_hand
    else:
        assert not migrated(f"import apex.{name}\n").notes


# -- files


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("from apex import amp\nprint 'x'\n", r"^s\.py:2: not Python"),
        ("from apex import amp\nif 1:\n\tx = 1\n        y = 2\n", r"^s\.py:4: .*tabs"),
        ("import apex\nx = '\0'\n", r"^s\.py:\d: not Python"),
        ("import apex\nx = " + "(" * 3000 + ")" * 3000, r"^s\.py:\d: not Python"),
        ("import apex\nx = " + "-" * 100000 + "1", r"^s\.py:\d: not Python"),
    ],
)
def test_what_python_does_not_read_is_one_error(text: str, message: str) -> None:
    with pytest.raises(CannotParse, match=message):
        migrate_source(text, "s.py")


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_bytes(b"# coding: utf-8\nfrom apex import amp  # \xe9\n")
    (tmp_path / "b.py").write_text("import apex\n")
    (tmp_path / "old.py").write_text("print 'nothing of it is parsed'\n")
    text, status = run([tmp_path], write=True)
    assert status == 2 and text.startswith("error: ") and "UTF-8" in text and "b.py: rewritten" in text
    (tmp_path / "n.ipynb").write_text('{"cells": ["import apex"]}')
    text, status = run([tmp_path / "n.ipynb"])
    assert status == 2 and "notebook" in text
    with pytest.raises(PreampError, match=r"nothing\.py"):
        run([tmp_path / "nothing.py"])
    assert run([tmp_path / "old.py"]) == ("nothing of Apex is used there\n", 0)


def test_the_difference_is_a_patch(tmp_path: Path) -> None:
    if shutil.which("patch") is None:
        pytest.skip("there is no patch here")
    text = LOOP.rstrip("\n") + "\n\fx = 1"
    found = migrated(text)
    (tmp_path / "a.py").write_text(text, encoding="utf-8")
    patch = migrate_source(text, "a.py").diff()
    done = subprocess.run(["patch", "-p1"], input=patch, text=True, cwd=tmp_path, capture_output=True)
    assert done.returncode == 0, done.stdout
    assert (tmp_path / "a.py").read_text(encoding="utf-8") == found.after


def test_written_files_keep_encoding_line_ends_and_mode(tmp_path: Path) -> None:
    text = "# -*- coding: latin-1 -*-\n# caf\xe9\n" + LOOP + "from apex.contrib import fmha\n"
    file = tmp_path / "a.py"
    file.write_bytes(text.replace("\n", "\r\n").encode("latin-1"))
    file.chmod(0o750)
    link = tmp_path / "link.py"
    link.symlink_to(file)
    said, status = run([link], write=True)
    data = file.read_bytes().decode("latin-1")
    assert status == 1 and "rewritten" in said and link.is_symlink()
    assert data.count("\r\n") == data.count("\n") and "caf\xe9" in data and "preamp.install_as_apex()" in data
    assert file.stat().st_mode & 0o777 == 0o750
    line = int(next(each for each in said.splitlines() if "by hand" in each).split(":")[1])
    assert data.splitlines()[line - 1] == "from apex.contrib import fmha"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.py", "link.py"]
    run([link], write=True)
    assert file.read_bytes().decode("latin-1") == data


def test_without_libcst(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "libcst", None)
    with pytest.raises(MissingExtra, match=r"preamp\[migrate\]"):
        migrate_source(LOOP, "s.py")
