"""`preamp migrate`: trainings that become a session's, the same to the last bit, and those that stay Apex's."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from preamp.migrate import migrate_source, run

from .migrations import both, migrated, same_code

pytest.importorskip("libcst")

HEAD = """\
import torch
from torch import nn
from apex import amp

torch.manual_seed(0)
X = [torch.randn(16, 6) for _ in range(20)]
Y = [x[:, :4].argmax(1) for x in X]
losses = []
"""
TOLD = """
print(losses, [v.tolist() for v in model.state_dict().values()])
"""
LOOP = """\
model = nn.Sequential(nn.Linear(6, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.LayerNorm(32), nn.Linear(32, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
model, optimizer = amp.initialize(model, optimizer, opt_level="LEVEL", verbosity=0)
for i, (x, y) in enumerate(zip(X, Y)):
    loss = nn.functional.cross_entropy(model(x), y)
    losses.append(loss.item())
    optimizer.zero_grad()
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()
"""
OVERFLOW = LOOP.replace("model(x), y)", "model(x), y) * (1e5 if i in (3, 4, 9) else 1.0)")
STYLES = {
    "loop": LOOP,
    "overflow": OVERFLOW,
    "function": """\
from torch.optim.lr_scheduler import StepLR

torch.backends.mha.set_fastpath_enabled(False)  # which is float32 with Apex, and not taken in a session's regions


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.attend = nn.Linear(6, 24), nn.MultiheadAttention(8, 2, batch_first=True)
        self.last, self.softmax = nn.Linear(24, 4), nn.Softmax(-1)

    def forward(self, x):
        h = self.first(x).view(-1, 3, 8)
        h = self.softmax(h) * nn.functional.log_softmax(h, -1) * h.exp().sum(-1, keepdim=True).log()
        return self.last((h + self.attend(h, h, h)[0]).flatten(1))


def main():
    model = Net().to("cpu")
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    scheduler = StepLR(optimizer, 2, 0.5)
    model, optimizer = amp.initialize(model, optimizer, opt_level="LEVEL")
    criterion = nn.CrossEntropyLoss()
    for epoch in range(3):
        model.train()
        for step, (x, y) in enumerate(zip(X, Y)):
            # forward
            logits = model(x)
            loss = criterion(logits, y)  # of the batch

            if step % 8 == 0:
                print(loss.item())
            optimizer.zero_grad()
            with amp.scale_loss(loss, optimizer) as scaled:
                scaled.backward()  # now
            optimizer.step()
        scheduler.step()
        model.eval()
        with torch.no_grad():
            correct = 0
            for x, y in zip(X[:3], Y[:3]):
                correct += (model(x).argmax(1) == y).sum().item()
        print(epoch, correct)
        if epoch == 1:
            for group in optimizer.param_groups:
                group["lr"] *= 2
    print([v.tolist() for v in model.state_dict().values()])


if __name__ == "__main__":
    main()
""",
    "accumulation": """\
import apex
if __name__ == "__main__":
    model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.1), nn.Tanh(), nn.Linear(8, 4))
    optimizer = apex.optimizers.FusedAdam(model.parameters(), lr=1e-2)
    model, optimizer = apex.amp.initialize(model, optimizer, opt_level='LEVEL')
    model.zero_grad()
    for i in range(20):
        text = \"\"\"of
several lines\"\"\"
        z = model(X[i])
        loss = nn.functional.binary_cross_entropy_with_logits(
            z, nn.functional.one_hot(Y[i], 4).float())
        with apex.amp.scale_loss(loss / 4, optimizer) as s:
            s.backward()
        losses.append(loss.item())
        if (i + 1) % 4 == 0:
            optimizer.step()
            model.zero_grad()
    print(losses, [v.tolist() for v in model.state_dict().values()])
""",
}
CLIPPED = LOOP.replace(
    "    optimizer.step()",
    "    torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), 0.5)\n    optimizer.step()",
)
LEVELS = ("O0", "O1", "O4")


def script(style: str, level: str = "O1") -> str:
    text = HEAD + style.replace("LEVEL", level)
    return text if "__main__" in style else text + TOLD


@pytest.mark.slow
def test_translated_trainings_are_the_same_to_the_last_bit(tmp_path: Path) -> None:
    scripts = {f"{name}_{level}": script(text, level) for name, text in STYLES.items() for level in LEVELS}
    del scripts["accumulation_O1"]
    before, after = both(
        tmp_path, {name: text for name, text in scripts.items() if name not in ("overflow_O0", "overflow_O4")}
    )
    for text in scripts.values():
        new = migrated(text).after
        assert "scale_loss" not in new and "amp.initialize" not in new and new.count("session.step()") == 1, new
        assert ("install_as_apex" in new) == ("FusedAdam" in new)
    for name, out in before.items():
        told, ours = ([x for x in text.splitlines() if re.match(r"\[|\d", x)] for text in (out, after[name]))
        assert told and told == ours, name


@pytest.mark.slow
def test_clipping_differs_in_last_digits(tmp_path: Path) -> None:
    before, after = both(tmp_path, {level: script(CLIPPED, level) for level in LEVELS})
    for name, out in before.items():
        ours, theirs = (eval(f"[{text.splitlines()[-1].replace('] [', '], [')}]") for text in (after[name], out))
        assert ours[0] == pytest.approx(theirs[0], rel=1e-2 if name == "O4.py" else 1e-3)
        assert len(ours[0]) == 20 and ours[0][-1] < ours[0][0]
    (note,) = migrated(script(CLIPPED)).notes
    assert (
        "rounds once" in note.text
        and note.line == script(CLIPPED)[: script(CLIPPED).index("torch.nn.utils")].count("\n") + 1
    )


def test_the_text_of_a_translation() -> None:
    after = migrated(script(CLIPPED)).after
    assert after.startswith(HEAD.replace("from apex import amp", "import preamp"))
    loop = """session = preamp.prepare(model, optimizer, level="O1")
for i, (x, y) in enumerate(zip(X, Y)):
    with session.autocast():
        loss = nn.functional.cross_entropy(model(x), y)
    losses.append(loss.item())
    session.zero_grad()
    session.backward(loss)
    session.clip_grad_norm_(0.5)
    session.step()
"""
    assert loop in after and "apex" not in after
    once_more = migrated("import preamp\n\npreamp.install_as_apex()\n\n" + script(LOOP)).after
    assert "apex" not in once_more and once_more.count("import preamp") == 1


def swapped(old: str, new: str, text: str = LOOP) -> str:
    """The loop's script with another text in one place, of its head too."""
    whole = script(text)
    assert old in whole
    return whole.replace(old, new)


def inside(head: str, loop: str, end: str) -> str:
    """The loop as the body of a function or a class."""
    return HEAD + head + ("\n" + loop).replace("\n", "\n    ").replace("LEVEL", "O1") + end


STEP, LOSS, ZERO = "    optimizer.step()", "    losses.append", "    optimizer.zero_grad()\n"
START, IMPORT, SGD = "model, optimizer = amp.init", "from apex import amp", "torch.optim.SGD(model.parameters()"
BACKWARD, CLIP = "scaled_loss.backward()", "nn.utils.clip_grad_norm_(amp.master_params(optimizer), "
MODEL, OPTIMIZER, NAME = "model is used here too", "optimizer is used here too", "preamp or session is a name"
CAST_BY_NAME = (
    "torch.softmax(x, 1)", "x.log_softmax(1)", "nn.GELU()(x)", "nn.functional.gelu(x)", "x.std()", "x.square()",
    "torch.einsum('ij,jk', x, y)", "torch.linalg.norm(x)", "torch.kl_div(x, y)", "torch.layer_norm(x, (6,))",
    "nn.functional.scaled_dot_product_attention(x, x, x)", "nn.TransformerEncoderLayer(8, 2, 8, 0.0, 'gelu')",
)  # fmt: skip
"""Functions that Apex, which goes by names, casts otherwise than a session."""
STAYS = [
    # the start
    (swapped('"O1"', '"O2"'), "the level is 'O2'"),
    (swapped('"O1"', "level"), "the level is level"),
    (swapped("verbosity=0", "loss_scale=128.0"), "loss_scale of amp.initialize"),
    (swapped("verbosity=0", "enabled=fp16"), "enabled of amp.initialize"),
    (swapped('"O1", verbosity=0', '"O4", loss_scale="dynamic"'), "loss_scale of amp.initialize"),
    (swapped("verbosity=0", "**options"), "this does not read `model, optimizer = amp.initialize"),
    (swapped(START, "net, opt = amp.init"), "this does not read"),
    (swapped(START, "model.net, optimizer = amp.init"), "this does not read"),
    (swapped(START, f"if fast:\n    {START}"), "under a condition"),
    (swapped(START, f"for stage in range(2):\n    {START}"), "under a condition"),
    (script(STYLES["accumulation"], "O4") + "print(X[0] @ X[0])\n", "under a condition"),
    (swapped(START, f"{START}ialize(model, optimizer)\n{START}"), "calls amp.initialize in 2 places"),
    (inside("def f():", LOOP, "yield\n"), "a generator"),
    (inside("class A:", LOOP, "pass\n"), "a class"),
    # what else is Apex's
    (swapped(IMPORT, f"{IMPORT}\nfrom apex.mlp import MLP\nMLP([2])"), "MLP is no part"),
    (swapped(IMPORT, f"try:\n    {IMPORT}\nexcept ImportError:\n    pass"), "may fail"),
    (swapped(IMPORT, f"from apex.amp import *\n{IMPORT}"), "a star's"),
    (swapped(IMPORT, "import importlib\namp = importlib.import_module('apex.amp')"), "came by no import"),
    (swapped(STEP, f"{STEP}\n    print(amp.state_dict())"), "amp.state_dict is no part"),
    # names
    (swapped(IMPORT, f"{IMPORT}\nimport audio as preamp"), NAME),
    (swapped("losses = []", "losses = []\nfor preamp in X: pass"), NAME),
    (swapped("losses = []", "losses = []\nsession = 1"), NAME),
    (swapped("torch.optim.SGD(", "mine.SGD("), OPTIMIZER),
    (swapped("torch.optim.SGD(", "torch.optim.LBFGS("), OPTIMIZER),
    (swapped(SGD, "torch.optim.SGD(model[0].parameters()"), OPTIMIZER),
    (swapped("for i,", "optimizer = Lookahead(optimizer)\nfor i,"), OPTIMIZER),
    (swapped("for i,", "def f():\n    return optimizer\nfor i,"), OPTIMIZER),
    (swapped(LOSS, f"    optimizer.first_step()\n{LOSS}"), OPTIMIZER),
    (swapped(STEP, "    optimizer.step(closure)"), OPTIMIZER),
    (swapped("model = nn.Seq", "model = net = nn.Seq"), MODEL),
    (swapped("model = nn.Seq", "model_of = nn.Seq"), "where model and optimizer are made"),
    (swapped(START, f"trainer = Trainer(model)\n{START}"), MODEL),
    (swapped("for i,", "model = nn.DataParallel(model)\nfor i,"), MODEL),
    (swapped("for i,", "model.register_forward_hook(f)\nfor i,"), MODEL),
    (swapped("for i,", "save = lambda: model.state_dict()\nfor i,"), MODEL),
    (inside("def f(model):", LOOP[LOOP.index("optim") :], "pass\n"), MODEL),
    # gradients
    (swapped(LOSS, f"    g = torch.autograd.grad(loss, x)\n{LOSS}"), "`autograd` may be about gradients or casts"),
    (swapped(LOSS, f"    g = getattr(x, 'grad')\n{LOSS}"), "may be about gradients"),
    (swapped(LOSS, f"    x = x.double()\n{LOSS}"), "may be about gradients or casts"),
    (swapped(LOSS, f"    other.step()\n{LOSS}"), "`other.step` may be about gradients"),
    (swapped("losses = []", "losses = []\ndef f(p):\n    return p.grad"), "may be about gradients"),
    *((swapped(LOSS, f"    p = {text}\n{LOSS}"), "may be about gradients or casts") for text in CAST_BY_NAME),
    # backward, clip, step, zero
    (swapped(BACKWARD, "scaled_loss.backward(retain_graph=True)"), "this does not read `with amp.scale"),
    (swapped(BACKWARD, "(scaled_loss / 2).backward()"), "this does not read `with amp.scale"),
    (swapped(BACKWARD, f"{BACKWARD}\n        optimizer.step()"), "this does not read"),
    (swapped(BACKWARD, f"# why\n        {BACKWARD}"), "this is not just"),
    (swapped("scale_loss(loss, optimizer)", "scale_loss(loss, optimizer, loss_id=0)"), "this does not read"),
    (swapped("scale_loss(loss, optimizer)", "scale_loss(loss, opt)"), "this is not just"),
    (swapped("scale_loss(loss, optimizer)", "scale_loss(criterion(x), optimizer)"), "this is not just"),
    (swapped(STEP, f"{STEP}\n    print(scaled_loss)"), "this is not just"),
    (swapped(STEP, f"    fix(amp.master_params(optimizer))\n{STEP}"), "this does not read `torch.nn.utils.clip"),
    (swapped(STEP, f"    if amp.master_params(optimizer): pass\n{STEP}"), "this does not read `torch.nn.utils.clip"),
    (swapped(STEP, f"    {CLIP}1.0, 1)\n{STEP}"), "this does not read `torch.nn.utils.clip"),
    (swapped(STEP, f"{STEP}\n    {CLIP}1.0)"), "this stands between"),
    (swapped(STEP, "    if i % 2: optimizer.step()").replace("O1", "O0"), "this stands between"),
    (swapped(START, f"save(amp.initialize)\n{START}"), "calls amp.initialize in 2 places"),
    (HEAD + "save(amp.initialize, amp.scale_loss, amp.master_params)\n", "this does not read `model, optimizer"),
    (swapped(STEP, "    try:\n        optimizer.step()\n    finally:\n        pass"), "this stands between"),
    (script(STYLES["accumulation"]), "at O1 Apex's scale moves without a step"),
    (swapped(STEP, "    if bad(loss):\n        optimizer.step()").replace("O1", "O4"), "the step's condition computes"),
    (swapped(STEP, "optimizer.step()"), "no optimizer.step() follows"),
    (swapped(STEP, "    pass"), "one step"),
    (swapped(ZERO, ""), "a zero_grad()"),
    (swapped(STEP, f"{ZERO}{STEP}"), "this stands between"),
    (swapped(ZERO, "    fix(x); optimizer.zero_grad()\n"), "one line has several"),
    (swapped(ZERO, f"    with fix():\n    {ZERO}"), "in a with"),
    (swapped(ZERO, f"    if fix(x):\n    {ZERO}"), "the condition computes"),
    *(
        (swapped(STEP, f"    {text}\n{STEP}"), "this stands between backward and step")
        for text in ("fix(list(X))", "model(x)", "y @ y", "if fix(): pass", "for p in ps: fix(p)", "agent.train()")
    ),
]


@pytest.mark.parametrize("at", range(len(STAYS)))
def test_what_stays_apexs_and_why(at: int) -> None:
    text, why = STAYS[at]
    found = (
        migrated(text) if at % 8 == 0 else migrate_source(text, "s.py")
    )  # a second rewriting costs what the first does
    assert same_code(found), found.diff()
    told = [note.text for note in found.notes if note.text.startswith("Apex's calls stay, since ")]
    assert len(told) == 1 and why in told[0], (text, told)
    assert "# preamp: " in found.after


BESIDE = {
    "imports its amp": ("main.py", "from train import amp\n"),
    "imports all of it": ("main.py", "import train\ntrain.amp.state_dict()\n"),
    "casts": ("model.py", "from apex import amp\namp.register_float_function(torch, 'matmul')\n"),
    "a layer of Apex": ("layers/norms.py", "import apex.normalization\n"),
    "an extension": ("model.py", "import fused_layer_norm_cuda\n"),
    "not of Python 3": ("old.py", "print 'apex'\n"),
    "latin 1": ("old.py", "# caf\u00e9: apex\n"),
}


@pytest.mark.parametrize("alone", [True, False], ids=["by itself", "with its folder"])
@pytest.mark.parametrize("what", BESIDE)
def test_calls_stay_apexs_where_another_file_may_have_to_do_with_it(tmp_path: Path, what: str, alone: bool) -> None:
    name, text = BESIDE[what]
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text(text, encoding="latin-1")
    train = tmp_path / "train.py"
    train.write_text(script(LOOP))
    for _ in range(2):  # the second time the other file is rewritten
        said, _ = run([train] if alone else [tmp_path], write=True)
        assert f"Apex's calls stay, since {tmp_path / name} may have to do with Apex, too" in said
        assert "from apex import amp" in train.read_text() and "install_as_apex()" in train.read_text()


def test_other_files_are_no_hindrance(tmp_path: Path) -> None:
    """Not one without Apex, an environment's, nor the script itself by another name; and a package is one project."""
    for name in (".venv/lib/apex_user.py", "package/other.py", "other.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).write_text("import apex\n" if name.startswith(".venv") else "example = 'x'\n")
    train = tmp_path / "package" / "train.py"
    (tmp_path / "link.py").symlink_to(train)
    (tmp_path / "package" / "__init__.py").write_text("")
    train.write_text(script(LOOP))
    assert "session.step()" in run([train])[0]
    (tmp_path / "other.py").write_text("import apex\n")
    assert "other.py may have to do with Apex" in run([train])[0]
