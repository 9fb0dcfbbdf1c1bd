"""One file: its calls translated if that is sure; else it runs on preamp's Apex, with a comment at each call."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable

import libcst as cst

from ._notes import COMPILED, LINES, OPTIONS, Migration, Note, lacking
from ._script import IMPORTERS, Edit, Script, apex_name, dotted, imported, walk
from ._translate import Stays, need, translated

_MENTIONED = re.compile(rf"\b(apex|scale_loss|{'|'.join(COMPILED)})\b")
_APEX_TEXT = re.compile(rf"(?:^| )(?:apex|{'|'.join(COMPILED)})(?:[.: ]|$)|(?:import|from) +apex\b")
_MARK = "# preamp: "
_INSTALL = "preamp.install_as_apex"


def migrate_text(source: str, filename: str, beside: Iterable[tuple[str, str]]) -> Migration:
    """See `migrate_source`."""
    if _MENTIONED.search(source) is None:
        return Migration(filename, source, source, uses_apex=False)
    script = Script(source, filename)
    references = script.references()
    if not references and not _imports_apex(script):
        return Migration(filename, source, source, uses_apex=False)
    notes = _lacking(script)
    text = source
    try:
        changed, told = translated(script, references)
        names = "|".join(local for _, name, local in script.imports() if apex_name(name) is not None)
        for other, theirs in beside:
            apart = re.search(rf"{_MENTIONED.pattern}|\b({names})\b", theirs) is None
            need(apart, references[0].node, f"{other} may have to do with Apex, too")
        text, notes = changed, notes + told
    except Stays as why:
        node, reason = why.args
        notes += [] if node is None else [Note(script.start(node)[0], f"Apex's calls stay, since {reason}")]
    new = script if text == source else Script(text, filename)
    after = new.edited([*_comments(new), *_install(new)])
    return Migration(filename, source, after, tuple(sorted(notes, key=lambda note: note.line)))


def _imports_apex(script: Script) -> bool:
    """Whether the file imports, or looks for, something of Apex, in statements or by texts."""
    found = any(apex_name(name) is not None and name.partition(".")[0] != "preamp" for _, name, _ in script.imports())
    computed = False
    for call, text in script.by_text():
        found |= _APEX_TEXT.search(text) is not None
        computed |= not text and (dotted(call.func) or "").endswith(("import_module", "__import__"))
    strings = (str(each.evaluated_value) for each in script.nodes if isinstance(each, cst.SimpleString))
    return found or (computed and any(re.fullmatch(r"apex(\.\w*)*", text) for text in strings))


def _install(script: Script) -> list[Edit]:
    """`preamp.install_as_apex()` before the first import that may bring Apex in; nothing where it is there already."""
    place = _place(script) if _imports_apex(script) else None
    if place is None:
        return []
    if isinstance(place, (cst.FunctionDef, cst.ClassDef)) and place.decorators:
        place = place.decorators[0]
    row, column = script.start(place)
    first = script.first_line[row]
    if script.lines[row - 1][:column].strip() or first != row:
        return [Edit((row, column), (row, column), f"import preamp; {_INSTALL}(); ")]
    above = first
    while above - 1 in script.own_comments:
        above -= 1
    first = first if above == 1 else above  # comments at the head are the file's
    end = script.newline
    blank = end if first > 1 and script.lines[first - 2].strip() else ""
    lines = f"import preamp{end}{end}{_INSTALL}()  # `import apex` finds preamp's from here on{end}{end}"
    return [Edit((first, 0), (first, 0), blank + lines)]


def _place(script: Script) -> cst.CSTNode | None:
    """The first statement that may import more than the standard library; None if Apex is installed before it."""
    for statement in script.module.body:
        parts = statement.body if isinstance(statement, cst.SimpleStatementLine) else [statement]
        for part in parts:
            if script.code(part).rstrip("; ") in (f"{_INSTALL}()", "install_as_apex()"):
                return None
            if any(_may_import(node) for node in walk(part)):
                return part
    return None


def _may_import(node: cst.CSTNode) -> bool:
    if isinstance(node, cst.Call):
        return (dotted(node.func) or "").rpartition(".")[2] in IMPORTERS
    names = {name for name, _ in imported(node)} - {"preamp", _INSTALL}
    return any(name.partition(".")[0] not in sys.stdlib_module_names for name in names)


def _lacking(script: Script) -> list[Note]:
    """Imports of what preamp's Apex does not have; where a `try` is around them, the script knows what to do."""
    notes = []
    for node, name, _ in script.imports():
        module = lacking(apex_name(name) or "")
        if module is not None:
            tried = any(isinstance(each, (cst.Try, cst.TryStar)) for each in script.around(node))
            then = "the script goes on as where it is not installed" if tried else "take it out, or install NVIDIA's"
            notes.append(Note(script.start(node)[0], f"preamp's Apex has no {module}: {then}", not tried))
    return notes


def _comments(script: Script) -> list[Edit]:
    """A comment with the line of preamp's own API above each line that calls Apex; those that are there go."""
    wanted: dict[int, list[str]] = {}
    for reference in script.references():
        if reference.name in LINES and not any(isinstance(x, cst.ExceptHandler) for x in script.around(reference.node)):
            row = script.first_line[script.start(reference.node)[0]]
            text = _MARK + _filled(script, reference.node, LINES[reference.name])
            wanted.setdefault(row, []).append(f"{script.indentation(row)}{text}{script.newline}")
    marked = (row for row, comment in script.own_comments.items() if comment.startswith(_MARK))
    edits = [Edit((row, 0), (row, len(script.lines[row - 1])), "") for row in marked]
    return edits + [Edit((row, 0), (row, 0), "".join(dict.fromkeys(texts))) for row, texts in wanted.items()]


def _filled(script: Script, node: cst.BaseExpression, line: str) -> str:
    """A row of `LINES` with the arguments of the call."""
    call = script.parent(node)
    args = call.args if isinstance(call, cst.Call) and call.func is node else ()
    given = {arg.keyword.value if arg.keyword else str(at): script.code(arg.value) for at, arg in enumerate(args)}
    rows = (("loss", "0"), ("models", "0"), ("optimizers", "1"), ("opt_level", "3"))
    texts = {word: given.get(word, given.get(place, "...")) for word, place in rows}
    if texts["optimizers"] == "..." and given and not any(arg.star for arg in args):  # it is for inference
        texts["optimizers"] = "None"
    more = [f", {text.format(given[word])}" for word, text in OPTIONS.items() if given.get(word, "None") != "None"]
    return " ".join(line.format(**texts, more="".join(more)).split())
