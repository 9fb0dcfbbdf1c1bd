"""Every verb of the command line."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from .._version import __version__
from ..errors import PreampError
from ..report import Table
from ..report.files import write_json

# what needs torch is imported by the verb that uses it, so that --version and --help do not wait for it

app = typer.Typer(
    name="preamp",
    help="Automatic mixed precision for PyTorch: train faster, run what was written for Apex, know what it did.",
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

_Json = Annotated[Path | None, typer.Option("--json", help="Also write the table as JSON to this file.")]
_Out = Annotated[Path, typer.Option("--out", help="Folder for the report and the data.")]
_Device = Annotated[str | None, typer.Option("--device", help="cpu, cuda, cuda:1 ...; the GPU if there is one.")]
_Target = Annotated[str, typer.Argument(help="A script, or with -m a module.")]
_Arguments = Annotated[list[str] | None, typer.Argument(help="Its own arguments, options included.")]
_AsModule = Annotated[bool, typer.Option("-m", help="Run a module, as `python -m` does.")]
_Size = Annotated[str, typer.Option("--size", help="ci: minutes on a CPU; full: the published sizes, for a GPU.")]

_OTHERS_OPTIONS = {"ignore_unknown_options": True, "allow_interspersed_args": False}
"""Of a verb that runs a script: what stands behind the script belongs to it."""


def main() -> None:
    """Run the command line; an error of preamp's is one message and exit status 2."""
    try:
        app()
    except PreampError as error:
        Console(stderr=True, emoji=False).print(
            f"error: {error}", style="red", markup=False, highlight=False, soft_wrap=True
        )
        sys.exit(2)


FIRST = """\
preamp: automatic mixed precision for PyTorch. To begin with:

  preamp env                What this machine can do in 16 bits, and the level that suits it.
  preamp demo --quick       Train four real networks at several levels, and write a report.
  preamp doctor train.py    Run your training script as it is, and say what is wrong with its precision.
  preamp compare train.py   Run it as it is and in full precision, and say whether 16 bits cost anything.

In your own training loop: session = preamp.prepare(model, optimizer, level="auto")
A script that imports apex runs as it is: preamp run train.py

All commands: preamp --help. Completion in your shell: preamp --install-completion
"""
"""What `preamp` alone prints."""


@app.callback(invoke_without_command=True)
def _top(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    if version:
        print(f"preamp {__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        print(FIRST, end="")


@app.command()
def demo(
    model: Annotated[list[str] | None, typer.Option("--model", "-m", help="flights, unet, bert, seresnext.")] = None,
    levels: Annotated[
        str | None, typer.Option("--levels", help="Such as O0,O4; by default those that suit the device.")
    ] = None,
    size: _Size = "ci",
    quick: Annotated[bool, typer.Option("--quick", help="A few steps and one seed: a smoke test.")] = False,
    seeds: Annotated[int | None, typer.Option("--seeds", help="Seeds per level; 3, or 1 with --quick.")] = None,
    device: _Device = None,
    out: _Out = Path("preamp-demo"),
) -> None:
    """Train four real networks at several levels, and write a report."""
    from ..demo import judge, make_plan, run, task_table, write

    console = Console(emoji=False)
    plan = make_plan(model, levels, size, quick, seeds, device)
    results = run(plan, console, lambda so_far: write(so_far, out))
    for task in plan.tasks:
        if (table := task_table(results, task)).rows:
            show(table, console)
    html, data, report = write(results, out)
    if any(judge(results, task) for task in plan.tasks) or results.interrupted:
        console.print(report.verdict, style="bold", highlight=False)
    console.print(f"report: {html}\ndata:   {data}", highlight=False, soft_wrap=True)
    if results.interrupted:
        raise typer.Exit(130)


@app.command("lr-find")
def lr_find(
    model: Annotated[str, typer.Option("--model", "-m", help="flights, unet, bert, seresnext.")] = "seresnext",
    level: Annotated[str, typer.Option("--level", "-l", help="Level to train at.")] = "auto",
    size: _Size = "ci",
    steps: Annotated[int, typer.Option("--steps", min=4, help="Batches to try.")] = 100,
    start: Annotated[float, typer.Option("--start", help="First rate.")] = 1e-6,
    end: Annotated[float, typer.Option("--end", help="Last rate.")] = 10.0,
    batch_size: Annotated[int | None, typer.Option("--batch-size", min=2, help="Instead of the recipe's.")] = None,
    device: _Device = None,
    out: _Out = Path("preamp-lr-find"),
) -> None:
    """Find a learning rate for one of the demo's networks. For your own: preamp.lr_finder.sweep. Writes the curve."""
    from ._lr_find import find_lr

    console = Console(emoji=False)
    table, files = find_lr(model, level, size, steps, start, end, batch_size, device, out, console)
    show(table, console)
    console.print("\n".join(f"{kind}: {path}" for kind, path in files.items()), highlight=False, soft_wrap=True)


@app.command(context_settings=_OTHERS_OPTIONS, options_metavar="[-m]")
def run(target: _Target, arguments: _Arguments = None, as_module: _AsModule = False) -> None:
    """Run an unchanged script that imports apex. Every process that it starts finds preamp's apex, too."""
    from ..compat.install import run as run_unchanged

    raise typer.Exit(run_unchanged(target, arguments or [], as_module))


@app.command(context_settings=_OTHERS_OPTIONS)
def doctor(
    target: _Target,
    arguments: _Arguments = None,
    as_module: _AsModule = False,
    every: Annotated[int, typer.Option("--every", min=1, help="Observe every N-th step closely.")] = 50,
    steps: Annotated[int | None, typer.Option("--steps", min=1, help="End the script after so many steps.")] = None,
    replay: Annotated[bool, typer.Option(help="Replay a bad step to find its origin.")] = True,
    out: _Out = Path("preamp-doctor"),
    json_file: Annotated[Path | None, typer.Option("--json", help="Also write report.json to this file.")] = None,
    strict: Annotated[bool, typer.Option("--strict", help="Exit with 3 when an error was found.")] = False,
) -> None:
    """Run a script, and say what is wrong with its precision. The findings have lines, and what to write instead."""
    from ._doctor import run_doctor

    status = run_doctor(
        target, arguments or [], as_module, out=out, json_file=json_file, every=every, steps=steps, replay=replay,
        strict=strict,
    )  # fmt: skip
    raise typer.Exit(status)


@app.command(context_settings=_OTHERS_OPTIONS)
def compare(
    target: _Target,
    arguments: Annotated[
        list[str] | None, typer.Argument(help="Its own; {run} in one stands for the run's name, as in full-0.")
    ] = None,
    as_module: _AsModule = False,
    seeds: Annotated[int, typer.Option("--seeds", min=1, help="Runs of each precision, each with other seeds.")] = 3,
    margin: Annotated[
        float | None,
        typer.Option("--margin", min=0, help="Share of the loss that does not matter; else what seeds change."),
    ] = None,
    steps: Annotated[int | None, typer.Option("--steps", min=1, help="End each run after so many steps.")] = None,
    out: _Out = Path("preamp-compare"),
    json_file: Annotated[Path | None, typer.Option("--json", help="Also write compare.json to this file.")] = None,
) -> None:
    """Run a script in float32, too, and say if 16 bits cost anything. Several seeds of each tell it from chance."""
    from ._doctor import run_compare

    status = run_compare(
        target, arguments or [], as_module, out=out, json_file=json_file, seeds=seeds, margin=margin, steps=steps
    )
    raise typer.Exit(status)


@app.command()
def explain(
    code: Annotated[str, typer.Argument(help="A finding's, such as PA202; all are listed without.")] = "",
) -> None:
    """What a finding means, and a script that has it with its cure."""
    from rich.markdown import Markdown

    from ..doctor.findings import codes, page

    titles = (page(each).partition("\n")[0].removeprefix("# ") for each in codes())
    text = page(code) if code else "\n".join((*titles, ""))
    text = re.sub(r"<!-- \w+ -->\n", "", text)  # what tests find the scripts by; and links that lead nowhere here
    text = re.sub(r"\[([^]]+)\]\((?:[^)]*\.md[^)]*|https?:[^)]*)\)", r"\1", text)
    console = Console(emoji=False)
    if console.is_terminal and code:
        console.print(Markdown(text))
    else:
        print(re.sub(r"\*\*([A-Z][^*]*\.)\*\*", r"\1", text), end="")


@app.command()
def migrate(
    paths: Annotated[list[Path], typer.Argument(help="Scripts, or folders of them.")],
    write: Annotated[bool, typer.Option("--write", help="Rewrite the files instead of printing the diff.")] = False,
) -> None:
    """Rewrite scripts that import apex, so that python runs them. Prints the diff, with the lines of preamp's API."""
    from ..migrate import run as migrate_files

    text, status = migrate_files(paths, write)
    print(text, end="")
    raise typer.Exit(status)


@app.command()
def plan(
    params: Annotated[str | None, typer.Option("--params", help="How many parameters: 7e9, 7B, 350M.")] = None,
    model: Annotated[
        str | None, typer.Option("--model", help="Or count a model's: module:name of a function that makes it.")
    ] = None,
    optimizer: Annotated[
        str,
        typer.Option(
            "--optimizer",
            help="A class of preamp.optim or of torch, with arguments: adamw,master=split,states=8bit; torch.adamw.",
        ),
    ] = "adamw",
    level: Annotated[str, typer.Option("--level", "-l", help="Level, or any policy.")] = "O4",
    shard: Annotated[str, typer.Option("--shard", help="none, ddp or fsdp2.")] = "none",
    world: Annotated[int, typer.Option("--world", help="Ranks.")] = 1,
    as_json: _Json = None,
) -> None:
    """Compute what a rank will hold and send, in bytes, by kind. Activations are left out."""
    from ..plan import plan as make
    from ._plan import model_from, optimizer_from

    if (params is None) == (model is None):
        raise PreampError("preamp plan wants to know how large the model is: write --params 7B or --model module:name")
    given: Any = params if model is None else model_from(model)
    made = make(given, optimizer_from(optimizer), level=level, shard=shard, world=world)
    show(made.to_table(), Console(emoji=False))
    if as_json is not None:
        write_json(as_json, made.to_json())


@app.command()
def levels(as_json: _Json = None) -> None:
    """The levels, and which of them suits this machine."""
    from ._tables import levels_table

    show(levels_table(), Console(emoji=False), as_json)


@app.command()
def rules(
    policy: Annotated[str, typer.Option("--policy", help="A policy with rules of its own.")] = "O1",
    as_json: _Json = None,
) -> None:
    """The operator rules of a 16-bit region, each with its reason. They are low, full, promote, banned, as-is."""
    from ._tables import rules_table

    show(rules_table(policy), Console(emoji=False), as_json, aligned=False)


@app.command()
def env(as_json: _Json = None) -> None:
    """The machine, the versions, and what they can do in 16 bits."""
    from ._tables import environment_table

    show(environment_table(), Console(emoji=False), as_json)


def show(table: Table, console: Console, as_json: Path | None = None, aligned: bool = True) -> None:
    """Print a table as rich sees it; in a pipe as plain text, aligned or with tabs. Write it to a file too."""
    if as_json is not None:
        write_json(as_json, table.to_dict())
    if not console.is_terminal:
        console.file.write((table.to_text() if aligned else "\n".join(map("\t".join, table.cells))) + "\n")
        return
    drawn = RichTable(title=table.title, box=SIMPLE_HEAD, title_justify="left", title_style="bold")
    for column in table.layout:
        drawn.add_column(Text(column.heading), justify="right" if column.align == "right" else "left", overflow="fold")
    for row in table.cells:
        drawn.add_row(*map(Text, row))
    console.print(drawn)
    for note in table.notes:
        console.print(Text(note, style="dim"))
