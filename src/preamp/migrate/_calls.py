"""Arguments of calls: read by name, and written back with the commas and line breaks that were there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import libcst as cst


def literal(node: cst.BaseExpression | None, default: Any) -> Any:
    """The value of a number, string or True, False, None; `default` for no node, None for other expressions."""
    if node is None:
        return default
    if isinstance(node, (cst.Integer, cst.Float, cst.SimpleString)):
        return node.evaluated_value
    if isinstance(node, cst.Name):
        return {"True": True, "False": False}.get(node.value)
    return None


def bound(call: cst.Call, positions: Sequence[str]) -> Iterator[tuple[str, cst.Arg]]:
    """(parameter, argument) pairs of a call, for a function with these positional parameters."""
    for index, arg in enumerate(call.args):
        if arg.keyword is not None:
            yield arg.keyword.value, arg
        elif index < len(positions):
            yield positions[index], arg


def named_arguments(call: cst.Call, positions: Sequence[str]) -> dict[str, cst.BaseExpression] | None:
    """Arguments by parameter name; None where a star hides some, or there are too many."""
    pairs = list(bound(call, positions))
    if any(arg.star for arg in call.args) or len(pairs) < len(call.args):
        return None
    return {name: arg.value for name, arg in pairs}


def argument(value: str | cst.BaseExpression, keyword: str | None = None, star: str = "") -> cst.Arg:
    """A new argument."""
    node = cst.parse_expression(value) if isinstance(value, str) else value
    return cst.Arg(node, star="**" if star == "**" else "") if keyword is None else renamed(cst.Arg(node), keyword)


def recall(call: cst.Call, function: str, args: Sequence[cst.Arg]) -> cst.Call:
    """The call with another function and arguments, laid out as before: one a line if that is how they stood."""
    return call.with_changes(func=cst.parse_expression(function), args=laid_out(call, args))


def laid_out(call: cst.Call, args: Sequence[cst.Arg]) -> list[cst.Arg]:
    """Arguments with the separators of a call's own."""
    before = call.args
    separators = [arg.comma for arg in before[:-1] if isinstance(arg.comma, cst.Comma)]
    between = separators[0] if separators else cst.Comma(whitespace_after=cst.SimpleWhitespace(" "))
    end_comma = before[-1].comma if before else cst.MaybeSentinel.DEFAULT
    end_space = before[-1].whitespace_after_arg if before else cst.SimpleWhitespace("")
    kept = {id(arg): arg.comma for arg in before[:-1]}
    laid: list[cst.Arg] = []
    for index, arg in enumerate(args):
        if index == len(args) - 1:
            laid.append(arg.with_changes(comma=end_comma, whitespace_after_arg=end_space))
        else:
            own = kept.get(id(arg))
            comma = own if isinstance(own, cst.Comma) else between
            laid.append(arg.with_changes(comma=comma, whitespace_after_arg=cst.SimpleWhitespace("")))
    return laid


def renamed(arg: cst.Arg, keyword: str) -> cst.Arg:
    """An argument under another keyword, or under one where it had none."""
    return arg.with_changes(
        keyword=cst.Name(keyword),
        equal=cst.AssignEqual(cst.SimpleWhitespace(""), cst.SimpleWhitespace("")) if arg.keyword is None else arg.equal,
    )


def broken(call: cst.Call, width: int = 100) -> cst.Call:
    """The call with an argument a line if it would be a long line."""
    text = cst.Module([]).code_for_node(call)
    if "\n" in text or len(text) <= width:
        return call
    inner = cst.ParenthesizedWhitespace(indent=True, last_line=cst.SimpleWhitespace("    "))
    outer = cst.ParenthesizedWhitespace(indent=True)
    last = len(call.args) - 1
    args = [
        arg.with_changes(
            comma=cst.Comma(whitespace_after=outer if i == last else inner),
            whitespace_after_arg=cst.SimpleWhitespace(""),
        )
        for i, arg in enumerate(call.args)
    ]
    return call.with_changes(whitespace_before_args=inner, args=args)
