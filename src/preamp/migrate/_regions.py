"""The statements that have to run in a region: from the first use of the model to the loss."""

from __future__ import annotations

from collections.abc import Collection

import libcst as cst

from ._edits import Edits
from ._names import Block, Names, calls, chains, dotted, mentions, root, walk
from ._scopes import Scope, Scopes
from ._sessions import Access, Sessions


def block_around(names: Names, node: cst.CSTNode) -> tuple[Block, int] | None:
    """The block that a statement, or the statement around a node, stands in, and its place there."""
    child = node
    for around in names.around(node):
        if isinstance(around, (cst.Module, cst.IndentedBlock)):
            for index, statement in enumerate(around.body):
                if statement is child:
                    return around, index
        if isinstance(around, cst.FunctionDef) and not isinstance(child, cst.IndentedBlock):
            return None
        child = around
    return None


class Forward:
    """Looks, in one function, for what makes a loss."""

    def __init__(self, names: Names, scope: Scope, models: Collection[str]) -> None:
        self._names, self._scope = names, scope
        self._models = set(models)
        self.needed: set[str] = set()
        """After `ranges`: what the loss is made of."""

    def ranges(self, loss: cst.BaseExpression, before: cst.CSTNode) -> dict[Block, list[tuple[int, int]]] | None:
        """Ranges of statements by block, that `session.autocast()` goes around; None where the model is not seen.

        `before`: the statement that uses the loss.
        """
        needed = {root(text) for _, text in chains(loss)} - self._callees(loss)
        needed |= {text for _, text in chains(loss) if text.startswith("self.")}
        return self.ranges_at(needed, block_around(self._names, before))

    def ranges_at(self, needed: set[str], place: tuple[Block, int] | None) -> dict[Block, list[tuple[int, int]]] | None:
        """`ranges` for names that are needed at a place, a block and the number of a statement in it."""
        self.needed = needed
        found: dict[Block, list[int]] = {}
        used = False
        while place is not None:
            block, index = place
            if isinstance(block, cst.Module) and self._scope.is_function:
                break
            inside: list[int] = []
            seen = self._slice(block, index, needed)
            for number, statement in seen:
                if self._uses_model(statement):
                    inside += [n for n, _ in seen if n >= number]
                    used = True
            inside = [n for n, _ in seen] if used and not inside else sorted(set(inside))
            if inside or seen:
                found[block] = inside or [n for n, _ in seen]
            if used or self._is_function_body(block):
                break
            owner = self._names.parent(block)
            place = None if owner is None else block_around(self._names, owner)
        return {block: self._runs(block, inside) for block, inside in found.items()} if used else None

    def _slice(self, block: Block, end: int, needed: set[str]) -> list[tuple[int, cst.CSTNode]]:
        """Statements before `end` that make what is needed, in order; what they read is needed in turn."""
        found: list[tuple[int, cst.CSTNode]] = []
        for index in range(end - 1, -1, -1):
            statement = block.body[index]
            if isinstance(statement, (cst.FunctionDef, cst.ClassDef)) or not (binds(statement) & needed):
                continue
            if self._is_barrier(statement):
                continue
            found.append((index, statement))
            needed |= self._reads(statement)
            if found and self._uses_model(statement) and not self._more_to_come(block, index, needed):
                break
        return found[::-1]

    def _more_to_come(self, block: Block, end: int, needed: set[str]) -> bool:
        """Whether something before makes, with the model, what is needed still."""
        wanted = set(needed)
        for index in range(end - 1, -1, -1):
            statement = block.body[index]
            if binds(statement) & wanted and not self._is_barrier(statement):
                if self._uses_model(statement):
                    return True
                wanted |= self._reads(statement)
        return False

    def _reads(self, statement: cst.CSTNode) -> set[str]:
        found = {root(text) for _, text in chains(statement)} | {
            t for _, t in chains(statement) if t.startswith("self.")
        }
        return (
            found - {"self"} - {root(m) for m in self._models if not m.startswith("self.")} - self._callees(statement)
        )

    def _callees(self, node: cst.CSTNode) -> set[str]:
        return {
            text for call in calls(node) for text in [dotted(call.func)] if text is not None and "." not in text
        } | {"self"}

    def _uses_model(self, statement: cst.CSTNode) -> bool:
        if mentions(statement, self._models):
            return True
        if any(m.startswith("self.") for m in self._models):  # a method of the object may use the object's model
            own = self._scope.own_class()
            inside = () if own is None else walk(own.node)
            methods = {n.name.value for n in inside if isinstance(n, cst.FunctionDef)}
            return any((dotted(call.func) or "").removeprefix("self.") in methods for call in calls(statement))
        return False

    def _is_barrier(self, statement: cst.CSTNode) -> bool:
        for call in calls(statement):
            if self._names.apex(call.func) in ("amp.scale_loss", "amp.initialize"):
                return True
            text = dotted(call.func) or ""
            if text.endswith(".backward") or (text.endswith(".step") and text[:-5] in self._scope.optimizers):
                return True
            if "clip_grad" in text:
                return True
        return any(isinstance(each, (cst.FunctionDef, cst.ClassDef)) for each in walk(statement))

    def _runs(self, block: Block, inside: list[int]) -> list[tuple[int, int]]:
        """Ranges that hold these statements and no backward pass, step or clipping."""
        runs: list[tuple[int, int]] = []
        for index in sorted(inside):
            between = block.body[runs[-1][1] + 1 : index] if runs else ()
            if runs and not any(self._is_barrier(s) or _leaves(s) for s in between):
                runs[-1] = (runs[-1][0], index)
            else:
                runs.append((index, index))
        return runs

    def _is_function_body(self, block: Block) -> bool:
        return isinstance(block, cst.Module) or isinstance(self._names.parent(block), cst.FunctionDef)


def _leaves(statement: cst.CSTNode) -> bool:
    return any(isinstance(each, (cst.Import, cst.ImportFrom, cst.Global, cst.Nonlocal)) for each in walk(statement))


def binds(statement: cst.CSTNode) -> set[str]:
    """Names that a statement gives a value, or may change: assigned, deleted from, appended to."""
    found: set[str] = set()
    for node in walk(statement):
        if isinstance(node, (cst.AssignTarget, cst.AugAssign, cst.AnnAssign, cst.For, cst.NamedExpr)):
            found |= _targets(node.target)
        elif isinstance(node, cst.AsName):
            found |= _targets(node.name)
        elif isinstance(node, cst.Expr) and isinstance(node.value, cst.Call):
            text = dotted(node.value.func)
            if text is not None and text.rpartition(".")[2] in ("append", "extend", "update", "insert", "add_", "mul_"):
                found |= {root(text), text.rpartition(".")[0]} - {"self"}
    return found


def _targets(target: cst.BaseExpression) -> set[str]:
    if isinstance(target, (cst.Tuple, cst.List)):
        return set().union(*(_targets(element.value) for element in target.elements)) if target.elements else set()
    while isinstance(target, (cst.Subscript, cst.Attribute)) and dotted(target) is None:
        target = target.value
    text = dotted(target)
    if text is None:
        return set()
    return {text} if text.startswith("self.") or "." not in text else {root(text), text}


class Regions:
    """Plans the regions of losses."""

    def __init__(self, names: Names, scopes: Scopes, sessions: Sessions, edits: Edits) -> None:
        self._names, self._scopes, self._sessions, self._edits = names, scopes, sessions, edits

    def around(self, scope: Scope, access: Access, loss: cst.BaseExpression, block: cst.With) -> bool:
        """A region around what makes the loss that `block` is about; False if that cannot be seen."""
        forward = Forward(self._names, scope, scope.models)
        found = forward.ranges(loss, block)
        made = self._made_elsewhere(scope, forward.needed, set())
        if found is None and made:
            found = Forward(self._names, scope, scope.models | made).ranges(loss, block)
        self._add(found, access)
        for branch in self._names.around(block):
            if not isinstance(branch, (cst.IndentedBlock, cst.If, cst.Else)):
                break
            if isinstance(branch, cst.If):
                self._edits.conditions.add(branch)
        return found is not None or bool(made)

    def _add(self, found: dict[Block, list[tuple[int, int]]] | None, access: Access) -> None:
        for where, ranges in (found or {}).items():
            self._edits.regions.setdefault(where, []).extend((start, end, access.text) for start, end in ranges)

    def _made_elsewhere(self, scope: Scope, needed: set[str], seen: set[str]) -> set[str]:
        """Attributes such as `self.fake` that other methods make with the model; regions go around that."""
        own = scope.own_class()
        made: set[str] = set()
        for text in sorted(t for t in needed if t.startswith("self.") and t not in seen and t not in scope.models):
            seen.add(text)
            for other in self._scopes.all:
                if own is None or other.own_class() is not own or other.method() is scope.method():
                    continue
                for target, value in other.assigns:
                    if target == text and self._made_here(other, text, value, seen):
                        made.add(text)
        return made

    def _made_here(self, scope: Scope, text: str, value: cst.BaseExpression, seen: set[str]) -> bool:
        place, access = block_around(self._names, value), self._sessions.visible(scope)
        if place is None or access is None:
            return False
        after = (place[0], place[1] + 1)
        forward = Forward(self._names, scope, scope.models)
        found = forward.ranges_at({text}, after)
        inner = self._made_elsewhere(scope, forward.needed, seen)
        if found is None and inner:
            found = Forward(self._names, scope, scope.models | inner).ranges_at({text}, after)
        self._add(found, access)
        return found is not None
