"""The last pass: imports that nothing uses any more go, `import preamp` comes, branches that a merge makes shorter."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import libcst as cst
import libcst.matchers as m
from libcst import metadata

from ._names import apex_name, imported, walk


def tidied(source: str) -> str:
    """The text with its imports in order."""
    wrapper = metadata.MetadataWrapper(cst.parse_module(source))
    scopes: Any = wrapper.resolve(metadata.ScopeProvider)
    text = wrapper.module.visit(_Tidy(_unused(wrapper.module, scopes), wrapper.module)).code
    for name in ("torch", "preamp"):
        if re.search(rf"\b{name}\.", text) and not _is_bound(cst.parse_module(text), name):
            text = _with_import(cst.parse_module(text), name).code
    return text


def _unused(module: cst.Module, scopes: Any) -> set[cst.CSTNode]:
    """Import aliases of Apex that nothing refers to."""
    used = {n.value for n in walk(module) if isinstance(n, cst.Name)}
    found: set[cst.CSTNode] = set()
    for node in walk(module):
        for alias, qualified, local in imported(node):
            name, scope = apex_name(qualified), scopes.get(node)
            if name is None:
                continue
            if local == "*":
                needed = bool(used & STARS.get(name, set()))
            else:
                needed = scope is None or any(assignment.references for assignment in scope[local])
            found |= set() if needed else {alias}
    return found


STARS = {
    "fp16_utils": {
        "FP16_Optimizer", "network_to_half", "BN_convert_float", "prep_param_lists", "model_grads_to_master_grads",
        "master_params_to_model_params", "tofp16", "to_python_float", "clip_grad_norm", "convert_module",
        "convert_network", "FP16Model", "LossScaler", "DynamicLossScaler",
    },
    "amp": {
        "initialize", "scale_loss", "master_params", "init", "half_function", "float_function", "promote_function",
        "disable_casts", "register_half_function", "register_float_function", "register_promote_function",
    },
    "parallel": {
        "DistributedDataParallel", "Reducer", "SyncBatchNorm", "convert_syncbn_model", "LARC",
        "create_syncbn_process_group",
    },
    "optimizers": {"FusedAdam", "FusedSGD", "FusedLAMB", "FusedNovoGrad", "FusedAdagrad", "FusedMixedPrecisionLamb"},
    "normalization": {"FusedLayerNorm", "FusedRMSNorm", "MixedFusedLayerNorm", "MixedFusedRMSNorm"},
}  # fmt: skip
"""Names that `from apex.x import *` brings."""


class _Tidy(cst.CSTTransformer):
    """Takes unused aliases out, and what stands around them empty."""

    def __init__(self, unused: set[cst.CSTNode], module: cst.Module) -> None:
        super().__init__()
        self._unused, self._module = unused, module
        self._top = set(module.body)
        self._wanted = not _is_bound(module, "preamp") and re.search(r"\bpreamp\.", module.code) is not None

    def leave_ImportFrom(self, original_node: cst.ImportFrom, updated_node: cst.ImportFrom) -> Any:
        """Without the aliases that nothing uses."""
        return self._shorter(original_node, updated_node)

    def leave_Import(self, original_node: cst.Import, updated_node: cst.Import) -> Any:
        """Without the aliases that nothing uses."""
        return self._shorter(original_node, updated_node)

    def _shorter(self, old: cst.Import | cst.ImportFrom, new: cst.Import | cst.ImportFrom) -> Any:
        if self._gone(old):
            return cst.RemoveFromParent()
        if isinstance(old.names, cst.ImportStar) or isinstance(new.names, cst.ImportStar):
            return new
        kept = [alias for before, alias in zip(old.names, new.names, strict=True) if before not in self._unused]
        if len(kept) < len(new.names):
            kept[-1] = kept[-1].with_changes(comma=new.names[-1].comma)
            return new.with_changes(names=kept)
        return new

    def leave_SimpleStatementLine(
        self, original_node: cst.SimpleStatementLine, updated_node: cst.SimpleStatementLine
    ) -> Any:
        """A line of which nothing is left goes, or becomes `import preamp`."""
        return updated_node if updated_node.body else self._removed(original_node)

    def _removed(self, original: Any) -> Any:
        if original not in self._top or not self._wanted:
            return cst.RemoveFromParent()
        self._wanted = False
        line = cst.parse_statement("import preamp", config=self._module.config_for_parsing)
        return line.with_changes(leading_lines=original.leading_lines)

    def _gone(self, small: cst.CSTNode) -> bool:
        aliases = [alias for alias, _, _ in imported(small)]
        return bool(aliases) and all(alias in self._unused for alias in aliases)

    def _rest(self, node: cst.Try) -> list[Any]:
        rest = []
        for statement in node.body.body:
            if isinstance(statement, cst.SimpleStatementLine) and all(self._gone(small) for small in statement.body):
                continue
            rest.append(statement)
        return rest

    def leave_Try(self, original_node: cst.Try, updated_node: cst.Try) -> Any:
        """A `try` around an import of Apex that is gone."""
        rest = self._rest(original_node)
        if len(rest) == len(original_node.body.body):
            return updated_node
        outcome = self._outcome(original_node, rest)
        if outcome is None:
            return updated_node
        if not outcome:
            return self._removed(original_node)
        first = outcome[0].with_changes(leading_lines=original_node.leading_lines)
        return cst.FlattenSentinel([first, *outcome[1:]])

    def _outcome(self, node: cst.Try, rest: list[Any]) -> list[Any] | None:
        """What is left of a `try`; None to leave it standing."""
        if len(rest) == len(node.body.body) or node.finalbody is not None:
            return None
        if not all(_cannot_fail(statement) for statement in rest):
            return None
        after = list(node.orelse.body.body) if node.orelse is not None else []
        if not rest and self._defines_used(node):
            handler = node.handlers[0]
            return [*(each for each in handler.body.body if _defines(each)), *after]
        return [*rest, *after]

    def _defines_used(self, node: cst.Try) -> bool:
        """Whether a handler imports or defines something that is used, in place of what Apex had."""
        if not node.handlers:
            return False
        for each in walk(node.handlers[0].body):
            names = [local for _, _, local in imported(each)]
            if isinstance(each, (cst.FunctionDef, cst.ClassDef)):
                names = [each.name.value]
            if any(sum(isinstance(n, cst.Name) and n.value == name for n in walk(self._module)) > 1 for name in names):
                return True
        return False

    def leave_IndentedBlock(self, original_node: cst.IndentedBlock, updated_node: cst.IndentedBlock) -> Any:
        """A block whose head is gone begins without blank lines."""
        if not updated_node.body or len(updated_node.body) == len(original_node.body):
            return updated_node
        first: Any = updated_node.body[0]
        lead = list(first.leading_lines)
        while lead and lead[0].comment is None:
            lead.pop(0)
        return updated_node.with_changes(body=[first.with_changes(leading_lines=lead), *updated_node.body[1:]])

    def leave_If(self, original_node: cst.If, updated_node: cst.If) -> Any:
        """An `if` that is empty now, or whose branches make the same session at two levels."""
        body = updated_node.body
        if isinstance(body, cst.IndentedBlock) and not body.body and original_node.body.body:
            return cst.RemoveFromParent() if updated_node.orelse is None else updated_node
        merged = self._merged(updated_node)
        return updated_node if merged is None else merged

    def _merged(self, node: cst.If) -> Any:
        other = node.orelse
        if not isinstance(other, cst.Else) or not isinstance(node.test, (cst.Name, cst.Attribute)):
            return None
        here: Any = m.extract(node.body, _MADE)
        there: Any = m.extract(other.body, _MADE)
        if here is None or there is None:
            return None
        line: Any = node.body.body[0]
        (target, call), (target_there, call_there) = ((each["target"], each["call"]) for each in (here, there))
        code = self._module.code_for_node
        (words, given), (words_there, given_there) = _arguments(code, call), _arguments(code, call_there)
        if (
            words.keys() - {"level", "losses", "scale"} or words_there.keys() - {"level", "losses"}
            or any(arg.star for arg in call.args) or code(target) != code(target_there) or given != given_there
            or words_there["level"] != '"O0"' or " if " in words["level"]
        ):  # fmt: skip
            return None
        test = code(node.test)
        args = []
        for arg in call.args:
            word = arg.keyword.value if arg.keyword is not None else ""
            if word in ("level", "scale"):
                other_text = '"O0"' if word == "level" else "None"
                own = f"({code(arg.value)})" if isinstance(arg.value, cst.IfExp) else code(arg.value)
                arg = arg.with_changes(value=cst.parse_expression(f"{own} if {test} else {other_text}"))
            args.append(arg)
        assign = cst.Assign([cst.AssignTarget(target)], call.with_changes(args=args))
        return line.with_changes(body=[assign], leading_lines=[*node.leading_lines, *line.leading_lines])


def _arguments(code: Callable[[cst.CSTNode], str], call: Any) -> tuple[dict[str, str], list[str]]:
    """The text of arguments by keyword, and of the others."""
    words = {arg.keyword.value: code(arg.value) for arg in call.args if arg.keyword is not None}
    return words, [code(arg.value) for arg in call.args if arg.keyword is None and not arg.star]


_MADE = m.IndentedBlock(
    [
        m.SimpleStatementLine(
            [
                m.Assign(
                    [m.AssignTarget(m.SaveMatchedNode(m.DoNotCare(), "target"))],
                    m.SaveMatchedNode(m.Call(m.Attribute(m.Name("preamp"), m.Name("prepare"))), "call"),
                )
            ]
        )
    ]
)
"""A block that is nothing but `target = preamp.prepare(...)`."""


def _defines(statement: Any) -> bool:
    """Whether a handler's statement gives what was not found; others say that it was not, and set flags."""
    if isinstance(statement, cst.SimpleStatementLine):
        return any(isinstance(small, (cst.Import, cst.ImportFrom)) for small in statement.body)
    return isinstance(statement, (cst.FunctionDef, cst.ClassDef, cst.Try))


def _cannot_fail(statement: Any) -> bool:
    """Whether a statement is `pass`, or gives a name a constant."""
    return isinstance(statement, cst.SimpleStatementLine) and all(
        isinstance(small, cst.Pass)
        or (isinstance(small, cst.Assign) and isinstance(small.value, (cst.Name, cst.BaseString, cst.BaseNumber)))
        for small in statement.body
    )


def _is_bound(module: cst.Module, name: str) -> bool:
    """Whether the module itself imports a package under its own name."""
    here = (node for node in _module_level(module) if isinstance(node, cst.Import))
    return any(local == name for node in here for _, _, local in imported(node))


def _module_level(node: cst.CSTNode) -> Any:
    for child in node.children:
        if isinstance(child, (cst.FunctionDef, cst.ClassDef, cst.Lambda)):
            continue
        yield child
        yield from _module_level(child)


def _with_import(module: cst.Module, name: str) -> cst.Module:
    """The module with `import name` after the other imports at its head."""
    body = list(module.body)
    line = cst.parse_statement(f"import {name}", config=module.config_for_parsing)
    at = 0
    for index, statement in enumerate(body):
        text = module.code_for_node(statement.with_changes(leading_lines=())).strip()
        docstring = index == 0 and text[:1] in "\"'rR"
        imports = isinstance(statement, cst.SimpleStatementLine) and isinstance(
            statement.body[0], (cst.Import, cst.ImportFrom)
        )
        if docstring or imports:
            at = index + 1
        elif not isinstance(statement, cst.Try):
            break
    return module.with_changes(body=[*body[:at], line, *body[at:]])
