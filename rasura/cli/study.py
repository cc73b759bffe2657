"""``rasura study``: reproduce a table of a paper with the given model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rasura.cli.audit import run_audit
from rasura.cli.membership import judged
from rasura.cli.outcome import Ending
from rasura.cli.services import serve_and_read
from rasura.cli.shared import Device, Limit, app, err, numbers, say, say_json, split, training_device, watched
from rasura.cli.train import prepared, trained
from rasura.core.errors import InputError, MissingExtra

if TYPE_CHECKING:
    from rasura.runs.service_plan import ServicePlan


SAME_KEY = "uploaded, same key"
"""Uploaded weights under the key of the training, beside trained ones in a study of several keys."""


@app.command()
def study(
    name: Annotated[str, typer.Argument(help="study in the folder studies/, for example grab/table7")],
    data: Annotated[str | None, typer.Option(help="data file, or the folder with the files of the study")] = None,
    model: Annotated[str | None, typer.Option(help="model to use instead of the study's model")] = None,
    limit: Limit = None,
    budget: Annotated[str | None, typer.Option(help="effort per attack: quick, default or paper")] = None,
    attack: Annotated[str | None, typer.Option(help="run only these attacks, separated by commas")] = None,
    batch_size: Annotated[str | None, typer.Option(help="run only these batch sizes, separated by commas")] = None,
    defense: Annotated[str | None, typer.Option(help="run only these defenses, separated by commas")] = None,
    seeds: Annotated[int | None, typer.Option(help="number of repetitions, each with its own seed")] = None,
    hours: Annotated[
        float | None, typer.Option(help="stop after this time, widest intervals first; run again to go on")
    ] = None,
    device: Device = "auto",
    folder: Annotated[Path | None, typer.Option("--out", help="folder for the run")] = None,
    results: Annotated[Path, typer.Option(help="Markdown file for the table")] = Path("studies/RESULTS.md"),
    as_json: Annotated[bool, typer.Option("--json", help="print the summary as JSON")] = False,
) -> None:
    """Reproduce a table of a paper with the given model, and write the results beside the paper's figures.

    Example: rasura study grab/table7 --data cola.validation.parquet --limit 4
    """
    from rasura.runs.service_plan import ServicePlan
    from rasura.runs.train_plan import TrainPlan
    from rasura.studies import files, plots, tables

    found = files.load_study(name)
    if found.command and model is None:
        raise InputError(f"the model of {name} is made by a script; run: {found.command}")
    plan = files.prepared(
        found, data=data, limit=limit, budget=budget, attacks=split(attack), defenses=split(defense), seeds=seeds,
        model=model, batch_sizes=numbers(batch_size, "batch-size"),
    )  # fmt: skip
    if hours is not None and (isinstance(plan, ServicePlan | TrainPlan) or not 0 < hours < float("inf")):
        raise InputError(
            f"--hours is {hours:g}; expected a time above 0, and a study of attacks on updates: others run to their end"
        )
    place, where = folder or Path("runs/studies") / name.replace("/", "-"), training_device(device)
    if isinstance(plan, ServicePlan):
        training = files.prepared_training(found, plan) if found.train else None
        worth, records = served(plan, place, training, as_json, found.keys, where)
        text = tables.service_section(found, plan, records, worth)
        plot = plots.of_service(found, plan, records)
    elif isinstance(plan, TrainPlan):
        text, plot = of_training(found, plan, place, as_json, where)
    else:
        text, plot = of_audit(found, plan, place, data, as_json, results, hours, where)
    if plot is not None:
        try:
            drawn = plots.write(plot, results.parent / "plots" / f"{name.replace('/', '-')}.svg")
            text += f"\n![{found.title}](plots/{drawn.name})\n"
        except MissingExtra as missing:  # the table stands without it
            say(str(missing), to=err)
    tables.write_section(text, results)
    say(f"table: {results}", to=err)


def of_audit(
    found: Any, plan: Any, folder: Path, data: str | None, as_json: bool, results: Path, hours: float | None = None,
    device: str = "cpu",
) -> tuple[str, Any]:  # fmt: skip
    """Section and plot of an audit, alone or together with training. ``hours``: of what fits into them. Its cells go on
    from the records beside ``results``, of all studies, and are put there."""
    from rasura.core.run_store import RunStore
    from rasura.studies import courses, files, kept, plots, tables

    # A study has the cells of its paper's table and gives no verdict, so it needs no baseline beside them.
    seconds = None if hours is None else 3600 * hours
    path = kept.path_of(found.name, results)

    said: dict[str, Any] = {}

    def known(about: Any, cells: Any) -> Iterator[Any]:
        model = kept.facts_of(about)
        records, stated = kept.beside(path, results, model, cells, plan.metrics)
        said.update(stated)
        if not records and path.is_file():
            say(f"no cell in {path} is of this run: they are of another model, other texts or another --budget; "
                f"{results} has the command that they were made with", to=err)  # fmt: skip
        if records and stated.keys() < model.keys():
            say("the records taken from beside the results do not all say with which tokenizer and configuration they were "
                "made: of those that do not, the weights alone were compared", to=err)  # fmt: skip
        yield from records

    run_audit(
        plan,
        folder,
        device,
        Ending(as_json=as_json),
        baseline=False,
        seconds=seconds,
        known=None if found.course else known,
    )
    store = RunStore(folder)
    try:
        records, model, cells = list(store), kept.facts_of(store.about), store.about["cells"]
    finally:
        store.close()
    if found.course:
        drawn = courses.courses(plan, records)
        text = courses.course_section(found, plan, drawn)
        return tables.with_rest(text, len(records), cells), courses.course_plot(drawn)
    kept.keep(path, model, said, records, plan.metrics)
    if found.train is None:
        text = tables.section(found, plan, records)
        return tables.with_rest(text, len(records), cells), plots.of_audit(found, plan, records)
    training = files.prepared_training(found, plan, data)
    worth = trained(prepared(training, folder / "training", device), as_json)
    text = tables.tradeoff_section(found, plan, records, training, worth)
    text = tables.with_rest(text, len(records), cells)
    return text, plots.of_tradeoff(found, plan, records, training, worth)


def of_training(found: Any, plan: Any, folder: Path, as_json: bool, device: str = "cpu") -> tuple[str, Any]:
    """Section and plot of a training run and of what is measured on its models."""
    from rasura.studies import deviations, files, tables

    worth = trained(prepared(plan, folder, device), as_json)
    if found.membership is not None:
        told = []
        for result in worth:
            attacks = files.prepared_membership(found, plan, result, folder)
            told.append(judged(attacks, Path(attacks.model).parent / "membership", device)[1])
        return tables.membership_section(found, plan, worth, told), None
    if not found.deviations:
        return tables.training_section(found, plan, worth), None
    with watched() as bar:
        line = bar.add_task("", total=None)
        compared = deviations.measured(
            plan, folder, found.deviations,
            lambda what, done, total: bar.update(line, description=what, completed=done, total=total),
        )  # fmt: skip
    text = deviations.deviations_section(found, plan, compared)
    return text, deviations.deviations_plot(compared)


def served(
    plan: ServicePlan, folder: Path, training: Any, as_json: bool, keys: int = 1, device: str = "cpu"
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The utility of a service under each protection, if it is trained, and what each attack recovers for each key."""
    before = prepared(training, folder / "training", device) if training else None
    worth = trained(before, as_json) if before else []
    parts = [(folder, plan, before)] if keys == 1 else list(_by_key(plan, folder, before, keys))
    records = []
    for place, part, after in parts:
        read = serve_and_read(part, place, after, baseline=False)[1]
        beside = keys > 1 and "trained" in part.weights  # of one key, and not among those of all
        records += [{**r, "update": SAME_KEY} if beside and r["update"] == "uploaded" else r for r in read]
    if as_json:
        say_json(records)
    return worth, records


def _by_key(plan: ServicePlan, folder: Path, training: Any, keys: int) -> Iterator[tuple[Path, ServicePlan, Any]]:
    """Folder, plan and training of each run: uploaded weights under each key, and both under the key of the training."""
    trained_too = tuple(p for p in plan.protections if "trained" in plan.weights or plan.parsed[p].learned)
    uploaded = [p for p in plan.protections if "uploaded" in plan.weights and not plan.parsed[p].learned]
    for key in range(keys):
        chosen = tuple(p for p in uploaded if key == 0 or p != "none")  # without protection there is no key
        if chosen:
            yield folder / f"key-{key}", replace(plan, key=key, protections=chosen, weights=("uploaded",)), None
    if trained_too:
        yield folder / "trained", replace(plan, protections=trained_too, weights=("uploaded", "trained")), training
