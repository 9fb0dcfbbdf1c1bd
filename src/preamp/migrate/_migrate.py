"""One file: find what it does with Apex, plan, rewrite, tidy up."""

from __future__ import annotations

import re
import warnings

import libcst as cst

from ._classes import REPLACEMENTS, refusal, translated
from ._doubts import Doubts
from ._edits import Apply, Edits
from ._gates import by_text, fallbacks, hidden, questions
from ._imports import STARS, tidied
from ._made import Made
from ._meanings import spread_meanings
from ._names import COMPILED, Names, apex_name, calls, imported, shown
from ._notes import KEEP, CannotParse, Migration, Note, advice, runs
from ._scopes import Scopes
from ._sessions import Plan, Sessions, find_plans
from ._starts import Starts, shared_globals
from ._uses import Uses

_FIRST = ("optimizers.FP16_Optimizer", "contrib.optimizers")
"""The mixed precision of 2018, whose optimizers are made for one another."""
_OF_SESSIONS = ("amp.", "fp16_utils", "multi_tensor_apply", "parallel.Reducer", "amp_C", "apex_C", *_FIRST)
"""What works on a session's gradients, or shares its state: a file that keeps it keeps its sessions."""
_MENTIONED = re.compile(rf"\b(apex|scale_loss|{'|'.join(COMPILED)})\b")


def migrate_text(source: str, filename: str) -> Migration:
    """See `migrate_source`."""
    module = _parsed(source, filename)
    if _MENTIONED.search(source) is None:
        return Migration(filename, source, source, uses_apex=False)
    names = Names(module)
    brought = (apex_name(qualified) for node in names.nodes for _, qualified, _ in imported(node))
    by_import = any(name is not None for name in brought) or any(True for _ in names.apex_references())
    if not by_import and not any(True for _ in (*by_text(names), *hidden(names))):
        return Migration(filename, source, source, uses_apex=False)
    edits, plans = _planned(names)
    work = edits.expressions or edits.statements or edits.regions or edits.before or edits.arguments
    after = tidied(names.module.visit(Apply(names, edits)).code if work else source)
    if _compiles(source) is None and (error := _compiles(after)) is not None:
        raise AssertionError(f"{filename}: the translation does not parse, line {error.lineno}: {error.msg}")
    _late_doubts(names, plans, edits, after)
    stays = edits.doubts and (plans or any(what.startswith(_FIRST) for _, what in names.apex_references()))
    if stays:
        after = source
    notes = {*_left(names, edits.doubts)} if stays else {*edits.notes, *edits.doubts}
    told = {note.line for note in notes}
    notes |= {note for note in _silent(names, after) if note.line not in told}
    return Migration(filename, source, after, tuple(sorted(notes, key=lambda note: (note.line, note.seen))))


def _parsed(source: str, filename: str) -> cst.Module:
    try:
        return cst.parse_module(source)
    except cst.ParserSyntaxError as error:
        own = _compiles(source)  # libcst gives no line for mixed tabs and spaces
        line, why = (error.raw_line, error.message) if own is None else (own.lineno, own.msg)
        raise CannotParse(f"{filename}:{line}: not Python: {why.splitlines()[0]}; mend the line first") from error


def _compiles(text: str) -> SyntaxError | None:
    """Why this interpreter would not take a text; None if it does."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            compile(text, "script", "exec", dont_inherit=True)
        except SyntaxError as error:
            return error
    return None


def _late_doubts(names: Names, plans: list[Plan], edits: Edits, after: str) -> None:
    """What can be told only from the translation: sessions that nobody gets, imports that stay."""
    for plan in plans:
        if re.search(rf"\b{plan.name}\b(?! = preamp\.prepare\()(?=[.,)\]=])", after) is not None:
            continue
        begin = names.line(plan.call)
        alone = plan.scope.node is names.module and not any(names.line(c) > begin for c in calls(names.module))
        (edits.say if alone else edits.doubt)(
            plan.call,
            f"{plan.text} is used nowhere in this file",
            "hand it on to what trains (return it, or keep it as an attribute), which then writes session.autocast(), "
            "session.backward(loss) and session.step()",
        )
    staying = set().union(*(found for _, found in fallbacks(cst.parse_module(after))))
    for node, found in fallbacks(names.module):
        if plans and found & staying:
            edits.doubt(
                node,
                f"an import of {', '.join(sorted(found & staying))} that may fail stays",
                "the script would go on without mixed precision where there is no Apex: take out what needs the import",
            )


def _left(names: Names, doubts: list[Note]) -> list[Note]:
    """The notes of a file that is left as it is; the first says what to do about it."""
    missing = sorted({shown(what) for _, what in names.apex_references() if not runs(what)})
    rest = f"till then it needs NVIDIA's Apex, for {', '.join(missing)}" if missing else KEEP
    left = "this file is left as it is"
    by_line: dict[int, Note] = {}
    for note in doubts:
        by_line.setdefault(note.line, note)
    first, *others = [by_line[line] for line in sorted(by_line)]
    told = [Note(first.line, first.seen, f"{first.write}; {left}: settle all by-hand notes and migrate again, {rest}")]
    return told + [Note(note.line, note.seen, f"{note.write}; {left}") for note in others]


def _silent(names: Names, after: str) -> list[Note]:
    """A word about scripts that go on without Apex where they do not find it."""
    staying = set().union(*(found for _, found in fallbacks(cst.parse_module(after))))
    told = []
    for node, found in fallbacks(names.module):
        kept = sorted(found & staying)
        if kept:
            ours = all(runs(apex_name(each) or "") for each in kept)
            way = "start it with `preamp run`, which has them" if ours else "let the ImportError through"
            seen = f"where {', '.join(kept)} cannot be imported, the script goes on without"
            told.append(Note(names.line(node), seen, f"and may train in float32: {way}", False))
    return told


def _planned(names: Names) -> tuple[Edits, list[Plan]]:
    edits = Edits(names.line)
    scopes = Scopes(names)
    plans, untold = find_plans(names, scopes)
    for plan in plans:
        if shared_globals(plan):
            plan.home = scopes.module
    spread_meanings(names, scopes, plans)
    sessions = Sessions(names, scopes, plans)
    uses = Uses(names, scopes, sessions, edits)
    if plans:
        sessions.settle_owners(uses.needy())
        uses.plan()
        made = Made(names, scopes, edits)
        for plan in plans:
            made.look(plan, uses.plain)
    _hand_on(scopes, sessions, edits)
    _classes(names, edits)
    Starts(names, scopes, sessions, edits).plan()
    for call in untold:
        edits.handled.add(call.func)
        edits.doubt(
            call,
            "amp.initialize, whose arguments or results are not in plain sight",
            "write `session = preamp.prepare(model, optimizer, level=...)`, and hand on the session with them",
        )
    Doubts(names, scopes, sessions, edits).look()
    _leftovers(names, edits)
    return edits, plans


def _hand_on(scopes: Scopes, sessions: Sessions, edits: Edits) -> None:
    """Sessions as parameters and arguments of the functions that need them."""
    for receiver, access in sessions.given.items():
        function, text = receiver, access.text
        if not receiver.is_function:
            function = next(s for s in scopes.all if s.parent is receiver and s.name == "__init__")
            edits.first[function.node] = f"{function.parameters()[0]}.{text} = {text}"
        edits.parameters[function.node] = text
        edits.say(
            receiver.node, f"{receiver.name}() takes the session now",
            f"where other files call it, add {text}={text}", False,
        )  # fmt: skip
    edits.arguments.update(sessions.arguments)


def _classes(names: Names, edits: Edits) -> None:
    for node, what in names.apex_references():
        row = REPLACEMENTS.get(what)
        if row is None:
            continue
        parent = names.parent(node)
        if isinstance(parent, cst.Call) and parent.func is node:
            why = refusal(parent, row, names.code)
            if why is not None:
                edits.handled.add(node)
                edits.say(node, f"apex.{what}", f"{why}; write {row.target} by hand")
                continue
            edits.expressions[parent] = (
                lambda new, parent=parent, row=row: translated(parent, new, row, names.code)  # type: ignore[misc]
            )
            edits.handled.add(node)
            if row.remark:
                edits.say(node, f"apex.{what} became {row.target}", row.remark, False)
        elif row.bare:
            edits.expressions[node] = lambda _, row=row: cst.parse_expression(row.target)  # type: ignore[misc]
            edits.handled.add(node)
        else:
            edits.handled.add(node)
            edits.say(
                node,
                f"apex.{what} without a call",
                f"write {row.target}; mind that defaults differ: {', '.join(f'{k}={v}' for k, v in row.add.items())}",
            )


def _leftovers(names: Names, edits: Edits) -> None:
    keep = all(runs(what) for _, what in names.apex_references())
    for node, what in names.apex_references():
        if node not in edits.handled:
            doubtful = what.startswith(_OF_SESSIONS)
            (edits.doubt if doubtful else edits.say)(node, shown(what), advice(what, keep))
    for place, text in by_text(names):
        edits.doubt(
            place,
            f"{text} names Apex in a text",
            "write an import, so that what it is for can be told",
        )
    for place, text in hidden(names):
        edits.doubt(
            place,
            f"{text}() of an amp that is handed over",
            "call it by what this file imports from apex, so that it can be told; or hand over the session",
        )
    for place, text in questions(names):
        edits.doubt(
            place,
            f"{text} asks whether there is an Apex",
            "a session needs none: take the question out",
        )
    for each in names.nodes:
        for _, qualified, local in imported(each):
            base = apex_name(qualified) if local == "*" else None
            used = sorted(names.identifiers & STARS.get(base or "", set()))
            if used:
                edits.say(
                    each,
                    f"from apex.{base} import *, for {', '.join(used)}",
                    f"import these by name and migrate again: then each is told; {advice(f'{base}.{used[0]}', keep)}",
                )
