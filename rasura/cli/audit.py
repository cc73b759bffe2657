"""``rasura audit`` and ``report``: what an adversary can recover."""

from __future__ import annotations

import sys
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from rasura.cli.outcome import Ending, Junit, Mlflow, Sarif, Wandb, conclude
from rasura.cli.services import run_service_audit, service_planned
from rasura.cli.shared import (
    AnyTask,
    AttackedModel,
    Entries,
    FreshLabels,
    LabelColumn,
    LanguageModel,
    Limit,
    MaxLength,
    Out,
    PairColumn,
    Reference,
    ReportLanguage,
    Source,
    StepDevice,
    TextColumn,
    TruncateAll,
    app,
    device_named,
    err,
    left_over,
    numbers,
    say,
    split,
    starting,
)
from rasura.core.errors import InputError

Engine = Annotated[str, typer.Option(help="local, or ray to distribute the cells over a Ray cluster")]
Address = Annotated[str | None, typer.Option(help="address of a running Ray cluster")]
Workers = Annotated[int | None, typer.Option(help="number of processes")]
FailAbove = Annotated[
    float | None, typer.Option(help="exit with code 3 if a risk is above this fraction, or 4 if a risk is unknown")
]
BatchSizes = Annotated[str | None, typer.Option(help="examples per update, separated by commas: 1,2,4")]
Clients = Annotated[str | None, typer.Option(help="audit the sum of so many clients, one example each: 1,2,4,8")]
ShowText = Annotated[bool, typer.Option("--show-text", help="store and show texts or images unmasked")]
Texts = Annotated[list[str] | None, typer.Option(help="a text to audit (repeatable), instead of FILE")]
Service = Annotated[
    bool, typer.Option("--service", help="audit a model service, by service-protections and service-attacks")
]
Kinds = Annotated[str | None, typer.Option(help="kinds of update, separated by commas; see: rasura list update-kinds")]


@app.command()
def audit(
    file: Source = None,
    service: Service = False,
    text: Texts = None,
    reference: Reference = None,
    language_model: LanguageModel = None,
    model: AttackedModel = None,
    task: AnyTask = None,
    attack: Annotated[str | None, typer.Option(help="attacks, separated by commas; see: rasura list attacks")] = None,
    defense: Annotated[str | None, typer.Option(help="defenses, separated by commas; combine defenses with +")] = None,
    update: Kinds = None,
    threat: Annotated[str | None, typer.Option(help="threat models, separated by commas; see: rasura list threats")] = None,
    batch_size: BatchSizes = None,
    clients: Clients = None,
    limit: Limit = None,
    seeds: Annotated[int | None, typer.Option(help="number of repetitions, each with its own seed")] = None,
    seed: Annotated[int | None, typer.Option(help="first seed")] = None,
    keys: Annotated[int | None, typer.Option(help="number of keys of a model service")] = None,
    budget: Annotated[str | None, typer.Option(help="effort per attack: quick, default or paper")] = None,
    max_memory: Annotated[int | None, typer.Option(help="memory of an attack in MiB, beside model and update")] = None,
    entries: Entries = None,
    suite: Annotated[str | None, typer.Option(help="use the attacks and defenses of a suite: quick or full")] = None,
    config: Annotated[Path | None, typer.Option(help="a TOML file with the same settings")] = None,
    num_labels: FreshLabels = None,
    truncate: TruncateAll = False,
    max_length: MaxLength = None,
    show_text: ShowText = False,
    fail_above: FailAbove = None,
    junit: Junit = None,
    sarif: Sarif = None,
    mlflow: Mlflow = None,
    wandb: Wandb = None,
    report_language: ReportLanguage = "en",
    folder: Out = Path("runs/audit"),
    device: StepDevice = "auto",
    engine: Engine = "local",
    address: Address = None,
    workers: Workers = None,
    text_column: TextColumn = None,
    pair_column: PairColumn = None,
    label_column: LabelColumn = None,
    as_json: Annotated[bool, typer.Option("--json", help="print the summary as JSON")] = False,
) -> None:
    """Measure what attacks recover from the updates of your examples, under each protection.

    --fail-above judges every protection, and the baseline none only if no protection was tested (exit codes: docs/ci.md).

    Example: rasura audit notes.jsonl --attack span,best --defense none,dropout:0.1 --limit 8
    """
    ending = Ending(fail_above, as_json, junit, sarif, mlflow, wandb, report_language, numbers(clients, "clients")).checked()
    given = _summed(ending, service, _given(
        data=file, texts=tuple(text) if text else None, reference=reference, language_model=language_model,
        entries=entries, model=model, task=task, attacks=split(attack), defenses=split(defense), updates=split(update),
        threats=split(threat), batch_sizes=numbers(batch_size, "batch-size"), limit=limit, seeds=seeds, seed=seed,
        budget=budget, num_labels=num_labels, max_memory=max_memory, truncate=truncate or None, show_text=show_text or None,
        max_length=max_length, keys=keys, text_column=text_column, pair_column=pair_column, label_column=label_column,
    ))  # fmt: skip
    if service:
        return run_service_audit(service_planned(config, given | _beside(suite, engine, device, workers)), folder, ending)
    return run_audit(_planned(config, suite, given), folder, device_named(device), ending, engine, address, workers)


def _summed(ending: Ending, service: bool, given: dict[str, Any]) -> dict[str, Any]:
    """``given``, where the numbers of clients whose sums are audited are the batch sizes of unprotected updates."""
    if ending.clients is None:
        return given
    named = given.get("defenses", ("none",))
    if service or {"batch_sizes", "updates"} & given.keys() or not {*named} <= {"none", "sealing:all/by=secagg"}:
        raise InputError(
            "--clients audits the sum of clients' gradients, one example each and without another protection; leave out "
            "--service, --batch-size, --update and any --defense but sealing:all/by=secagg"
        )
    return given | {"batch_sizes": ending.clients, "defenses": ("none",), "updates": ("fedsgd",)}


def _beside(suite: str | None, engine: str, device: str, workers: int | None) -> dict[str, Any]:
    """The options that differ from the defaults of an audit of updates."""
    usual = {"suite": (suite, None), "engine": (engine, "local"), "device": (device, "auto"), "workers": (workers, None)}
    return {name: value for name, (value, default) in usual.items() if value != default}


def _given(**options: Any) -> dict[str, Any]:
    """The options that were given on the command line."""
    return {name: value for name, value in options.items() if value is not None}


def _planned(config: Path | None, suite: str | None, given: dict[str, Any]) -> Any:
    """The plan from a file and a suite, where named, with the options ``given`` on the command line."""
    from rasura.core.options import known
    from rasura.runs.plans import SUITES, Plan, from_toml

    plan = from_toml(config) if config else Plan()
    if suite:
        attacks, defenses = SUITES[known("suite", suite, SUITES)]
        plan = replace(plan, attacks=attacks, defenses=defenses)
    if "keys" in given:
        raise InputError("--keys needs --service: an audit of updates has seeds; remove it, or pass --seeds")
    if {"data", "texts"} <= given.keys():
        raise InputError("FILE and --text were both given; pass one of them")
    return plan.with_given(given).checked()


def _check_run(engine: str, address: str | None, workers: int | None, device: str) -> None:
    from rasura.core.options import known

    if workers is not None and workers < 1:
        raise InputError(f"--workers is {workers}; expected at least 1")
    if known("engine", engine, ENGINES) == "local" and address:
        raise InputError("--address needs --engine ray")
    if engine == "ray" and device != "cpu":
        raise InputError(f"--engine ray computes on CPUs, and --device is {device}; pass --device cpu")


ENGINES = ("local", "ray")
LONG = 1800.0
"""CPU seconds from which on a run says that a smaller budget takes less."""


def run_audit(
    plan: Any, folder: Path, device: str, ending: Ending, engine: str = "local", address: str | None = None,
    workers: int | None = None, *, baseline: bool = True, seconds: float | None = None,
    known: Callable[[Mapping[str, Any], Container[str]], Iterable[Any]] | None = None,
) -> None:  # fmt: skip
    """Run ``plan`` into ``folder`` and print the results. ``baseline``: as in ``Audit``. ``seconds``: stop when they are
    over; cells of the widest intervals first (``studies.filling``). ``known``: the Records of these cells that other runs
    left for the model that this is said about; they count as run."""
    _check_run(engine, address, workers, device)
    from rasura.cli.progress import cells_watched
    from rasura.report.head import duration

    prepared, store, estimated, count, forked = _prepared(
        plan, folder, device, workers if engine == "local" and seconds is None else 1, baseline, known
    )
    if engine == "local" and (workers or 1) > 1 == count and len(prepared.left(store)) > 1 and seconds is None:
        say("--workers has no effect: beside a GPU processes cannot be forked safely. With CUDA_VISIBLE_DEVICES= set to "
            "nothing, the audit runs on several cores", to=err)  # fmt: skip
    what = "images" if prepared.data.images else "texts"
    cells, roughly = len(prepared.cells), sum(estimated.values())
    less = "; --budget quick takes a fraction of that" if roughly > LONG and plan.budget != "quick" else ""
    say(f"{cells} cell{'s' * (cells != 1)} ({cells - len(estimated)} done before), {len(prepared.data.private)} "
        f"{what}; roughly {duration(roughly)} of CPU time on {count} process{'es' * (count > 1)}{less}", to=err)  # fmt: skip
    limit = None if prepared.plan.texts else prepared.plan.limit
    for line in left_over(prepared.plan.batch_sizes, len(prepared.data.private), limit):
        say(line, to=err)
    if ending.fail_above is not None:
        store.describe({"fail_above": ending.fail_above})
    if ending.clients is not None:
        store.describe({"clients": list(ending.clients)})
    with forked as processes, cells_watched(len(prepared.cells), estimated, count, store.close) as bar:

        def progress(c: Any) -> None:
            bar.start(f"{c.attack} / {c.defense}")

        if engine == "ray":
            from rasura.integrations.ray_cluster import spread

            records = spread(prepared, store, address=address, workers=workers, progress=progress)
        elif seconds is not None:
            from rasura.studies.filling import in_time

            records = in_time(prepared, store, seconds, prepared.plan.metrics[0], progress)
        else:
            records = prepared.run(store, progress, processes)
        for record in records:
            bar.end(record.key)
        everything = list(store)
    for name, why in prepared.unavailable.items():
        err.print(f"metric {name} was left out: {why}", markup=False)
    conclude(everything, prepared.plan.canonical(), folder, ending)


def _prepared(
    plan: Any,
    folder: Path,
    device: str,
    workers: int | None,
    baseline: bool,
    known: Callable[[Mapping[str, Any], Container[str]], Iterable[Any]] | None,
) -> tuple[Any, Any, dict[str, float], int, Any]:
    """The audit, its store, the CPU seconds estimated for each cell that is left, the number of processes, and a context
    with them, None if one does it all. They are forked here, before a progress bar starts a thread."""
    from contextlib import closing, nullcontext

    with starting(), err.status("loading the model and the data"):
        import torch

        from rasura.core.run_store import RunStore
        from rasura.runs.audit import Audit
        from rasura.runs.processes import Workers, fitting

        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # a process that used several cannot be forked
        prepared = Audit(plan, device=device, baseline=baseline)
        store = RunStore(folder, prepared.plan.canonical())
        if known is not None:
            prepared.describe(store)
            cells = {cell.key: cell for cell in prepared.cells}
            for record in known(store.about, cells):
                if record.key not in store:
                    cell = cells[record.key]
                    numbers = prepared.examples_in[cell.defense, cell.batch_size][cell.batch]
                    store.add(replace(record, data=prepared.data_name, examples=numbers))
        updates = 2 * sum(p.nbytes for p in prepared.victim.model.parameters())  # before and after a protection
        count = fitting(len(prepared.left(store)), plan.max_memory, workers, threads, device, updates)
        estimated = prepared.estimate(store)
        torch.set_num_threads(threads)
    forked = nullcontext() if count == 1 else closing(Workers(prepared, count, max(1, threads // count)))
    return prepared, store, estimated, count, forked


@app.command()
def report(
    folder: Annotated[Path, typer.Argument(help="the --out folder of a run")],
    show_text: Annotated[
        bool, typer.Option("--show-text", help="show the unmasked texts or images that the run stored")
    ] = False,
    dpia: Annotated[
        Path | None, typer.Option(help="also write the section of an impact assessment to this file, .docx or .md")
    ] = None,
    report_language: ReportLanguage = "en",
    as_json: Annotated[bool, typer.Option("--json", help="print the summary as JSON")] = False,
) -> None:
    """Write report.html for a finished or interrupted audit, calibration, membership run or training.

    Example: rasura report runs/audit --language de
    """
    from rasura.report.page import write_dpia, write_report

    path = write_report(folder, show_text=show_text, language=report_language)
    if dpia is not None:
        say(f"impact assessment: {write_dpia(folder, dpia, report_language)}", to=err)
    if as_json and not (folder / "summary.json").is_file():
        raise InputError(f"{folder} holds trainings, which have no summary; see the file result.json of each")
    if as_json:
        sys.stdout.write((folder / "summary.json").read_text(encoding="utf-8"))
    else:
        say(f"report: {path}")
