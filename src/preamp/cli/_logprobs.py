"""What `preamp compare --logprobs` does: two engines' files, or a model's folder and a text."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from ..doctor.logprobs import compare_logprobs, read
from ..errors import PreampError
from ..report import Table

ROWS, LENGTH = 16, 256
"""Sequences and tokens that are taken of a text."""


def run_logprobs(
    target: str, arguments: Sequence[str], *, mask: Path | None, levels: str, json_file: Path | None
) -> None:
    """Compare, print, and write JSON if asked. Raises `PreampError`."""
    late = next((each for each in arguments if each.startswith("--")), None)
    if late is not None:  # what comes after a script is the script's, and so typer leaves it
        raise PreampError(
            f"{late} comes after the files: options stand before them, preamp compare --logprobs {late} ..."
        )
    if len(arguments) != 1:
        raise PreampError(
            f"--logprobs takes two things, and got {1 + len(arguments)}: write the files of sampler and trainer, or "
            "the folder of a model of transformers and a text file"
        )
    other = Path(arguments[0])
    for path in (Path(target), other):
        if not path.exists():
            raise PreampError(f"there is no file or folder {str(path)!r}")
    if Path(target).is_dir():
        shown, content = _of_model(target, other, [level.strip() for level in levels.split(",")])
    else:
        found = compare_logprobs(read(Path(target)), read(other), None if mask is None else read(mask))
        shown, content = found.tables(), found.to_dict()
    console = Console(emoji=False)
    for table in shown:
        console.print(table.to_text(), markup=False, highlight=False, soft_wrap=True)
        console.print()
    if json_file is not None:
        json_file.parent.mkdir(parents=True, exist_ok=True)
        json_file.write_text(json.dumps({"schema": "preamp-logprobs/1", "found": content}, indent=1) + "\n")


def _of_model(folder: str, text: Path, levels: list[str]) -> tuple[tuple[Table, ...], Any]:
    import torch

    from ..doctor.precisions import compare_precisions, tables

    try:
        content = text.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise PreampError(f"{text} is no text: {error}") from None
    try:
        from transformers import AutoModelForCausalLM, AutoTokenizer
    except ImportError:
        raise PreampError("a model's folder is read by transformers: pip install transformers") from None
    try:
        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
        tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError) as error:
        raise PreampError(f"transformers cannot load a language model from {folder}: {error}") from None
    ids = tokenizer(content, return_tensors="pt").input_ids[0]
    length = min(LENGTH, getattr(model.config, "max_position_embeddings", LENGTH), len(ids))
    if length < 2:
        raise PreampError(f"{text} has {len(ids)} tokens: two are needed, since the first has no log-probability")
    rows = min(ROWS, len(ids) // length)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokens = ids[: rows * length].view(rows, length).to(device)
    found = compare_precisions(model.to(device), tokens, levels)
    return tables(found), [each.to_dict() for each in found]
