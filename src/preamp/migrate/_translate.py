"""Apex's calls as a session's, where the whole training stands in one place and is the same to the last bit.

Apex casts all functions from `amp.initialize` on; a session casts in its regions: they take in whatever follows. A
session's gradients are scaled from backward to step: only what is known stands there, or holds model and optimizer.
"""

from __future__ import annotations

import re
from typing import Any

import libcst as cst
import libcst.matchers as m

from ._notes import Note
from ._script import Edit, Reference, Script, apex_name, imported, walk

_GRADIENTS = re.compile(r"grad|backward|hook|unscale|autocast|double|float64", re.I)
_CAST_BY_NAME = re.compile(
    r"(?!self\.\w+$|numpy\.|torch\.nn\.functional\.(log_)?softmax$).*\.((log_)?softmax|logsumexp|log1p|std|var|square|trace|"
    r"cov|corrcoef|arc(cos|sin)|ldexp|matrix_exp|mvlgamma|slice_scatter|sum_to_size|einsum|gelu|GELU|(linalg|special)\.\w+|"
    r"huber_loss|HuberLoss|rms_norm|RMSNorm|pairwise_distance|PairwiseDistance|chain_matmul|scaled_dot_product_attention)|"
    r"torch\.([cp]dist|trap\w+|cumulative\w+|norm_\w+|\w+_(norm|loss|div|logits|similarity))", re.S,
)  # fmt: skip
"""Functions, methods and modules that a session casts otherwise than Apex, which goes by names."""
_NO_GRADIENTS = ("no_grad", "set_grad_enabled", "requires_grad", "requires_grad_", "max_grad_norm", "zero_grad")
_BUILTINS = ("print", "len", "range", "enumerate", "zip", "list", "int", "float", "str", "time")
_METHODS = (".append", ".item", ".format", ".time", ".perf_counter", ".get_last_lr")
"""Functions and methods that compute nothing that Apex casts, and leave gradients alone."""
_STATEMENT = (cst.BaseSmallStatement, cst.BaseCompoundStatement)
_CAST = (cst.MatrixMultiply, cst.MatrixMultiplyAssign, cst.Power, cst.PowerAssign)
_BEFORE = ("to", "cuda", "cpu", "train", "eval", "apply", "load_state_dict")
_OPTIMIZER = re.compile(r"torch\.optim\.(?!LBFGS|SparseAdam)[A-Z]\w+$|apex\.optimizers\.(\w+\.)?Fused\w+$")
_PLAIN = m.Arg(m.Name(), None, star="")
_START = m.Assign([m.AssignTarget()], m.Call(args=[_PLAIN, _PLAIN, m.ZeroOrMore(m.Arg(keyword=m.Name()))]))
_BACKWARD = m.SimpleStatementLine([m.Expr(m.Call(m.Attribute(m.Name(), m.Name("backward")), []))])
_SCALED = m.With(
    [m.WithItem(m.Call(args=[m.Arg(star="", keyword=None), _PLAIN]), m.AsName(m.Name()))], m.IndentedBlock([_BACKWARD])
)
_CLIPPED = m.Expr(m.Call(args=[m.Arg(m.Call(args=[_PLAIN]), None, star=""), m.Arg(star="", keyword=None)]))
_MAIN = m.If(m.Comparison(m.Name("__name__"), [m.ComparisonTarget(m.Equal(), m.SimpleString())]))


class Stays(Exception):
    """(node, reason): where and why the calls of a script stay Apex's; node None: it has none to translate."""


def need(found: object, node: cst.CSTNode | None, reason: str) -> None:
    """`Stays` where a check has not found what it needs."""
    if not found:
        raise Stays(node, reason)


def translated(script: Script, references: list[Reference]) -> tuple[str, list[Note]]:
    """The text with a session in place of Apex's calls, and what there is to know of it; `Stays` if it is not sure."""
    found = _Translation(script, references)
    for check in (found.start, found.calls, found.names, found.gradients, found.order, found.imports):
        check()
    found.region(found.behind(script.parent(found.statement)))
    text = "clipping and unscaling are one multiplication now, which rounds once: last digits differ"
    notes = [Note(script.start(node)[0], text) for node, kind in found.acts.items() if kind == "clip"]
    return script.edited(found.edits, found.indented), notes


class _Translation:
    """The checks, one after the other, and the edits that they find to be right."""

    def __init__(self, script: Script, references: list[Reference]) -> None:
        self.script, self.references = script, references
        self.acts: dict[cst.CSTNode, str] = {}  # "start", "backward", "clip", "step", "zero": the session's statements
        self.known: set[cst.CSTNode] = set()  # everything in those statements
        self.kept: set[str] = set()  # names of Apex's optimizers, which stay
        self.bound: set[str] = set()  # the model's and the optimizer's name, once it is seen where they are made
        self.schedulers: set[str] = set()
        self.imported = {inner for node, _, _ in script.imports() for inner in walk(node)}
        lines = (each for each in script.module.body if isinstance(each, cst.SimpleStatementLine))
        self.installed = [each for each in lines if script.code(each.body[0]) == "preamp.install_as_apex()"]
        self.edits: list[Edit] = []
        self.indented: set[int] = set()

    def act(self, node: cst.CSTNode, kind: str, text: str, end: cst.CSTNode | None = None) -> None:
        """Put a text of the session's in place of a statement."""
        need(self.script.frame(node) is self.place, node, "this is in another function than amp.initialize")
        self.acts[node] = kind
        self.known.update(walk(node))
        self.edits.append(Edit(self.script.start(node), self.script.end(end or node), text))

    def start(self) -> None:
        """One `model, optimizer = amp.initialize(model, optimizer)`, at a level that means the same in preamp."""
        script, amp = self.script, [each for each in self.references if each.name.startswith("amp.")]
        starts = [each.node for each in amp if each.name == "amp.initialize"]
        need(len(starts) == 1, amp[0].node if amp else None, f"this file calls amp.initialize in {len(starts)} places")
        call: Any = script.parent(starts[0])
        self.statement, self.place = statement, place = script.parent(call), script.frame(call)
        plain = isinstance(call, cst.Call) and m.matches(statement, _START)
        pair = ", ".join(script.code(arg.value) for arg in call.args[:2]) if plain else ""
        plain = plain and script.code(statement).startswith(f"{pair} = ")
        need(plain, starts[0], "this does not read `model, optimizer = amp.initialize(model, optimizer, ...)`")
        self.model, self.optimizer = pair.split(", ")
        block = script.parent(script.parent(statement))
        around = script.parent(block)
        plain = place in (block, around) or (m.matches(around, _MAIN) and around is script.module.body[-1])
        waits = isinstance(place, cst.ClassDef) or any(isinstance(x, (cst.Yield, cst.Await)) for x in walk(place))
        need(plain and not waits, call, "amp.initialize is called under a condition, in a class or a generator")
        given = {arg.keyword.value: script.code(arg.value).replace('"', "'") for arg in call.args[2:]}
        level = given.get("opt_level", "'O1'")
        need(level in ("'O0'", "'O1'", "'O4'"), call, f"the level is {level}: only O0, O1 and O4 train as Apex does")
        self.is_scaled = level == "'O1'"
        usual = {"opt_level": level, "loss_scale": "'dynamic'" if self.is_scaled else "None", "verbosity": ""}
        more = [word for word, text in given.items() if text != usual.get(word) and word != "verbosity"]
        need(not more, call, f"{', '.join(more)} of amp.initialize changes how Apex trains")
        own = self.imported | {inner for line in self.installed for inner in walk(line)}
        used = {each.value for each in script.nodes if isinstance(each, cst.Name) and each not in own}
        used |= {local for _, name, local in script.imports() if name != "preamp"}
        need(used.isdisjoint(("preamp", "session")), call, "preamp or session is a name of something else in this file")
        self.act(statement, "start", f"session = preamp.prepare({pair}, level={level})".replace("'", '"'))

    def calls(self) -> None:
        """All that is Apex's stands in that function: backward, clipping, and optimizers, which stay."""
        script = self.script
        for each in self.references:
            code = script.code(each.node)
            why = "is not in the function that calls amp.initialize" if each.imported else "came by no import"
            need(each.imported and script.frame(each.node) is self.place, each.node, f"{code} {why}")
            small = next(x for x in script.around(each.node) if isinstance(x, _STATEMENT))
            if each.name.startswith("optimizers.Fused"):
                self.kept.add(code.partition(".")[0])
            elif each.name == "amp.scale_loss":
                self.backward(small)
            elif each.name == "amp.master_params":
                self.clip(small, each.node)
            else:
                need(each.name == "amp.initialize", each.node, f"{code} is no part of the loop that is translated")
        for node in script.nodes:
            code = script.code(node) if isinstance(node, cst.Expr) else ""
            if code == f"{self.optimizer}.step()":
                self.act(node, "step", "session.step()")
            elif code in (f"{self.optimizer}.zero_grad()", f"{self.model}.zero_grad()"):
                self.act(node, "zero", "session.zero_grad()")

    def backward(self, node: Any) -> None:
        """`with amp.scale_loss(loss, optimizer) as scaled: scaled.backward()`, the loss computed before."""
        script, wanted = self.script, "with amp.scale_loss(loss, optimizer) as scaled: scaled.backward()"
        need(m.matches(node, _SCALED), node, f"this does not read `{wanted}`")
        inner, name = node.body.body[0].body[0], script.code(node.items[0].asname.name)
        loss, optimizer = (arg.value for arg in node.items[0].item.args)
        same = script.code(inner) == f"{name}.backward()" and script.code(optimizer) == self.optimizer
        lost = node.body.header.comment or any(each.comment for each in node.body.body[0].leading_lines)
        once = len(script.accesses(node, name)) == 2 and self.is_harmless(loss)
        need(same and once and not lost, node, f"this is not just `{wanted}` of a loss that is there already")
        self.act(node, "backward", f"session.backward({script.code(loss)})", inner)

    def clip(self, node: Any, master_params: cst.CSTNode) -> None:
        """`torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), max_norm)`."""
        plain = m.matches(node, _CLIPPED) and "torch.nn.utils.clip_grad_norm_" in self.script.qualified(node.value.func)
        plain = plain and node.value.args[0].value.func is master_params
        need(plain, node, "this does not read `torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), max_norm)`")
        self.act(node, "clip", f"session.clip_grad_norm_({self.script.code(node.value.args[1].value)})")

    def names(self) -> None:
        """Nothing else holds the model or the optimizer."""
        for name in (self.optimizer, self.model):
            for node in self.script.accesses(self.statement, name):
                known = node in self.known or (self.script.frame(node) is self.place and self.is_known(node, name))
                need(known, node, f"{name} is used here too, and what becomes of its gradients is not known")
        need(len(self.bound) == 2, self.statement, "where model and optimizer are made is not in sight")

    def is_known(self, node: cst.CSTNode, name: str) -> bool:
        """Whether a use of the model or the optimizer leaves gradients alone."""
        script, before = self.script, self.script.start(node) < self.script.start(self.statement)
        chain: list[Any] = [*script.around(node), script.module, script.module]
        parent, around, holder = chain[:3]
        is_model = name == self.model
        if isinstance(parent, cst.Attribute) and parent.value is node:
            if before and is_model and parent.attr.value == "parameters":
                return self.is_optimizer(script.parent(holder))
            usual = ("train", "eval", "state_dict") if is_model else ("param_groups", "state_dict")
            return parent.attr.value in (_BEFORE if before else usual)
        if isinstance(around, cst.Assign) and isinstance(parent, cst.AssignTarget):
            self.bound.add(name)
            return before and len(around.targets) == 1 and (is_model or self.is_optimizer(around.value))
        if isinstance(around, cst.Call) and isinstance(holder, cst.Assign) and not is_model:
            self.schedulers |= {script.code(each.target) for each in holder.targets}
            return any(each.startswith("torch.optim.lr_scheduler.") for each in script.qualified(around.func))
        return isinstance(parent, cst.Call) and parent.func is node and is_model and not before

    def is_optimizer(self, value: Any) -> bool:
        """Whether an expression makes an optimizer of torch's or Apex's, of all the model's parameters."""
        given = [self.script.code(arg.value) for arg in value.args[:1]] if isinstance(value, cst.Call) else []
        return given == [f"{self.model}.parameters()"] and any(map(_OPTIMIZER.match, self.script.qualified(value.func)))

    def gradients(self) -> None:
        """Nothing else in the file reads gradients, makes or steps them, or casts."""
        for node in (each for each in self.script.nodes if each not in self.known | self.imported):
            text = node.value if isinstance(node, (cst.Name, cst.SimpleString)) else ""
            doubtful = _GRADIENTS.search(text) is not None and text not in _NO_GRADIENTS
            if isinstance(node, cst.Attribute) and node.attr.value in ("step", "zero_grad"):
                doubtful = self.script.code(node.value) not in self.schedulers
            elif isinstance(node, cst.SimpleString):
                doubtful = text[1:-1] in ("grad", "gelu")
            named = self.script.qualified(node) or ([self.script.code(node)] if isinstance(node, cst.Attribute) else [])
            doubtful = doubtful or any(map(_CAST_BY_NAME.fullmatch, named))
            need(not doubtful, node, f"`{self.script.code(node)}` may be about gradients or casts")

    def order(self) -> None:
        """Backward, clipping, step, and nothing between them that could see scaled gradients."""
        kinds = list(self.acts.values())
        whole = kinds.count("backward") == kinds.count("step") == 1 and "zero" in kinds
        need(whole, self.statement, "there is not one backward pass and one step, and a zero_grad()")
        node = next(node for node, kind in self.acts.items() if kind == "backward")
        rest, clips = self.behind(node), kinds.count("clip")
        while rest:
            statement = rest.pop(0)
            acts = [self.acts[each] for each in walk(statement) if each in self.acts]
            if isinstance(statement, cst.If) and "step" in acts and statement.orelse is None:
                plain = self.is_harmless(statement.test) and not self.is_scaled
                need(plain, statement, "the step's condition computes, or at O1 Apex's scale moves without a step")
                rest = list(statement.body.body)
                continue
            clips -= acts.count("clip")
            if acts == ["step"] and isinstance(statement, cst.SimpleStatementLine) and not clips:
                return
            known = acts == ["clip"] or (not acts and self.is_harmless(statement))
            need(known, statement, "this stands between backward and step, where a session's gradients are scaled")
        raise Stays(node, "no optimizer.step() follows in the same block")

    def behind(self, node: cst.CSTNode) -> list[Any]:
        """The statements that follow in the same block."""
        body = list(getattr(self.script.parent(node), "body", ()))
        return body[body.index(node) + 1 :]

    def is_harmless(self, node: cst.CSTNode) -> bool:
        """Whether nothing is computed that Apex casts, and no gradient is touched."""
        own = (f"{self.model}.train", f"{self.model}.eval", *(f"{each}.step" for each in self.schedulers))
        called = [self.script.code(each.func) for each in walk(node) if isinstance(each, cst.Call)]
        casts = any(isinstance(each, _CAST) for each in walk(node))
        return not casts and all(name in _BUILTINS or name in own or name.endswith(_METHODS) for name in called)

    def region(self, body: list[Any]) -> None:
        """`with session.autocast():` around what a block computes; inside of the statements that the session is in."""
        run: list[Any] = []
        for statement in [*body, None]:
            acts = statement is not None and any(each in self.acts for each in walk(statement))
            if statement is not None and not acts and not isinstance(statement, (cst.FunctionDef, cst.ClassDef)):
                run.append(statement)
                continue
            doing = [each for each in run if not self.is_harmless(each)]
            run = []
            if doing:
                (begin, _), (end, column) = self.script.start(doing[0]), self.script.end(doing[-1])
                line = f"{self.script.indentation(begin)}with session.autocast():{self.script.newline}"
                self.edits.append(Edit((begin, 0), (begin, 0), line))
                self.indented |= {*range(begin, end + (1 if column else 0))}
            if acts and statement not in self.acts:
                self.inside(statement)

    def inside(self, statement: Any) -> None:
        """Regions in the blocks of a statement that the session acts in."""
        if isinstance(statement, cst.SimpleStatementLine):
            known = all(each in self.acts or self.is_harmless(each) for each in statement.body)
            need(known, statement, "one line has several statements")
            return
        parts = [statement, *([statement.orelse] if getattr(statement, "orelse", None) is not None else [])]
        plain = all(isinstance(part.body, cst.IndentedBlock) for part in parts)
        plain = plain and isinstance(statement, (cst.For, cst.While, cst.If))
        need(plain, statement, "the training stands in a with, in a try or in one line with others")
        known = isinstance(statement, cst.For) or self.is_harmless(statement.test)
        need(known, statement, "the condition computes something that Apex may cast")
        self.region(list(statement.body.body))
        for part in parts[1:]:
            self.inside(part) if isinstance(part, cst.If) else self.region(list(part.body.body))

    def imports(self) -> None:
        """`import preamp` for the imports of what is not used any more; with optimizers of Apex they stay."""
        script, lines = self.script, []
        for node in dict.fromkeys(node for node, name, _ in script.imports() if apex_name(name) is not None):
            brought, around = list(imported(node)), script.parent(script.parent(script.parent(node)))
            plain = around in (script.module, self.place) and all(local != "*" for _, local in brought)
            need(plain, node, "the import of Apex may fail, or is a star's")
            if self.kept.isdisjoint(local for _, local in brought) and None not in [apex_name(n) for n, _ in brought]:
                lines.append(script.parent(node))
        lines += [] if self.kept else self.installed
        wanted = not self.kept and not self.installed
        for line in (each for each in lines if isinstance(each, cst.SimpleStatementLine)):
            need(len(line.body) == 1, line, "one line has several statements")
            (first, _), last = script.start(line.body[0]), script.end(line.body[0])[0]
            last += line in self.installed and not "".join(script.lines[last : last + 1]).strip()
            text = f"{script.indentation(first)}import preamp{script.newline}" if wanted else ""
            wanted = False
            self.edits.append(Edit((first, 0), (last, len(script.lines[last - 1])), text))
