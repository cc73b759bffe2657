"""``rasura list`` and ``doctor``: available methods and installed parts."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from contextlib import suppress
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table

from rasura import __version__
from rasura.cli.shared import app, err, out, say, say_json
from rasura.core.errors import MissingExtra


def _version(wanted: bool) -> None:
    if wanted:
        out.print(f"rasura {__version__}", highlight=False)
        raise typer.Exit()


USES = (
    ("Read an update that was captured", "rasura read update.safetensors --model ./my-model"),
    ("Measure what each protection keeps back", "rasura audit notes.jsonl --model ./my-model"),
    ("Find how much protection is enough", "rasura calibrate notes.jsonl --model ./my-model --defense gaussian,pruning"),
)
"""What people come for, each with its command."""


@app.callback(invoke_without_command=True)
def main(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="print the version")] = False,
) -> None:
    """Measure what an adversary can recover from the data that language-model training sends out."""
    if context.invoked_subcommand is not None:
        return
    out.print("Rasura measures what can be read back from what training sends out.\n")
    for what, command in USES:
        out.print(f"[bold]{what}[/bold]\n    {command}\n", highlight=False, soft_wrap=True)
    out.print("rasura audit alone runs on fictional notes. All commands: rasura --help", highlight=False)


@app.command("list")
def list_names(
    kind: Annotated[str | None, typer.Argument(help="what to list; without it, what there is to list")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print the result as JSON")] = False,
) -> None:
    """List the names that the command line accepts, each with its source. Installed plug-ins are included.

    The kinds: attacks, defenses, metrics, membership-attacks, update-kinds, threats, service-attacks, service-metrics,
    service-protections and models.

    Example: rasura list defenses
    """
    from rasura.core.options import known
    from rasura.core.threat import THREATS
    from rasura.registry import KINDS

    if kind is None:
        _kinds({**KINDS, "threats": THREATS}, as_json)
        return
    unusable: dict[str, str] = {}
    if known("list", kind, (*KINDS, "threats")) == "threats":
        rows = {n: (t.plain, "") for n, t in THREATS.items()}
    else:
        methods = KINDS[kind]
        rows = (_models() if kind == "models" else {}) | {_written(s): (s.about, s.source) for s in methods.values()}
        unusable = methods.unusable
    if as_json:
        say_json({n: about for n, (about, _) in rows.items()})
        return
    table = Table(show_header=False, box=None, padding=(0, 2))
    for name, (about, source) in rows.items():
        table.add_row(f"[bold]{escape(name)}[/bold]", escape(about) + (f"\n[dim]{escape(source)}[/dim]" if source else ""))
    out.print(table)
    if kind == "models":
        out.print(f"\n{OWN_MODELS}", markup=False, highlight=False)
    for plugin, why in unusable.items():
        err.print(f"the plug-in {plugin} could not be loaded: {why}", markup=False, soft_wrap=True)


OWN_MODELS = (
    "Or a folder or hub id of a Hugging Face classifier or causal model. Its parts are found by its structure, as in BERT, "
    "RoBERTa, DistilBERT, GPT-2, Llama, Gemma and Qwen; other families need an adapter from a plug-in."
)


def _models() -> dict[str, tuple[str, str]]:
    """What each model name stands for, and where the model comes from."""
    from rasura.victims.embedded import NAMES

    images = {
        "lenet": ("for images, --task vision: small, with sigmoids; new weights", "Zhu et al. 2019 (DLG)"),
        "cnn": ("for images, --task vision: 2 convolutions with ReLU; new weights", "McMahan et al. 2017"),
    }
    return {name: (about, f"package {package}") for name, (about, package) in NAMES.items()} | images


def _kinds(kinds: Mapping[str, Mapping[str, Any]], as_json: bool) -> None:
    """Print what ``rasura list`` can list, with the names of each kind."""
    names = {kind: [*_models(), *some] if kind == "models" else list(some) for kind, some in kinds.items()}
    if as_json:
        say_json(names)
        return
    for kind, some in names.items():
        out.print(f"[bold]rasura list {kind}[/bold]", highlight=False)
        out.print(Padding(escape(", ".join(some)), (0, 0, 0, 4)), highlight=False)


def _written(spec: Any) -> str:
    """The name, followed by a placeholder if it needs a number."""
    return f"{spec.name}:X" if getattr(spec, "parameter", None) in (int, float) else str(spec.name)


def _extras() -> dict[str, list[str]]:
    """Every extra except ``dev``, with its packages that are not installed."""
    from importlib.metadata import PackageNotFoundError, distribution, metadata

    about = metadata("rasura")
    out: dict[str, list[str]] = {extra: [] for extra in about.get_all("Provides-Extra") or () if extra != "dev"}
    for line in about.get_all("Requires-Dist") or ():
        # As the build writes them: pillow>=10; extra == "images"
        package, wanted = re.match(r"[\w.-]+", line), re.search(r"""extra == ['"]([\w.-]+)['"]""", line)
        if package and wanted and wanted[1] in out:
            try:
                distribution(package[0])
            except PackageNotFoundError:
                out[wanted[1]].append(package[0])
    return out


@app.command()
def doctor(as_json: Annotated[bool, typer.Option("--json", help="print the result as JSON")] = False) -> None:
    """Show what is installed, which extras are missing, and where WordNet and the default model were found.

    Example: rasura doctor
    """
    from rasura.metrics.text import wordnet
    from rasura.runs.scoring import versions
    from rasura.victims.embedded import embedded_model_path

    rows = dict(versions())
    for extra, missing in _extras().items():
        remedy = f"missing {', '.join(missing)}: pip install 'rasura[{extra}]'"
        rows[f"rasura[{extra}]"] = remedy if missing else "installed"
    remedy = "missing: set NLTK_DATA to a folder with corpora/wordnet.zip"
    rows["WordNet (METEOR)"] = wordnet() or remedy
    with suppress(MissingExtra):
        rows["model minilm"] = str(embedded_model_path())
    rows["cores"] = str(os.cpu_count())
    if as_json:
        say_json(rows)
        return
    for name, value in rows.items():
        say(f"{name:20} {value}")
