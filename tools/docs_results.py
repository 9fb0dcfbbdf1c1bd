"""Tables and pictures of the documents that are made from committed results, under `benchmarks/results`."""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

from preamp.report import Column, Table

_Maker = Callable[[dict[str, Any]], tuple[Table, str]]
_Generator = Callable[[Path], str]


def newest(root: Path, theme: str) -> Path | None:
    """The newest committed result of a theme: files are called `<theme>_<hardware>_<date>_<commit>.json`."""
    found = sorted((root / "benchmarks" / "results").glob(f"{theme}_*.json"), key=lambda p: p.stem.split("_")[-2])
    return found[-1] if found else None


def in_field_terms(name: str) -> str:
    """The name of a row as documents have it; older results say "by chance"."""
    return re.sub(r"(rounded )?by chance", "stochastic rounding", name)


def committed(theme: str, how: str) -> Callable[[_Maker], _Generator]:
    """Makes a generator of a function from the newest results of a theme to a table and what is to be said of it."""

    def decorate(make: _Maker) -> _Generator:
        @wraps(make)
        def generator(root: Path) -> str:
            path = newest(root, theme)
            if path is None:
                return f"(no results committed yet: `{how}` makes them)"
            table, text = make(json.loads(path.read_text(encoding="utf-8")))
            return f"{table.to_markdown()}\n\n{text}: `{path.relative_to(root).as_posix()}`, made by `{how}`."

        return generator

    return decorate


@committed("demo", "./dev demo")
def demo(results: dict[str, Any]) -> tuple[Table, str]:
    """Results of the demo, one row a network and level, with where they come from."""
    machine = results["environment"]
    columns = (
        Column("network"), Column("level"), Column("time", "ms/step", 1), Column("against O0", "x", 2),
        Column("memory", "MiB", 1), Column("final loss", digits=4), Column("quality"), Column("fp32 seeds"),
        Column("skips", digits=0),
    )  # fmt: skip
    rows = [row for task in results["plan"]["models"] for row in _demo_rows(results, task)]
    seeds = len(results["plan"]["seeds"])
    within, judged = sum(j["within"] for j in results["judgements"]), len(results["judgements"])
    text = (
        f"Size {results['plan']['size']}, {seeds} seeds a level: **{within} of {judged} 16-bit results "
        f"(mean over seeds) are not below the worst of the {seeds} float32 seeds.** "
        f"{machine.get('gpu', machine['cpu'])}, {machine['threads']} threads, torch {machine['torch']}, Python "
        f"{machine['python']}, preamp at {machine['commit']}; {results['seconds']:.0f} s in all. All samples"
    )
    return Table("", columns, rows), text


def _demo_rows(results: dict[str, Any], task: str) -> list[tuple[Any, ...]]:
    runs = [run for run in results["runs"] if run["task"] == task and run["complete"]]
    band = [run["quality"] for run in runs if run["level"] == "O0"]
    metric = next((j["metric"] for j in results["judgements"] if j["task"] == task), "quality")
    reference = statistics.median(run["ms_per_step"] for run in runs if run["level"] == "O0")
    rows = []
    for level in results["plan"]["levels"]:
        own = [run for run in runs if run["level"] == level]
        ms = statistics.median(run["ms_per_step"] for run in own)
        rows.append((
            task, level, ms, reference / ms, max(run["peak_bytes"] for run in own) / 2**20,
            statistics.fmean(run["final_loss"] for run in own),
            f"{metric} {statistics.fmean(run['quality'] for run in own):.4f}", f"{min(band):.4f} to {max(band):.4f}",
            sum(len(run["skipped"]) for run in own),
        ))  # fmt: skip
    return rows


@committed("seeds", "preamp demo -m seresnext --seeds 9")
def seeds(results: dict[str, Any]) -> tuple[Table, str]:
    """How far apart seeds of one network are, level by level."""
    (metric,) = {judgement["metric"] for judgement in results["judgements"]}
    rows = []
    for level in results["plan"]["levels"]:
        own = [run["quality"] for run in results["runs"] if run["level"] == level and run["complete"]]
        rows.append((level, statistics.fmean(own), min(own), max(own), len(own)))
    columns = (
        "level", Column(f"mean {metric}", digits=4), Column("smallest", digits=4), Column("largest", digits=4),
        Column("seeds", digits=0),
    )  # fmt: skip
    machine = results["environment"]
    text = f"SE-ResNeXt. {machine['cpu']}, torch {machine['torch']}, preamp at {machine['commit']}"
    return Table("", columns, rows), text


@committed("regions", "./dev bench regions")
def bench(results: dict[str, Any]) -> tuple[Table, str]:
    """The newest committed ratios of the suite "regions"."""
    rows = [
        (row["name"], row["what"], c["ratio"]["median"], c["ratio"]["min"], c["ratio"]["max"])
        for row in results["suites"]["regions"]
        for c in row["contenders"]
        if c["name"] == "preamp.autocast"
    ]
    columns = ("work", "what", Column("median", digits=3), Column("smallest", digits=3), Column("largest", digits=3))
    machine = results["environment"]
    text = (
        "Ratios torch.autocast / preamp.autocast of the time of one round; above 1 preamp is faster. "
        f"{machine['cpu']}, torch {machine['torch']}, preamp at {machine['commit']}, {results['rounds']} rounds"
    )
    return Table("", columns, rows), text


@committed("apex-door", "python -m benchmarks.apex_door")
def apex_door(results: dict[str, Any]) -> tuple[Table, str]:
    """What a step through preamp.compat.apex takes beside preamp's own."""
    rows = []
    for row in results["rows"]:
        low, median, high = statistics.quantiles(row["ratios"], n=4)
        own, door = (1e3 * statistics.median(seconds) for seconds in row["seconds"].values())
        rows.append((row["name"], own, door, median, low, high))
    columns = (
        "12-layer transformer step", Column("preamp.prepare", "ms", 1), Column("compat.apex", "ms", 1),
        Column("ratio", digits=3), Column("lower quartile", digits=3), Column("upper quartile", digits=3),
    )  # fmt: skip
    machine = results["environment"]
    text = (
        "Ratio: time of preamp's own session over time through compat.apex, round by round; above 1 compat.apex is "
        f"faster. {machine['cpu']}, {machine['threads']} threads, torch {machine['torch']}, preamp at "
        f"{machine['commit']}, {len(results['rows'][0]['ratios'])} rounds"
    )
    return Table("", columns, rows), text


@committed("doctor-overhead", "python -m benchmarks.doctor_overhead")
def doctor_overhead(results: dict[str, Any]) -> tuple[Table, str]:
    """What watching costs a training run, by how often magnitudes are counted."""
    rows = []
    for row in results["rows"]:
        low, median, high = statistics.quantiles(row["ratios"], n=4)
        alone, watched = (statistics.median(row["seconds"][who]) for who in ("alone", "watched"))
        own = statistics.median(row["seconds"]["own"]) / alone
        rows.append((f"`{row['name']}`", alone, watched, f"{1 / median - 1:.1%}", f"{own:.1%}", median, low, high))
    columns = (
        "BERT, size ci, on the CPU", Column("alone", "s", 2), Column("watched", "s", 2), "more time", "doctor's own",
        Column("ratio", digits=3), Column("lower quartile", digits=3), Column("upper quartile", digits=3),
    )  # fmt: skip
    machine = results["environment"]
    same = "the losses of all runs are the same bits" if results["losses alike"] else "THE LOSSES DIFFER"
    text = (
        "Ratio: time alone over time watched, round by round, and the median of those; more time: what that ratio "
        "means, so not the quotient of the two medians; doctor's own: the time spent in its code, as it measures "
        f"itself, over the time alone. {results['steps']} steps at {results['level']}, each "
        f"run a process of its own; {same}. {machine['cpu']}, {machine['threads']} threads, torch {machine['torch']}, "
        f"preamp at {machine['commit']}, {len(results['rows'][0]['ratios'])} rounds"
    )
    return Table("", columns, rows), text


def _shadowed_step(results: dict[str, Any]) -> tuple[Table, str]:
    """What a step costs that is followed with shadows."""
    rows = []
    for row in results["rows"]:
        alone, followed, counted = (row["seconds"][which] for which in ("alone", "followed", "counted"))
        held = [row["bytes"][who] / 2**20 for who in ("alone", "watched")]
        rows.append((row["network"], 1e3 * alone, 1e3 * followed, followed / alone, counted / alone, *held))
    columns = (
        "network", Column("alone", "ms", 0), Column("followed", "ms", 0), Column("ratio", digits=1),
        Column("only counted", digits=1), Column("memory alone", "MiB", 0), Column("followed", "MiB", 0),
    )  # fmt: skip
    machine = results["environment"]
    same = "the losses are the same bits" if all(row["losses alike"] for row in results["rows"]) else "LOSSES DIFFER"
    text = (
        "Medians of a step's time without the doctor, in steps that it follows with shadows, and in steps in which it "
        "only counts magnitudes, as a multiple of the time alone; memory is the peak of ten steps beyond what the "
        f"process held before. Size {results['size']}, level {results['level']}, 1 thread; {same}. {machine['cpu']}, "
        f"torch {machine['torch']}, preamp at {machine['commit']}, {results['rounds']} rounds"
    )
    return Table("", columns, rows), text


shadowed_step = committed("shadowed-step", "python -m benchmarks.shadowed_step")(_shadowed_step)
"""On a CPU without 16-bit arithmetic."""

shadowed_step_native = committed("shadowed-step-native", "python -m benchmarks.shadowed_step")(_shadowed_step)
"""On a CPU with arithmetic for both dtypes."""


@committed("apex-levels", "python -m benchmarks.apex_levels")
def apex_levels(results: dict[str, Any]) -> tuple[Table, str]:
    """Final losses of networks trained through preamp.compat.apex, by level."""
    finals: dict[str, dict[str, list[float]]] = {}
    for run in results["rows"]:
        last = statistics.fmean(run["losses"][-len(run["losses"]) // 10 :])
        finals.setdefault(run["network"], {}).setdefault(run["level"], []).append(last)
    trained = list(next(iter(finals.values())))
    rows: list[tuple[Any, ...]] = [
        (name, *(statistics.fmean(own[level]) for level in trained), f"{min(own['O0']):.4f} to {max(own['O0']):.4f}")
        for name, own in finals.items()
    ]
    columns: list[Column | str] = ["network", *(Column(level, digits=4) for level in trained), "O0, seed by seed"]
    machine = results["environment"]
    text = (
        f"Training loss over the last {len(results['rows'][0]['losses']) // 10} of {len(results['rows'][0]['losses'])} "
        f"steps, mean of {len(next(iter(finals.values()))['O0'])} seeds, SGD with momentum. {machine['cpu']}, torch "
        f"{machine['torch']}, preamp at {machine['commit']}"
    )
    return Table("", columns, rows), text


def _cpu_levels(results: dict[str, Any]) -> tuple[Table, str]:
    """Whole steps on a CPU: time against float32 and torch.amp, and what is kept."""
    rows = []
    for row in results["rows"]:
        own = {each["name"]: each for each in row["contenders"]}
        for name, each in own.items():
            of_torch = own[_torch_amp(name)]["median ms"] / each["median ms"] if name.startswith("O") else None
            kept = each["kept"] / own["float32"]["kept"]
            rows.append((row["name"], name, each["median ms"], each["ratio"]["median"], of_torch, kept))
    columns = (
        "network", "contender", Column("step", "ms", 1), Column("against float32", "x", 2),
        Column("against torch.amp", "x", 1), Column("kept for backward", "of float32's", 2),
    )  # fmt: skip
    machine = results["environment"]
    rounds = len(results["rows"][0]["contenders"][0]["seconds"])
    text = (
        "Medians of steps, contenders in turn in one process; ratios are medians over rounds, above 1 is faster; "
        "torch.amp is that of the same 16-bit dtype. "
        f"{machine['cpu']}, 16-bit arithmetic: {machine['cpu 16-bit arithmetic']}, {machine['threads']} threads, torch "
        f"{machine['torch']}, preamp at {machine['commit']}, {rounds} rounds"
    )
    return Table("", columns, rows), text


cpu_levels = committed("cpu-levels", "python -m benchmarks.cpu_levels")(_cpu_levels)
"""On a CPU without 16-bit arithmetic."""

cpu_levels_native = committed("cpu-levels-native", "python -m benchmarks.cpu_levels")(_cpu_levels)
"""On a CPU with arithmetic for both dtypes."""


def _torch_amp(level: str) -> str:
    return f"torch.amp {'fp16' if level in ('O1', 'O2') else 'bf16'}"


def spans_of_levels(root: Path, theme: str) -> tuple[Callable[[str, str], str], dict[str, Any]]:
    """From committed steps of the levels: what spans a figure of some levels takes over networks, and the machine."""
    path = newest(root, theme)
    if path is None:
        raise FileNotFoundError(f"no results of {theme} are committed")
    results = json.loads(path.read_text(encoding="utf-8"))

    def span(figure: str, names: str) -> str:
        found = []
        for row in results["rows"]:
            own = {each["name"]: each for each in row["contenders"]}
            for name in names.split():
                each, torchs = own[name], own[_torch_amp(name)]
                found.append({
                    "float32": each["ratio"]["median"],
                    "torch.amp": torchs["median ms"] / each["median ms"],
                    "kept": each["kept"] / own["float32"]["kept"],
                }[figure])  # fmt: skip
        digits = 1 if figure == "torch.amp" else 2  # as in the table
        return f"{min(found):.{digits}f} to {max(found):.{digits}f}"

    return span, results["environment"]


def cpu_story(root: Path) -> str:
    """What to expect on a CPU, in the terms of the tables in docs/cpu.md: speeds as multiples of another's."""
    span, about = spans_of_levels(root, "cpu-levels")
    own, machine = spans_of_levels(root, "cpu-levels-native")
    every, low, half = "O1 O2 O4 O5", "O4 O5", "O1 O2"
    return (
        "On a CPU without 16-bit arithmetic, which is most of them, preamp computes 16-bit products in float32 and "
        "rounds them once. A whole step of the demo's four networks at O1, O2, O4 and O5 then has "
        f"{span('float32', every)} times the speed of float32 and {span('torch.amp', every)} times that of torch.amp, "
        f"and keeps {span('kept', every)} of float32's bytes for backward ({about['cpu']}, held to AVX2). On a CPU "
        f"that has it for bfloat16, O4 and O5 have {own('float32', low)} times the speed of float32 and "
        f"{own('torch.amp', low)} times that of torch.amp; for O1 and O2 that is {own('float32', half)} and "
        f"{own('torch.amp', half)} times ({machine['cpu']}). Both with torch {about['torch']}."
    )


@committed("step", "./dev bench step")
def step(results: dict[str, Any]) -> tuple[Table, str]:
    """The newest committed ratios of the suite "step", and what was counted."""
    rows: list[tuple[Any, ...]] = []
    for row in results["suites"]["step"]:
        for c in row["contenders"]:
            counts, ratio = c["counts"], c["ratio"]
            told = (ratio["median"], ratio["min"], ratio["max"], counts["bytes"] / 1e6)
            counted = (counts["casts"], counts["calls"], counts["waits"])
            rows.append((row["name"], c["name"], 1e3 * c["stats"]["median"], *told, *counted))
    columns = (
        "tensors", "contender", Column("median", "ms", 2), Column("ratio", digits=2), Column("smallest", digits=2),
        Column("largest", digits=2), Column("moved", "MB", 1), Column("casts", digits=0), Column("calls", digits=0),
        Column("waits", digits=0),
    )  # fmt: skip
    machine = results["environment"]
    text = (
        "`scaler.step(optimizer); scaler.update()` on tensors that have gradients. Ratio: time of the row's first "
        "contender over time of this one, round by round; above 1 is faster. Counted in one call: megabytes that "
        "operators read and write, tensors converted, operators called (a fused one is one call), values read by the "
        f"host (free on a CPU). {machine['cpu']}, {machine['threads']} threads, torch {machine['torch']}, preamp at "
        f"{machine['commit']}, {results['rounds']} rounds"
    )
    return Table("", columns, rows), text


@committed("options", "python -m benchmarks.options")
def option_times(results: dict[str, Any]) -> tuple[Table, str]:
    """What a step of AdamW takes with each option, on a CPU."""
    reference = results["steps"][0]["seconds"]
    rows = []
    for row in results["steps"]:
        ratios = [a / b for a, b in zip(reference, row["seconds"], strict=True)]
        median = 1e3 * statistics.median(row["seconds"])
        rows.append((in_field_terms(row["name"]), median, statistics.median(ratios)))
    machine = results["environment"]
    text = (
        "A step of 15 million bfloat16 parameters (150 tensors). Ratio: time by hand over time of this one, above 1 is "
        f"faster. {machine['cpu']}, {machine['threads']} threads, torch {machine['torch']}, preamp at "
        f"{machine['commit']}, {len(reference)} rounds"
    )
    return Table("", ("AdamW", Column("median", "ms", 1), Column("ratio", digits=2)), rows), text


@committed("options", "python -m benchmarks.options")
def option_losses(results: dict[str, Any]) -> tuple[Table, str]:
    """What training comes to with each option."""
    rows = [
        (row["network"], row["level"], in_field_terms(row["name"]), statistics.fmean(row["losses"]),
         f"{min(row['losses']):.4f}", f"{max(row['losses']):.4f}")
        for row in results["rows"]
    ]  # fmt: skip
    losses = {(row["network"], row["name"]): row["losses"] for row in results["rows"]}
    networks = {network for network, _ in losses}
    held = [
        network
        for network in networks
        if statistics.fmean(losses[network, "master split24, 8-bit states"]) <= max(losses[network, "master float32"])
    ]
    text = (
        "Training loss over the last tenth of the steps, three seeds. At 7.03 bytes (master split24, 8-bit states) the "
        f"mean is not above the largest of float32 masters on {len(held)} of {len(networks)} networks. preamp at "
        f"{results['environment']['commit']}"
    )
    columns = ("network", "level", "AdamW", Column("mean", digits=4), "smallest", "largest")
    return Table("", columns, rows), text


@committed("rivals", "TORCHDYNAMO_DISABLE=1 python -m benchmarks.rivals")
def rivals(results: dict[str, Any]) -> tuple[Table, str]:
    """Bytes a parameter of AdamW in several libraries, and what training comes to."""
    losses = {(row["network"], row["name"]): row["losses"] for row in results["rows"]}
    networks = list(dict.fromkeys(network for network, _ in losses))

    def of(network: str, name: str) -> str:
        own = losses.get((network, name), [])
        return f"{statistics.fmean(own):.4f} ({min(own):.4f} to {max(own):.4f})" if own else ""

    rows = [
        (
            row["name"] + ("" if row["counted"] else " (its documents)"),
            row["bytes"],
            *(of(n, row["name"]) for n in networks),
        )
        for row in results["bytes"]
    ]
    machine = results["environment"]
    text = (
        "Allocated bytes of weight, gradient, master and both moments of a large matrix; training loss over the last "
        "tenth of the steps, mean (smallest to largest) of three seeds. torchao and bitsandbytes step bfloat16 weights "
        f"without masters. {machine['cpu']}, torch {machine['torch']}, preamp at {machine['commit']}"
    )
    return Table("", ("AdamW", Column("bytes a parameter", digits=2), *networks), rows), text


@committed("rivals", "TORCHDYNAMO_DISABLE=1 python -m benchmarks.rivals")
def frozen(results: dict[str, Any]) -> tuple[Table, str]:
    """Whether second moments fall when gradients do."""
    rows = [(row["name"], row["length"]) for row in results["steps"]]
    text = (
        "Mean length of the steps of elements whose normal gradients became 10 times smaller 5000 steps ago, beside "
        "neighbours whose did not, over that of torch's AdamW in float32; 1 is right. Float32 weights. Preamp at "
        f"{results['environment']['commit']}"
    )
    return Table("", ("moments", Column("length of a step", digits=2)), rows), text


@committed("optimizers", "python -m benchmarks.optimizers")
def any_optimizer(results: dict[str, Any]) -> tuple[Table, str]:
    """What training comes to in float32, with masters and without, by many optimizers."""
    ways = list(dict.fromkeys(row["way"] for row in results["rows"]))

    def mean(name: str, way: str, what: str) -> float:
        return statistics.fmean(row[what] for row in results["rows"] if (row["optimizer"], row["way"]) == (name, way))

    rows = [
        (name, *(mean(name, way, what) for way in ways for what in ("loss", "metric")))
        for name in dict.fromkeys(row["optimizer"] for row in results["rows"])
    ]
    numbers = [Column(f"{way}: {what}", digits=4) for way in ways for what in ("loss", "AUC")]
    columns: list[Column | str] = ["optimizer", *numbers]
    machine = results["environment"]
    text = (
        "Flights, size ci, 400 steps, means over two seeds. Loss: training loss over the last tenth of the steps; AUC: "
        "on flights that were not trained on. "
        f"{machine['cpu']}, torch {machine['torch']}, preamp at {machine['commit']}"
    )
    return Table("", columns, rows), text


@committed("sessions", "./dev bench sessions")
def sessions(results: dict[str, Any]) -> tuple[Table, str]:
    """Whole training steps by sessions beside a loop by hand with torch.amp."""
    (row,) = results["suites"]["sessions"]
    rows = [
        (c["name"], 1e3 * c["stats"]["median"], c["ratio"]["median"], c["ratio"]["min"], c["ratio"]["max"])
        for c in row["contenders"]
    ]
    columns = (
        "training step", Column("median", "ms", 1), Column("ratio", digits=3), Column("smallest", digits=3),
        Column("largest", digits=3),
    )  # fmt: skip
    machine = results["environment"]
    text = (
        f"A transformer of {row['what']}, in bfloat16. Ratio: time of the loop by hand over time of this one, round by "
        f"round. {machine['cpu']}, torch {machine['torch']}, preamp at {machine['commit']}, {results['rounds']} rounds"
    )
    return Table("", columns, rows), text


FINDINGS = {
    "PA101": "an epsilon that vanishes",
    "PA102": "the logarithm of a 16-bit sigmoid",
    "PA103": "a constant beyond the range",
    "PA104": "an operator that wants float32, in 16 bits",
    "PA105": "dimensions that miss the tensor cores",
    "PA106": "gradients clipped or read while still scaled",
    "PA107": "float16 gradients without a loss scale",
    "PA108": "a schedule that moves on skipped steps",
    "PA109": "mixed precision asked for and not in effect",
    "PA110": "weights changed or cast inside a region",
    "PA111": "float16 weights without masters",
    "PA112": "an order that defeats the precision",
    "PA114": "values that count, in 16 bits",
    "PA115": "an operator that wants float32, fed by a 16-bit product",
    "PA201": "where the first non-finite value came from",
    "PA202": "gradients below what float16 holds",
    "PA203": "a scale that collapses or oscillates",
    "PA204": "updates that rounding takes away",
    "PA205": "values near the end of the range",
    "PA206": "a loss that leaves the full-precision run",
    "PA207": "one batch that is not finite by itself",
    "PA211": "moments that cannot move",
    "PA212": "sums kept in 16 bits",
}
"""The titles of the pages in docs/findings, by code."""

PLACED = ("found", "line", "module", "batch")


@committed("doctor-versus", "python -m tests.sick.versus")
def doctor_versus(results: dict[str, Any]) -> tuple[Table, str]:
    """How many planted diseases each tool named in their place, by code, and how many healthy scripts it stopped."""
    tools = ("doctor", "huggingface", "anomaly")
    rows: list[tuple[Any, ...]] = []

    def add(title: str, chosen: list[dict[str, Any]], outcomes: tuple[str, ...]) -> None:
        rows.append((title, len(chosen), *(sum(row[tool]["outcome"] in outcomes for row in chosen) for tool in tools)))

    sick = [row for row in results["rows"] if row["group"] != "healthy"]
    for code, title in FINDINGS.items():
        if of_code := [row for row in sick if row["group"] == code]:
            add(f"{code}: {title}", of_code, PLACED)
    add("all sick: named in place", sick, PLACED)
    add("all sick: only another place named", sick, ("elsewhere",))
    add("all healthy: false alarms", [row for row in results["rows"] if row["group"] == "healthy"], ("alarm",))
    add("sick and healthy: the tool itself failed", results["rows"], ("broke",))
    columns = (
        "planted", Column("scripts", digits=0), Column("`preamp doctor`", digits=0),
        Column("`DebugUnderflowOverflow`", digits=0), Column("`set_detect_anomaly`", digits=0),
    )  # fmt: skip
    machine = results["environment"]
    text = (
        f"transformers {machine['transformers']}, torch {machine['torch']}, {machine['cpu']}, preamp at "
        f"{machine['commit']}; what each tool said of each script"
    )
    return Table("", columns, rows), text
