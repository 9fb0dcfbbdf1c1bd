"""The bodies of `with amp.scale_loss(...)`: what is in them, and how they come out."""

from __future__ import annotations

import re

import libcst as cst

from ._edits import Statement, with_lead
from ._names import Names, dotted, mentions

_LINEAR = (cst.Multiply, cst.Divide)


def unindented(block: cst.With) -> list[Statement]:
    """The body of a `with` in place of it, comments kept."""
    if isinstance(block.body, cst.IndentedBlock):
        body: list[Statement] = list(block.body.body)  # type: ignore[arg-type]
        comment = block.body.header.comment
        footer = [line for line in block.body.footer if line.comment is not None]
    else:
        suite = block.body
        assert isinstance(suite, cst.SimpleStatementSuite)
        body = [
            cst.SimpleStatementLine([small.with_changes(semicolon=cst.MaybeSentinel.DEFAULT)]) for small in suite.body
        ]
        comment, footer = suite.trailing_whitespace.comment, []
    lead = [*block.leading_lines]
    if comment is not None:
        lead.append(cst.EmptyLine(comment=comment))
    body[0] = body[0].with_changes(leading_lines=[*lead, *body[0].leading_lines])
    body[-1] = body[-1].with_changes(leading_lines=[*body[-1].leading_lines, *footer])
    return with_lead(body[0], body)


def method(call: cst.Call) -> str | None:
    """The name of the method that is called."""
    return call.func.attr.value if isinstance(call.func, cst.Attribute) else None


def is_plain(node: cst.ListComp | cst.GeneratorExp) -> bool:
    """Whether a comprehension gives what it runs over, all of it."""
    loop = node.for_in
    return loop.inner_for_in is None and not loop.ifs and dotted(node.elt) == dotted(loop.target)


def is_linear(node: cst.BaseExpression, scaled: str) -> bool:
    """Whether an expression is the scaled loss, or its mean, sum, or a multiple of it."""
    if isinstance(node, cst.Name):
        return node.value == scaled
    if isinstance(node, cst.Call) and isinstance(node.func, cst.Attribute):
        return node.func.attr.value in ("mean", "sum") and not node.args and is_linear(node.func.value, scaled)
    if isinstance(node, cst.BinaryOperation) and isinstance(node.operator, _LINEAR):
        left = mentions(node.left, {scaled})
        if left == mentions(node.right, {scaled}) or (not left and isinstance(node.operator, cst.Divide)):
            return False
        return is_linear(node.left if left else node.right, scaled)
    return False


def substituted(names: Names, node: cst.BaseExpression, scaled: str, loss: str) -> str:
    """The text of an expression with the loss in place of the scaled loss."""
    if isinstance(node, cst.Name):
        return loss
    simple = re.fullmatch(r"[\w.]+", loss) is not None
    bare = node.with_changes(lpar=(), rpar=())
    return re.sub(rf"\b{scaled}\b", loss if simple else f"({loss})", names.code(bare))
