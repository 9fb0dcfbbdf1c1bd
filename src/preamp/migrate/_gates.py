"""Where a script asks whether there is an Apex: without one it goes on in float32, and says nothing."""

from __future__ import annotations

import re
from collections.abc import Iterator

import libcst as cst

from ._names import COMPILED, Names, apex_name, dotted, imported, walk

_PACKAGES = re.compile(rf"^(apex(\.\w+)*|{'|'.join(COMPILED)})$")
_FINDERS = re.compile(r"import|spec|loader|distribution|package|module|version|require|avail|installed", re.I)
_ASKS = re.compile(
    r"(avail|install|exist|found|has|have|import|support)\w*apex|apex\w*(avail|install|exist|found|import)", re.I
)


def by_text(names: Names) -> Iterator[tuple[cst.CSTNode, str]]:
    """Places that name Apex in a text, for an import or to look for it: `import_module("apex.amp")`."""
    for node in names.nodes:
        if not isinstance(node, cst.SimpleString) or not isinstance(node.evaluated_value, str):
            continue
        if _PACKAGES.match(node.evaluated_value) is None:
            continue
        arg = names.parent(node)
        around = names.parent(arg) if arg is not None else None
        if isinstance(arg, cst.Arg) and isinstance(around, cst.Call):
            if _FINDERS.search((dotted(around.func) or "").rpartition(".")[2]) is not None:
                yield around, names.code(around)
            continue
        kinds = (cst.Comparison, cst.Subscript, cst.BaseStatement)
        whole = next((each for each in names.around(node) if isinstance(each, kinds)), None)
        if isinstance(whole, (cst.Comparison, cst.Subscript)) and "sys.modules" in names.code(whole):
            yield whole, names.code(whole)


def hidden(names: Names) -> Iterator[tuple[cst.CSTNode, str]]:
    """Calls that are Apex's by their name, but whose `amp` is handed over, or comes from another file."""
    for node in names.nodes:
        if not isinstance(node, cst.Call) or not isinstance(node.func, cst.Attribute) or names.apex(node.func):
            continue
        text = names.code(node.func)
        if node.func.attr.value in ("scale_loss", "master_params") or text.endswith("amp.initialize"):
            yield node, text


def questions(names: Names) -> Iterator[tuple[cst.CSTNode, str]]:
    """Uses of what other files say about Apex: `is_apex_available()`, `HAS_APEX`."""
    for node in names.nodes:
        if not isinstance(node, (cst.Name, cst.Attribute)):
            continue
        parent = names.parent(node)
        if isinstance(parent, (cst.ImportAlias, cst.AsName, cst.Attribute)):
            continue
        if any(_ASKS.search(q.rpartition(".")[2]) and apex_name(q) is None for q in names.qualified(node)):
            yield node, names.code(node)


def fallbacks(module: cst.Module) -> Iterator[tuple[cst.Try, set[str]]]:
    """Every `try` that imports of Apex, and goes on where there is none; with the names that it imports."""
    for node in walk(module):
        if not isinstance(node, cst.Try) or not node.handlers or all(_ends(each) for each in node.handlers):
            continue
        found = {q for each in walk(node.body) for _, q, _ in imported(each) if apex_name(q) is not None}
        if found:
            yield node, found


def _ends(handler: cst.ExceptHandler) -> bool:
    """Whether a handler leaves the script."""
    for statement in handler.body.body:
        for small in statement.body if isinstance(statement, cst.SimpleStatementLine) else [statement]:
            if isinstance(small, cst.Raise):
                return True
            called = small.value.func if isinstance(small, cst.Expr) and isinstance(small.value, cst.Call) else None
            if dotted(called) in ("exit", "quit", "sys.exit", "os._exit"):
                return True
    return False
