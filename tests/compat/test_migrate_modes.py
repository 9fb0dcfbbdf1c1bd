"""`preamp migrate` and scripts with several modes: a session in each of them; and scripts that ask for Apex."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from preamp.migrate import CannotParse, migrate_source
from preamp.migrate._notes import _RUNS, runs

from .migrations import by_hand, clean, left, migrated

pytest.importorskip("libcst")

LOOP = """\
for x in data:
    loss = model(x)
    if fast:
        with amp.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
    else:
        loss.backward()
    optimizer.step()
"""
START = """\
if fast:
    model, optimizer = amp.initialize(model, optimizer){why}
"""


# -- a session in every mode


def test_a_session_of_a_method_that_only_some_modes_call() -> None:
    text = """\
import apex
class Trainer:
    def __init__(self, level, model, optimizer):
        self.model, self.optimizer = model, optimizer
        {call}

    def init_amp(self, level):
        self.model, self.optimizer = apex.amp.initialize(self.model, self.optimizer, opt_level=level){why}

    def optimize(self, x, level):
        loss = self.model(x)
        if level < 0:
            loss.backward()
        else:
            with apex.amp.scale_loss(loss, self.optimizer) as scaled:
                scaled.backward()
        self.optimizer.step()
"""
    why = "  # why: self.session is made in init_amp(), which line 5"
    left(text.format(call="if level >= 0: self.init_amp(level)", why=why))
    left(text.format(call="level >= 0 and self.init_amp(level)", why=why))
    left(text.format(call="pass", why="  # why: init_amp(), which nothing in this file calls"))
    after = clean(text.format(call="self.init_amp(level)", why=""))
    assert "self.session.backward(loss)" in after and "self.session.step()" in after


@pytest.mark.parametrize(
    ("bound", "there"),
    [
        ("model, optimizer = build()", True),
        ("model = build()\nif train:\n    optimizer = SGD(model)\nelse:\n    optimizer = None", True),
        ("model = build()\nif train:\n    optimizer = SGD(model)\nelse:\n    raise SystemExit", True),
        ("with open(f):\n    model = build()\n    optimizer = SGD(model)", True),
        ("model = build()\nif train:\n    optimizer = SGD(model)", False),
        ("model = build()\nfor name in names:\n    optimizer = SGD(model)", False),
        ("model = build()\nwhile train:\n    optimizer = SGD(model)", False),
    ],
)
def test_what_a_mode_without_amp_may_not_have(bound: str, there: bool) -> None:
    """Evaluation that has no optimizer must not be given a session with one."""
    text = f"import torch\nfrom apex import amp\n{bound}\n{START}{LOOP}"
    if there:
        assert 'level="O1" if fast else "O0"' in clean(text.format(why=""))
    else:
        left(text.format(why="  # why: amp.initialize under a condition"))


def test_a_model_is_prepared_once() -> None:
    body = "for stage in range(3):\n    {inside}\n    model, optimizer = amp.initialize(model, optimizer){why}\n    "
    text = "from apex import amp\nmodel, optimizer = build()\n" + body + LOOP.replace("\n", "\n    ").rstrip() + "\n"
    left(text.format(inside="pass", why="  # why: made again for models that have one"))
    assert "preamp.prepare(" in clean(text.format(inside="model, optimizer = build()", why=""))
    function = """\
from apex import amp
def train(model, optimizer, data):
    model, optimizer = amp.initialize(model, optimizer){why}
    for x in data:
        loss = model(x)
        with amp.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        optimizer.step()
net, opt = build()
"""
    assert "session.step()" in clean(function.format(why="") + "train(net, opt, data)\n")
    why = "  # why: made again for models"
    left(function.format(why=why) + "train(net, opt, warm)\ntrain(net, opt, data)\n")
    left(function.format(why=why) + "for fold in folds:\n    train(net, opt, fold)\n")
    folds = "for fold in folds:\n    net, opt = build()\n    train(net, opt, fold)\n"
    assert "session.step()" in clean(function.format(why="") + folds)


def test_a_condition_in_a_loop() -> None:
    left("""\
from apex import amp
model, optimizer = build()
for epoch in range(3):
    if epoch == 0:
        model, optimizer = amp.initialize(model, optimizer)  # why: made again
    loss = model(x)
    with amp.scale_loss(loss, optimizer) as scaled:
        scaled.backward()
    optimizer.step()
""")


# -- scripts that go on without Apex


@pytest.mark.parametrize(
    "imports",
    [
        "try:\n    from apex import amp\n    fast = True\nexcept ImportError:\n    fast = False",
        "fast = True\ntry:\n    from apex import amp\nexcept ImportError:\n    fast = False",
        "fast = False\ntry:\n    from apex import amp\n    fast = True\nexcept ImportError:\n    pass",
        "try:\n    from apex import amp\nexcept ImportError:\n    fast = False\nelse:\n    fast = True",
        "fast = True\ntry:\n    from apex import amp\n    from apex.parallel import SyncBatchNorm as Norm\n"
        "except ImportError:\n    from torch.nn import SyncBatchNorm as Norm\n    fast = False\nnorm = Norm(8)",
    ],
)  # fmt: skip
def test_flags_of_an_import_say_that_it_went_well(imports: str) -> None:
    after = clean(f"import torch\n{imports}\nmodel, optimizer = build()\n{START.format(why='')}{LOOP}")
    assert "fast = False\n" not in after.partition("fast = True\n")[2] and "fast = True\n" in after
    assert 'level="O1" if fast else "O0"' in after


@pytest.mark.parametrize(
    ("imports", "ask"),
    [
        ("from transformers.utils import is_apex_available", "is_apex_available()"),
        ("from timm.utils import has_apex", "has_apex"),
        ("import helpers", "helpers.APEX_INSTALLED"),
        ("import importlib.util", 'importlib.util.find_spec("apex") is not None'),
        ("import sys", '"apex" in sys.modules'),
        ("from pkgutil import find_loader", 'find_loader("apex.amp")'),
    ],
)
def test_questions_after_apex(imports: str, ask: str) -> None:
    question = f"if {ask}:  # why: {ask.split('(')[0].split(' in')[0]}\n    use = True\nelse:\n    use = False\n"
    text = f"{imports}\nfrom apex import amp\n{question}model, optimizer = build()\n{START.format(why='')}{LOOP}"
    left(text.replace("fast:", "use:"))


def test_a_fallback_that_stays_is_told() -> None:
    text = """\
try:{why}
    from apex import amp
    from apex.parallel import LARC
    has_apex = True
except ImportError:
    has_apex = False
other = LARC(other) if has_apex else other
model, optimizer = build()
"""
    left(
        (text.format(why="  # why: LARC that may fail") + START.format(why="") + LOOP).replace(
            "ImportError", "Exception"
        )
    )
    notes = migrate_source(text.format(why="").replace("    has_apex = False", "    has_apex = None"), "s.py").notes
    (word,) = [note for note in notes if not note.by_hand]
    assert word.line == 1 and "goes on without" in word.seen and "preamp run" in word.write


def test_a_raised_import_error_is_no_fallback() -> None:
    text = "try:\n    from apex.parallel import LARC\nexcept ImportError:\n    raise SystemExit\nopt = LARC(opt)\n"
    assert all(note.by_hand for note in migrated(text).notes)


def test_a_fallback_that_builds_layers() -> None:
    after = clean("""\
import torch
def LayerNorm(shape, eps=1e-5):
    if torch.cuda.is_available():
        try:
            from apex.normalization import FusedLayerNorm

            return FusedLayerNorm(shape, eps)
        except ImportError:
            pass
    return torch.nn.LayerNorm(shape, eps)
""")
    assert "        try:\n            return torch.nn.LayerNorm(shape, eps)\n" in after


# -- Apex by another name


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('import importlib\namp = importlib.import_module("apex.amp")', 'import_module("apex.amp")'),
        ('amp = __import__("apex")', '__import__("apex")'),
        ('from importlib import import_module\nlamb = import_module("amp_C")', 'import_module("amp_C")'),
        ("def train(self, loss):\n    self.amp.scale_loss(loss, self.opt)", "self.amp.scale_loss() of an amp that"),
        ("from mine import amp\nm, o = amp.initialize(m, o)  # of apex", "amp.initialize() of an amp that"),
        ("import amp_C\nnorm = amp_C.multi_tensor_l2norm", "amp_C.multi_tensor_l2norm: write torch._foreach_"),
        ("from apex_C import flatten\nflat = flatten(ps)", "apex_C.flatten: write torch._utils._flatten"),
        ("import fused_layer_norm_cuda\nf = fused_layer_norm_cuda.forward", "fused_layer_norm_cuda.forward: "),
    ],
)
def test_apex_by_another_name_is_a_note(text: str, words: str) -> None:
    ((line, told),) = by_hand(f"{text}\n")
    assert (line == 2 and words in told) or (line == 1 and words in told)


def test_a_name_in_a_choice_is_none() -> None:
    assert not migrate_source(
        'parser.add_argument("--amp", choices=["apex", "torch"])\nx = {"apex": 1}\n', "s.py"
    ).notes


def test_lists_of_tensors_keep_a_session_with_apex() -> None:
    text = f"import amp_C\nfrom apex import amp\nmodel, optimizer = build()\n{START.format(why='')}{LOOP}"
    scale = "amp_C.multi_tensor_scale(65536, buffer, [params, masters], 1.0)"
    left(f"{text}{scale}  # why: amp_C.multi_tensor_scale\n")


@pytest.mark.parametrize("room", ["optimizers", "contrib.optimizers"])
def test_the_optimizers_of_2018_stay_together(room: str) -> None:
    left(f"""\
from apex.{room} import FP16_Optimizer
from apex.optimizers import FusedAdam
optimizer = FusedAdam(params, lr=0.1)
optimizer = FP16_Optimizer(optimizer, dynamic_loss_scale=True)  # why: apex.{room}.FP16_Optimizer
for x in data:
    optimizer.backward(model(x))
    optimizer.step()
""")


# -- what `preamp run` runs


def test_preamp_run_is_advised_for_what_it_runs() -> None:
    assert "preamp run" in by_hand("from apex.parallel import LARC\nopt = LARC(opt)\n")[0][1]
    for other in (
        "apex.contrib.sparsity.ASP",
        "apex.transformer.tensor_parallel",
        "apex.contrib.multihead_attn.SelfMultiheadAttn",
        "apex.nothing.at.all",
    ):
        (_, told), (_, larc) = by_hand(f"import apex\na = {other}\nb = apex.parallel.LARC(b)\n")
        assert "preamp run" not in told and "preamp run" not in larc
    text = f"import apex\nfrom apex import amp\nmodel, optimizer = build()\n{START.format(why='')}{LOOP}"
    text += "log(model.w.grad)\n"
    assert "`preamp run`" in by_hand(text)[0][1]
    (_, told), *_ = by_hand(f"{text}apex.contrib.sparsity.ASP.prune(model)\n")
    assert "preamp run" not in told and "needs NVIDIA's Apex, for apex.contrib" in told


def test_what_preamp_run_has_is_there() -> None:
    for module, names in _RUNS.items():
        door = {"amp_C": "_amp_c", "apex_C": "parallel.distributed"}.get(module, module)
        found = importlib.import_module(f"preamp.compat.apex.{door}".rstrip("."))
        assert all(hasattr(found, name) for name in names), module
        assert runs(f"{module}.{names[0]}" if names else module)
    assert not runs("amp_C.multi_tensor_adam_capturable") and not runs("RNN") and not runs("contrib.sparsity")
    assert not runs("contrib") and runs("contrib.xentropy.SoftmaxCrossEntropyLoss") and runs("mlp.MLP")
    assert "preamp run" in by_hand("import apex\na = apex.mlp.MLP([1, 2])\n")[0][1]


# -- lines


def test_mixed_tabs_have_the_line_that_python_says(tmp_path: Path) -> None:
    text = "from apex import amp\nif 1:\n\tx = 1\n        y = 2\n"
    with pytest.raises(CannotParse, match=r"^s\.py:4: .*tabs"):
        migrate_source(text, "s.py")
    with pytest.raises(CannotParse, match=r"^s\.py:5: .*tabs"):
        migrate_source(
            "from apex import amp\ndef f():\n        if 1:\n            z = 3\n\tx = 1\n\treturn x\n", "s.py"
        )
    tabs = "from apex import amp\ndef f(loss, opt):\n\twith amp.scale_loss(loss, opt) as s:\n\t\ts.backward()\n"
    assert [line for line, _ in by_hand(tabs)] == [3]


# -- size


def test_functions_that_call_functions_a_hundred_deep() -> None:
    chain = "".join(
        f"def f{n}(model, x):\n    return f{n + 1}(model, x) if x else f{n}(model, x)\n" for n in range(150)
    )
    text = f"from apex import amp\n{chain}model, optimizer = build()\n{START.format(why='')}{LOOP}    f0(model, x)\n"
    assert "session.step()" in clean(text)
