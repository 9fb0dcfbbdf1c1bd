"""One file: find what it does with Apex, plan, rewrite, tidy up."""

from __future__ import annotations

import re
import warnings

import libcst as cst

from ._classes import REPLACEMENTS, refusal, translated
from ._edits import Apply, Edits
from ._imports import STARS, tidied
from ._meanings import spread_meanings
from ._names import Names, apex_name, dotted, walk
from ._notes import CannotParse, Migration, Note, advice
from ._scopes import Scopes
from ._sessions import Plan, Sessions, find_plans
from ._starts import Starts, is_home_global
from ._uses import Uses


def migrate_text(source: str, filename: str) -> Migration:
    """See `migrate_source`."""
    module = _parsed(source, filename)
    if re.search(r"\bapex\b", source) is None:
        return Migration(filename, source, source, uses_apex=False)
    names = Names(module)
    if not any(_imports_apex(node) for node in walk(names.module)) and not any(True for _ in names.apex_references()):
        return Migration(filename, source, source, uses_apex=False)
    edits, plans = _planned(names)
    after = names.module.visit(Apply(names.module, edits)).code if _has_work(edits) else source
    after = tidied(after)
    if _compiles(source) is None and (error := _compiles(after)) is not None:
        raise AssertionError(f"{filename}: the translation does not parse, line {error.lineno}: {error.msg}")
    notes = sorted({*edits.notes, *_unused(names, plans, after)}, key=lambda note: (note.line, note.seen))
    return Migration(filename, source, after, tuple(notes))


def _parsed(source: str, filename: str) -> cst.Module:
    try:
        return cst.parse_module(source)
    except cst.ParserSyntaxError as error:
        raise CannotParse(
            f"{filename}:{error.raw_line}: not Python: {error.message.splitlines()[0]}; mend the line first"
        ) from error


def _compiles(text: str) -> SyntaxError | None:
    """Why this interpreter would not take a text; None if it does."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            compile(text, "script", "exec", dont_inherit=True)
        except SyntaxError as error:
            return error
    return None


def _has_work(edits: Edits) -> bool:
    return bool(edits.expressions or edits.statements or edits.regions or edits.before or edits.arguments)


def _unused(names: Names, plans: list[Plan], after: str) -> list[Note]:
    """Sessions that are made and used nowhere: whoever trains has to get them."""
    return [
        Note(
            names.line(plan.call), f"{plan.text} is used nowhere in this file",
            "hand it on to what trains (return it, or keep it as an attribute), which then writes session.autocast(), "
            "session.backward(loss) and session.step()",
        )
        for plan in plans
        if re.search(rf"\b{plan.name}\b(?! = preamp\.prepare\()(?=[.,)\]=])", after) is None
    ]  # fmt: skip


def _planned(names: Names) -> tuple[Edits, list[Plan]]:
    edits = Edits()
    scopes = Scopes(names)
    plans, untold = find_plans(names, scopes)
    for plan in plans:
        if is_home_global(plan):
            plan.home = scopes.module
    spread_meanings(names, scopes, plans)
    sessions = Sessions(names, scopes, plans)
    uses = Uses(names, scopes, sessions, edits)
    if plans:
        sessions.settle_owners(uses.needy())
        uses.plan()
    _hand_on(names, scopes, sessions, edits)
    _classes(names, edits)
    Starts(names, scopes, sessions, edits).plan()
    for call in untold:
        edits.handled.add(call.func)
        edits.notes.append(Note(
            names.line(call), "amp.initialize, whose arguments or results are not in plain sight",
            "write `session = preamp.prepare(model, optimizer, level=...)`, and hand on the session with them",
        ))  # fmt: skip
    _leftovers(names, edits)
    return edits, plans


def _hand_on(names: Names, scopes: Scopes, sessions: Sessions, edits: Edits) -> None:
    """Sessions as parameters and arguments of the functions that need them."""
    for function, access in sessions.parameters.items():
        edits.parameters[function.node] = access.text
        _tell(names, edits, function.node, f"{function.name}()", access.text)
    for own, access in sessions.stored.items():
        init = next(s for s in scopes.all if s.parent is own and s.name == "__init__")
        edits.parameters[init.node] = access.text
        edits.first[init.node] = f"{init.parameters()[0]}.{access.text} = {access.text}"
        _tell(names, edits, own.node, f"{own.name}()", access.text)
    for call, text in sessions.arguments.items():
        target = _callee(names, scopes, sessions, call)
        if target is not None:
            edits.arguments[call] = (target, text or target)


def _callee(names: Names, scopes: Scopes, sessions: Sessions, call: cst.CSTNode) -> str | None:
    if not isinstance(call, cst.Call):
        return None
    for where, access in (*sessions.parameters.items(), *sessions.stored.items()):
        if dotted(call.func) == where.name:
            return access.text
    return None


def _tell(names: Names, edits: Edits, node: cst.CSTNode, what: str, session: str) -> None:
    edits.notes.append(Note(
        names.line(node), f"{what} takes the session now", f"where other files call it, add {session}={session}", False,
    ))  # fmt: skip


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
                edits.notes.append(Note(names.line(node), f"apex.{what}", f"{why}; write {row.target} by hand"))
                continue
            edits.expressions[parent] = (
                lambda new, parent=parent, row=row: translated(parent, new, row, names.code)  # type: ignore[misc]
            )
            edits.handled.add(node)
            if row.remark:
                edits.notes.append(Note(names.line(node), f"apex.{what} became {row.target}", row.remark, False))
        elif row.bare:
            edits.expressions[node] = lambda _, row=row: cst.parse_expression(row.target)  # type: ignore[misc]
            edits.handled.add(node)
        else:
            edits.handled.add(node)
            edits.notes.append(Note(
                names.line(node), f"apex.{what} without a call",
                f"write {row.target}; mind that defaults differ: {', '.join(f'{k}={v}' for k, v in row.add.items())}",
            ))  # fmt: skip


def _leftovers(names: Names, edits: Edits) -> None:
    for node, what in names.apex_references():
        if node not in edits.handled:
            shown = f"apex.{what}" if what else "apex"
            edits.notes.append(Note(names.line(node), shown, advice(what)))
    for each in walk(names.module):
        if isinstance(each, cst.ImportFrom) and isinstance(each.names, cst.ImportStar) and each.module is not None:
            base = apex_name(dotted(each.module) or "")
            used = sorted(names.identifiers & STARS.get(base or "", set()))
            if base is not None and used:
                edits.notes.append(Note(
                    names.line(each), f"from apex.{base} import *, for {', '.join(used)}",
                    f"import these by name and migrate again: then each can be told; {advice(f'{base}.{used[0]}')}",
                ))  # fmt: skip


def _imports_apex(node: cst.CSTNode) -> bool:
    if isinstance(node, cst.ImportFrom) and node.module is not None:
        base = dotted(node.module) or ""
        if isinstance(node.names, cst.ImportStar):
            return apex_name(base) is not None
        return any(apex_name(f"{base}.{dotted(alias.name)}") is not None for alias in node.names)
    if isinstance(node, cst.Import):
        return any(apex_name(dotted(alias.name) or "") is not None for alias in node.names)
    return False
