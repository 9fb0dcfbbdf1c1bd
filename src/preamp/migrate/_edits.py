"""A plan of changes by node of the original, and the transformer that carries it out."""

from __future__ import annotations

import ast
from collections.abc import Callable
from dataclasses import dataclass, field

import libcst as cst

from ._calls import argument, laid_out
from ._names import Block, Names, Statement
from ._notes import Note


@dataclass
class Edits:
    """What to change, by node of the original tree; and what is said of it."""

    line: Callable[[cst.CSTNode], int]
    """The line of a node."""
    expressions: dict[cst.CSTNode, Callable[[cst.CSTNode], cst.CSTNode]] = field(default_factory=dict)
    """An expression's replacement, from what it has become inside."""
    statements: dict[cst.CSTNode, Callable[[Statement], list[Statement]]] = field(default_factory=dict)
    """What a statement becomes, from what it has become inside."""
    before: dict[cst.CSTNode, list[str]] = field(default_factory=dict)
    """Statements to put in front."""
    regions: dict[Block, list[tuple[int, int, str]]] = field(default_factory=dict)
    """Ranges of a block's statements, with the session whose region goes around them."""
    parameters: dict[cst.CSTNode, str] = field(default_factory=dict)
    """Functions that get a keyword parameter."""
    first: dict[cst.CSTNode, str] = field(default_factory=dict)
    """Functions that get a first statement."""
    arguments: dict[cst.CSTNode, tuple[str, str]] = field(default_factory=dict)
    """Calls that get a keyword argument."""
    conditions: set[cst.CSTNode] = field(default_factory=set)
    """`if` statements to fold where all branches have come to say the same."""
    handled: set[cst.CSTNode] = field(default_factory=set)
    """Uses of Apex that are translated, or have their note."""
    notes: list[Note] = field(default_factory=list)
    doubts: list[Note] = field(default_factory=list)
    """What makes it unsure that the sessions of the file train as before; one of them, and nothing is changed."""
    acts: dict[cst.CSTNode, str] = field(default_factory=dict)
    """Calls that a session's methods take the place of: "backward", "step", "zero", "clip"; "unscale" goes before."""

    def say(self, node: cst.CSTNode, seen: str, write: str, by_hand: bool = True) -> None:
        """Note something about a node."""
        self.notes.append(Note(self.line(node), " ".join(seen.split()), " ".join(write.split()), by_hand))

    def doubt(self, node: cst.CSTNode, seen: str, write: str) -> None:
        """Note what makes it unsure that the file's sessions train as before; each thing once."""
        note = Note(self.line(node), " ".join(seen.split()), " ".join(write.split()))
        if note not in self.doubts:
            self.doubts.append(note)


class Apply(cst.CSTTransformer):
    """Carries out edits, from the inside out."""

    def __init__(self, names: Names, edits: Edits) -> None:
        super().__init__()
        self._names, self._edits = names, edits

    def on_leave(self, original_node: cst.CSTNode, updated_node: cst.CSTNode) -> cst.CSTNode:  # type: ignore[override]
        """What a node becomes."""
        edits = self._edits
        node = updated_node
        if original_node in edits.expressions:
            node = edits.expressions[original_node](node)
        if original_node in edits.arguments and isinstance(node, cst.Call):
            name, text = edits.arguments[original_node]
            new = argument(text, name)
            at = next((i for i, arg in enumerate(node.args) if arg.star == "**"), len(node.args))
            node = node.with_changes(args=laid_out(node, [*node.args[:at], new, *node.args[at:]]))
        if isinstance(original_node, cst.FunctionDef) and isinstance(node, cst.FunctionDef):
            if original_node in edits.parameters:
                node = node.with_changes(params=_with_parameter(node.params, edits.parameters[original_node]))
            if original_node in edits.first:
                node = _with_first(node, self._names.statement(edits.first[original_node]))
        if isinstance(original_node, (cst.Module, cst.IndentedBlock)) and isinstance(
            node, (cst.Module, cst.IndentedBlock)
        ):
            return self._block(original_node, node)
        return node

    def _block(self, original: Block, updated: Block) -> cst.CSTNode:
        """The block's statements, each expanded into what it becomes, ranges put into regions."""
        edits = self._edits
        expanded = [self._expand(old, new) for old, new in zip(original.body, updated.body, strict=True)]  # type: ignore[arg-type]
        for number, part in enumerate(expanded[:-1]):
            following = expanded[number + 1]
            if not part and following and not following[0].leading_lines:  # blank lines stay where one was taken out
                removed: Statement = updated.body[number]  # type: ignore[assignment]
                lines = [line for line in removed.leading_lines if line.comment is None]
                expanded[number + 1] = [following[0].with_changes(leading_lines=lines), *following[1:]]
        ranges = edits.regions.get(original, [])
        regions = [
            (start, end, text)
            for text in dict.fromkeys(text for _, _, text in ranges)
            for start, end in _merged([(s, e) for s, e, t in ranges if t == text])
        ]
        body: list[Statement] = []
        index = 0
        for start, end, text in sorted(regions, key=lambda region: (region[0], -region[1])):
            begin = max(start, index)  # of two sessions' regions, the first takes what both would
            body += [statement for part in expanded[index:begin] for statement in part]
            inside = [statement for part in expanded[begin : end + 1] for statement in part]
            body += [self._region(text, inside)] if inside else []
            index = max(index, end + 1)
        body += [statement for part in expanded[index:] for statement in part]
        return updated.with_changes(body=body)

    def _expand(self, old: Statement, new: Statement) -> list[Statement]:
        edits = self._edits
        found = edits.statements[old](new) if old in edits.statements else [new]
        if old in edits.conditions:
            found = [folded for each in found for folded in fold(each)]
        extra = [self._names.statement(text) for text in edits.before.get(old, [])]
        return with_lead(new, [*extra, *found]) if extra else found

    def _region(self, session: str, inside: list[Statement]) -> cst.With:
        first = inside[0]
        region = self._names.statement(f"with {session}.autocast():\n    pass")
        assert isinstance(region, cst.With)
        return region.with_changes(
            leading_lines=first.leading_lines,
            body=cst.IndentedBlock(body=[first.with_changes(leading_lines=()), *inside[1:]]),
        )


def with_lead(old: Statement, found: list[Statement]) -> list[Statement]:
    """Statements in place of `old`, whose comments and blank lines go before the first."""
    if not found:
        return found
    cleared = [
        each.with_changes(leading_lines=()) if each.leading_lines == old.leading_lines else each for each in found
    ]
    return [cleared[0].with_changes(leading_lines=old.leading_lines), *cleared[1:]]


def _with_parameter(params: cst.Parameters, name: str) -> cst.Parameters:
    star = params.star_arg
    if isinstance(star, cst.MaybeSentinel) and not params.kwonly_params:
        star = cst.ParamStar()
    return params.with_changes(star_arg=star, kwonly_params=[*params.kwonly_params, cst.Param(cst.Name(name))])


def _with_first(function: cst.FunctionDef, statement: Statement) -> cst.FunctionDef:
    body = function.body
    if not isinstance(body, cst.IndentedBlock):
        return function
    at = 0
    first = body.body[0]
    if isinstance(first, cst.SimpleStatementLine) and isinstance(first.body[0], cst.Expr):
        value = first.body[0].value
        text = isinstance(value, (cst.SimpleString, cst.ConcatenatedString))
        is_super = isinstance(value, cst.Call) and "super" in cst.Module([]).code_for_node(value.func)
        at = 1 if text or is_super else 0
        following = body.body[1] if len(body.body) > 1 else None
        if text and isinstance(following, cst.SimpleStatementLine):
            at = 2 if "super()" in cst.Module([]).code_for_node(following) else 1
    return function.with_changes(body=body.with_changes(body=[*body.body[:at], statement, *body.body[at:]]))


def fold(statement: Statement) -> list[Statement]:
    """An `if` whose branches all say the same, as what they say; anything else as it is."""
    if not isinstance(statement, cst.If) or not _is_pure(statement.test):
        return [statement]
    branches: list[cst.IndentedBlock] = []
    current: cst.If | cst.Else | None = statement
    while isinstance(current, cst.If) and _is_pure(current.test) and isinstance(current.body, cst.IndentedBlock):
        branches.append(current.body)
        current = current.orelse
    if not isinstance(current, cst.Else) or not isinstance(current.body, cst.IndentedBlock):
        return [statement]
    branches.append(current.body)
    texts = [cst.Module([*branch.body]).code for branch in branches]  # type: ignore[list-item]
    if len({ast.dump(ast.parse(text)) for text in texts}) != 1:
        return [statement]
    fullest = max(range(len(texts)), key=lambda place: texts[place].count("#"))
    return unindented(statement.with_changes(body=branches[fullest].with_changes(header=branches[0].header)))


def unindented(block: cst.With | cst.If) -> list[Statement]:
    """The body of a block in place of it, comments kept."""
    suite = block.body
    if isinstance(suite, cst.IndentedBlock):
        body: list[Statement] = list(suite.body)  # type: ignore[arg-type]
        comment = suite.header.comment
        footer = [line for line in suite.footer if line.comment is not None]
    else:
        assert isinstance(suite, cst.SimpleStatementSuite)
        small = [each.with_changes(semicolon=cst.MaybeSentinel.DEFAULT) for each in suite.body]
        body = [cst.SimpleStatementLine([each]) for each in small]
        comment, footer = suite.trailing_whitespace.comment, []
    lead = [*block.leading_lines, *([] if comment is None else [cst.EmptyLine(comment=comment)])]
    body[0] = body[0].with_changes(leading_lines=[*lead, *body[0].leading_lines])
    body[-1] = body[-1].with_changes(leading_lines=[*body[-1].leading_lines, *footer])
    return with_lead(body[0], body)


def _is_pure(test: cst.BaseExpression) -> bool:
    """Whether leaving a condition unasked changes nothing."""
    pure = (
        cst.Name, cst.Attribute, cst.Comparison, cst.ComparisonTarget, cst.UnaryOperation, cst.BooleanOperation,
        cst.Integer, cst.SimpleString, cst.Subscript, cst.SubscriptElement, cst.Index, cst.BaseBooleanOp,
        cst.BaseUnaryOp, cst.BaseCompOp, cst.Dot, cst.BaseParenthesizableWhitespace, cst.LeftParen, cst.RightParen,
        cst.LeftSquareBracket, cst.RightSquareBracket,
    )  # fmt: skip
    return isinstance(test, pure) and all(_is_pure(child) for child in test.children)  # type: ignore[arg-type]


def _merged(ranges: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Ranges without overlaps, neighbours joined."""
    found: list[tuple[int, int]] = []
    for start, end in sorted(ranges):
        if found and start <= found[-1][1] + 1:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((start, end))
    return found
