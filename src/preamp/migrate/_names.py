"""What names mean: which of them come from Apex or torch, in whatever spelling they were imported."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from typing import Any

import libcst as cst
from libcst import metadata

_SUBMODULES = re.compile(
    r"^(amp|parallel|optimizers|normalization|fp16_utils)\.(?:(?:amp|frontend|handle|scaler|opt|utils|wrap|compat|lists|"
    r"_amp_state(?=\.master_params)|_initialize|_process_optimizer|distributed|LARC(?=\.)|\w*sync_batchnorm|fused_\w+|"
    r"fp16_optimizer|fp16util|loss_scaler)\.)+(\w+)$"
)
_PACKAGE = re.compile(r"^(apex|preamp\.compat\.apex)(\.|$)")
COMPILED = (
    "amp_C", "apex_C", "fused_layer_norm_cuda", "mlp_cuda", "fused_dense_cuda", "xentropy_cuda", "fused_adam_cuda",
    "distributed_adam_cuda", "distributed_lamb_cuda", "scaled_masked_softmax_cuda",
    "scaled_upper_triang_masked_softmax_cuda", "fused_weight_gradient_mlp_cuda",
)  # fmt: skip
"""Modules that Apex's own build installs beside the package."""


def apex_name(qualified: str) -> str | None:
    """A qualified name without "apex." and without the module that defines it: "amp.scale_loss"; None for others.

    What Apex compiles has its own name: "amp_C.multi_tensor_scale".
    """
    if qualified.partition(".")[0] in COMPILED:
        return qualified
    if not _PACKAGE.match(qualified):
        return None
    rest = re.sub(r"^(preamp\.compat\.)?apex\.?", "", qualified)
    inner = _SUBMODULES.match(rest)
    return f"{inner[1]}.{inner[2]}" if inner else rest


def shown(name: str) -> str:
    """A name of `apex_name`'s as a script would spell it."""
    return name if name.partition(".")[0] in COMPILED else f"apex.{name}".rstrip(".")


def dotted(node: cst.BaseExpression | None) -> str | None:
    """The text of a chain of names, "self.model"; None for any other expression."""
    if isinstance(node, cst.Name):
        return node.value
    if isinstance(node, cst.Attribute):
        inner = dotted(node.value)
        return None if inner is None else f"{inner}.{node.attr.value}"
    return None


Block = cst.Module | cst.IndentedBlock
Statement = cst.SimpleStatementLine | cst.BaseCompoundStatement


def imported(node: cst.CSTNode) -> Iterator[tuple[cst.CSTNode, str, str]]:
    """(alias, qualified name, name in this file) of what an import brings; a star, of a module, is named "*"."""
    if isinstance(node, cst.Import):
        for alias in node.names:
            name = dotted(alias.name) or ""
            yield alias, name, alias.evaluated_alias or name.partition(".")[0]
    elif isinstance(node, cst.ImportFrom):
        base = "." * len(node.relative) + (dotted(node.module) or "")
        if isinstance(node.names, cst.ImportStar):
            yield node.names, base, "*"
            return
        for alias in node.names:
            yield alias, f"{base}.{dotted(alias.name)}", alias.evaluated_alias or alias.evaluated_name


class Names:
    """A parsed file and the meaning of its names."""

    def __init__(self, module: cst.Module) -> None:
        wrapper = metadata.MetadataWrapper(module)
        self.module = wrapper.module
        resolved = wrapper.resolve_many(
            [
                metadata.QualifiedNameProvider, metadata.PositionProvider, metadata.ParentNodeProvider,
                metadata.ScopeProvider, metadata.ExpressionContextProvider,
            ]
        )  # fmt: skip
        self._qualified: Any = resolved[metadata.QualifiedNameProvider]
        self._positions: Any = resolved[metadata.PositionProvider]
        self._parents: Any = resolved[metadata.ParentNodeProvider]
        self._scopes: Any = resolved[metadata.ScopeProvider]
        self._contexts: Any = resolved[metadata.ExpressionContextProvider]
        self.nodes = list(walk(self.module))
        """Everything in the file, in the order of the text."""
        self.identifiers = {n.value for n in self.nodes if isinstance(n, cst.Name)}

    def code(self, node: cst.CSTNode) -> str:
        """The text of a node, without what surrounds it."""
        return self.module.code_for_node(node)

    def line(self, node: cst.CSTNode) -> int:
        """The line that a node begins in."""
        return int(self._positions[node].start.line)

    def span(self, node: cst.CSTNode) -> tuple[int, int]:
        """The lines that a node begins and ends in."""
        where = self._positions[node]
        return int(where.start.line), int(where.end.line)

    def parent(self, node: cst.CSTNode) -> cst.CSTNode | None:
        """The node around this one."""
        found: cst.CSTNode | None = self._parents.get(node)
        return found

    def around(self, node: cst.CSTNode) -> Iterator[cst.CSTNode]:
        """The nodes around this one, outwards."""
        while (parent := self.parent(node)) is not None:
            yield parent
            node = parent

    def statement(self, text: str) -> Statement:
        """A statement in the style of the file."""
        return cst.parse_statement(text, config=self.module.config_for_parsing)

    def qualified(self, node: cst.CSTNode) -> set[str]:
        """Every imported name that an expression may stand for."""
        found = self._qualified.get(node, ())
        found = found() if callable(found) else found
        return {q.name for q in found if q.source is metadata.QualifiedNameSource.IMPORT}

    def apex(self, node: cst.CSTNode) -> str | None:
        """What of Apex an expression stands for, such as "amp.initialize"; None if nothing."""
        for name in sorted(self.qualified(node)):
            found = apex_name(name)
            if found is not None:
                return found
        return None

    def is_any(self, node: cst.CSTNode, names: Collection[str]) -> bool:
        """Whether an expression stands for one of these qualified names."""
        return any(name in names for name in self.qualified(node))

    def apex_references(self) -> Iterator[tuple[cst.BaseExpression, str]]:
        """Every use of something of Apex, as its longest chain of names, imports left out."""
        for node in self.nodes:
            if not isinstance(node, (cst.Name, cst.Attribute)):
                continue
            parent = self.parent(node)
            if isinstance(parent, cst.Attribute) and (parent.value is not node or self.apex(parent) is not None):
                continue
            if self._contexts.get(node) is not metadata.ExpressionContext.LOAD:
                continue
            found = self.apex(node)
            imports = (isinstance(each, (cst.Import, cst.ImportFrom)) for each in self.around(node))
            if found is not None and dotted(node) is not None and not any(imports):
                yield node, found

    def references(self, definition: cst.FunctionDef | cst.ClassDef) -> list[cst.CSTNode]:
        """Every place that uses a function or class of this file by its name."""
        scope = self._scopes[definition]
        return [
            access.node
            for assignment in scope[definition.name.value]
            if getattr(assignment, "node", None) is definition
            for access in assignment.references
        ]


def walk(node: cst.CSTNode) -> Iterator[cst.CSTNode]:
    """A node and everything in it, in the order of the text."""
    stack = [node]
    while stack:
        current = stack.pop()
        yield current
        stack.extend(reversed(current.children))


def calls(node: cst.CSTNode) -> Iterator[cst.Call]:
    """Every call in a node."""
    return (each for each in walk(node) if isinstance(each, cst.Call))


def chains(node: cst.CSTNode) -> Iterator[tuple[cst.BaseExpression, str]]:
    """Every name and chain of names in a node, also the heads of longer chains; not keywords, not attributes alone."""
    stack: list[cst.CSTNode] = [node]
    while stack:
        current = stack.pop()
        if isinstance(current, (cst.Name, cst.Attribute)):
            text = dotted(current)
            if text is not None:
                yield current, text
        if isinstance(current, (cst.Attribute, cst.Arg)):
            stack.append(current.value)
        else:
            stack.extend(current.children)


def mentions(node: cst.CSTNode, texts: Collection[str]) -> bool:
    """Whether one of these names ("model", "self.model") occurs in a node, also as the head of a longer chain."""
    return any(text in texts for _, text in chains(node))


def root(text: str) -> str:
    """The first name of a chain, or of a subscript's text."""
    return re.split(r"[.\[(]", text, maxsplit=1)[0]
