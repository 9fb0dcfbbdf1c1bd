"""Pastes a fix that the doctor printed into the script that it is about, as a reader would."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from preamp.doctor.statements import CASTS

_SIMPLE = (ast.Assign, ast.AugAssign, ast.AnnAssign, ast.Return, ast.Expr)


class _Plain(ast.NodeTransformer):
    """What a fix does not change of a statement: no casts, no `eps=` and `dtype=`, and one number for all."""

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        if isinstance(node.func, ast.Attribute) and node.func.attr in {"float", *CASTS}:
            return node.func.value
        node.keywords = [each for each in node.keywords if each.arg not in ("eps", "dtype")]
        return node

    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        return ast.Constant(0) if isinstance(node.value, (int, float)) else node


def _plain(statement: ast.stmt) -> str:
    return ast.unparse(_Plain().visit(ast.parse(ast.unparse(statement))))


def _statements(tree: ast.AST) -> Iterator[ast.stmt]:
    return (node for node in ast.walk(tree) if isinstance(node, _SIMPLE))


def pasted(script: str, line: int, fix: str) -> str:
    """The script with the fix in place of the statements that it rewrites, those nearest to the line."""
    lines, printed = script.split("\n"), [each for each in fix.split("\n") if not each.startswith("# in place of")]
    blocks = ast.parse("def f():\n" + "\n".join(f"    {each}" for each in printed)).body[0].body  # may say `return`
    changes = []
    for block in blocks:
        inside = isinstance(block, ast.With)
        for new in block.body if inside else [block]:
            like = [old for old in _statements(ast.parse(script)) if _plain(old) == _plain(new)]
            assert like, f"the script has no statement like {ast.unparse(new)!r}"
            changes.append((min(like, key=lambda old: abs(old.lineno - line)), new, block.lineno if inside else None))
    for old, new, region in sorted(changes, key=lambda change: -change[0].lineno):
        indent = " " * old.col_offset
        text = [] if region is None else [printed[region - 2]]
        text += printed[new.lineno - 2 : (new.end_lineno or new.lineno) - 1]
        lines[old.lineno - 1 : old.end_lineno] = [indent + each for each in text]
    return "\n".join(lines)
