"""A parsed script: where its logical lines begin, what its names mean, and edits of its text by place."""

from __future__ import annotations

import re
import tokenize
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import libcst as cst
from libcst import metadata

from ._notes import COMPILED, CannotParse, lines_of, row_of

IMPORTERS = frozenset(
    ("import_module", "__import__", "find_spec", "find_loader", "get_loader", "run_path", "run_module", "exec", "eval")
)
"""Functions that import, or look for, what their arguments name."""
_FRAME = (cst.FunctionDef, cst.ClassDef, cst.Lambda, cst.Module)
_TEXT = (tokenize.STRING, getattr(tokenize, "FSTRING_MIDDLE", tokenize.STRING))
_BETWEEN = (tokenize.COMMENT, tokenize.NL, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)


def apex_name(qualified: str) -> str | None:
    """What of Apex a qualified name stands for, without "apex.": "amp.scale_loss"; None for others."""
    if qualified.partition(".")[0] in COMPILED:
        return qualified
    found = re.match(r"(?:preamp\.compat\.)?apex(?:\.|$)", qualified)
    return None if found is None else qualified[found.end() :]


@dataclass(frozen=True)
class Reference:
    """A use of something of Apex, by its row in the table of lines, else by `apex_name`."""

    node: cst.BaseExpression
    name: str
    imported: bool
    """Whether an import statement of the file brings it: else it comes by a star or a text, or has such a name."""


@dataclass(frozen=True)
class Edit:
    """A new text from `start` to `end`, each a line from 1 and a column from 0."""

    start: tuple[int, int]
    end: tuple[int, int]
    text: str


class Script:
    """The text, the tree, and what libcst knows about its nodes. `CannotParse` for what is not Python."""

    def __init__(self, text: str, filename: str) -> None:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                compile(text, filename, "exec", dont_inherit=True)  # what this Python would not take is not rewritten
            wrapper = metadata.MetadataWrapper(cst.parse_module(text), unsafe_skip_copy=True)
            qualified, positions, parents, scopes, contexts = (
                metadata.QualifiedNameProvider, metadata.PositionProvider, metadata.ParentNodeProvider,
                metadata.ScopeProvider, metadata.ExpressionContextProvider,
            )  # fmt: skip
            known: Any = wrapper.resolve_many([qualified, positions, parents, scopes, contexts])
        except SyntaxError as error:
            raise CannotParse(f"{filename}:{error.lineno or 1}: not Python: {error.msg}; mend it first") from error
        except (cst.ParserSyntaxError, ValueError, RecursionError, MemoryError) as error:
            raise CannotParse(f"{filename}:1: not Python that can be read: {error}") from error
        self._qualified, self._positions, self._parents = known[qualified], known[positions], known[parents]
        self._scopes, self._contexts = known[scopes], known[contexts]
        self.text, self.lines, self.module = text, lines_of(text), wrapper.module
        self.newline = self.module.default_newline
        self.code = self.module.code_for_node
        self.nodes = list(walk(self.module))
        self.first_line: dict[int, int] = {}  # by line, the one in which its logical line begins
        self.in_texts: set[int] = set()  # lines that begin inside a string
        self.own_comments: dict[int, str] = {}  # lines that are nothing but a comment
        self._tokenize()

    def _tokenize(self) -> None:
        begun = None
        plain = iter([line.rstrip("\r\n") + "\n" for line in self.lines])
        for token in tokenize.generate_tokens(lambda: next(plain, "")):
            row, last = token.start[0], token.end[0]
            if token.type == tokenize.COMMENT and not self.lines[row - 1][: token.start[1]].strip():
                self.own_comments[row] = token.string
            if token.type not in _BETWEEN:
                begun = row if begun is None else begun
            if token.type in _TEXT:
                self.in_texts |= {*range(row + 1, last + 1)}
            if token.type == tokenize.NEWLINE and begun is not None:
                self.first_line.update(dict.fromkeys(range(begun, last + 1), begun))
                begun = None

    def start(self, node: cst.CSTNode) -> tuple[int, int]:
        """Line and column that a node begins at."""
        return self._positions[node].start.line, self._positions[node].start.column

    def end(self, node: cst.CSTNode) -> tuple[int, int]:
        """Line and column behind a node."""
        return self._positions[node].end.line, self._positions[node].end.column

    def indentation(self, line: int) -> str:
        """What a line begins with."""
        return self.lines[line - 1].removesuffix(self.lines[line - 1].lstrip(" \t\f"))

    def around(self, node: cst.CSTNode) -> Iterator[cst.CSTNode]:
        """The nodes around this one, outwards."""
        while (parent := self._parents.get(node)) is not None:
            yield parent
            node = parent

    def parent(self, node: cst.CSTNode) -> cst.CSTNode:
        """The node around this one; the module's is the module."""
        return self._parents.get(node, self.module)  # type: ignore[no-any-return]

    def frame(self, node: cst.CSTNode) -> cst.CSTNode:
        """The function, class or lambda around a node, or the module."""
        return next((each for each in self.around(node) if isinstance(each, _FRAME)), self.module)

    def qualified(self, node: cst.CSTNode) -> set[str]:
        """Every imported name that an expression may stand for."""
        found = self._qualified.get(node, ())
        found = found() if callable(found) else found
        return {each.name for each in found if each.source is metadata.QualifiedNameSource.IMPORT}

    def accesses(self, scope_of: cst.CSTNode, name: str) -> list[cst.CSTNode]:
        """Every place that reads or binds a name of the scope that a node is in."""
        bound = self._scopes[scope_of][name]
        found = [reference.node for each in bound for reference in each.references]
        return list(dict.fromkeys([*found, *(each.node for each in bound if isinstance(each, metadata.Assignment))]))

    def imports(self) -> Iterator[tuple[cst.CSTNode, str, str]]:
        """(statement, qualified name, local name) of all that imports bring; a star's local name is "*"."""
        for node in self.nodes:
            yield from ((node, name, local) for name, local in imported(node))

    def by_text(self) -> Iterator[tuple[cst.Call, str]]:
        """Calls that import by a text, with every text that is in them."""
        for node in self.nodes:
            if isinstance(node, cst.Call) and (dotted(node.func) or "").rpartition(".")[2] in IMPORTERS:
                parts = [each for arg in node.args for each in walk(arg)]
                texts = [each for each in parts if isinstance(each, (cst.SimpleString, cst.FormattedStringText))]
                yield node, " ".join(str(getattr(each, "evaluated_value", each.value)) for each in texts)

    def references(self) -> list[Reference]:
        """Every use of something of Apex, as its longest chain of names, imports left out."""
        stars = {apex_name(base) for _, base, local in self.imports() if local == "*"} - {None}
        bound = {}
        for call, text in self.by_text():
            assign, name = self.parent(call), apex_name(text)
            if isinstance(assign, cst.Assign) and name is not None:
                bound.update({self.code(each.target): name for each in assign.targets})
        chains = (each for each in self.nodes if isinstance(each, (cst.Name, cst.Attribute)) and dotted(each))
        meanings = {node: meaning for node in chains if (meaning := self._meaning(node, stars, bound)) is not None}
        found = []
        for node, (name, by_import) in meanings.items():
            parent = self.parent(node)
            inner = isinstance(parent, cst.Attribute) and (parent.value is not node or parent in meanings)
            read = self._contexts.get(node) is metadata.ExpressionContext.LOAD
            if read and not inner and not any(isinstance(x, (cst.Import, cst.ImportFrom)) for x in self.around(node)):
                found.append(Reference(node, row_of(name) or name, by_import))
        return found

    def _meaning(self, node: cst.CSTNode, stars: set[Any], bound: dict[str, str]) -> tuple[str, bool] | None:
        """The name of Apex's that a chain of names stands for, and whether an import statement says so."""
        by_import = [name for name in map(apex_name, sorted(self.qualified(node))) if name is not None]
        if by_import:
            return by_import[0], True
        root, _, rest = (dotted(node) or "").partition(".")
        if self.qualified(node):
            return None
        if root in bound:
            return f"{bound[root]}.{rest}".strip("."), False
        scope = self._scopes.get(node)  # of a keyword's name there is none, and what the file binds is no star's
        names = [] if scope is None or root in scope else [f"{base}.{root}.{rest}".strip(".") for base in stars]
        last = rest.rpartition(".")[2]
        if last in ("scale_loss", "master_params") or f".{root}.{rest}".endswith(".amp.initialize"):
            names.append(f"amp.{last}")
        return next(((name, False) for name in names if row_of(name) is not None), None)

    def edited(self, edits: Iterable[Edit], indented: Iterable[int] = ()) -> str:
        """The text after edits, which do not overlap; `indented`: lines that move in by one level."""
        lines, unit = list(self.lines), self.module.default_indent
        for line in set(indented) - self.in_texts:
            lines[line - 1] = (unit if lines[line - 1].strip() else "") + lines[line - 1]
        for edit in sorted(edits, key=lambda each: (each.start, each.end), reverse=True):
            (row, column), (last, behind) = edit.start, edit.end
            lines[row - 1 : last] = [lines[row - 1][:column] + edit.text + lines[last - 1][behind:]]
        return "".join(lines)


def dotted(node: cst.CSTNode | None) -> str | None:
    """The text of a chain of names, "self.model"; None for any other expression."""
    if isinstance(node, cst.Name):
        return node.value
    inner = dotted(node.value) if isinstance(node, cst.Attribute) else None
    return None if inner is None or not isinstance(node, cst.Attribute) else f"{inner}.{node.attr.value}"


def imported(node: cst.CSTNode) -> Iterator[tuple[str, str]]:
    """(qualified name, name in this file) of what an import brings; a star, of a module, is named "*"."""
    if isinstance(node, cst.Import):
        for alias in node.names:
            name = dotted(alias.name) or ""
            yield name, alias.evaluated_alias or name.partition(".")[0]
    elif isinstance(node, cst.ImportFrom):
        base = "." * len(node.relative) + (dotted(node.module) or "")
        if isinstance(node.names, cst.ImportStar):
            yield base, "*"
        else:
            yield from ((f"{base}.{dotted(x.name)}", x.evaluated_alias or x.evaluated_name) for x in node.names)


def walk(node: cst.CSTNode) -> Iterator[cst.CSTNode]:
    """A node and everything in it, in the order of the text."""
    stack = [node]
    while stack:
        current = stack.pop()
        yield current
        stack.extend(reversed(current.children))
