"""``rasura list`` and ``doctor``: available methods and installed parts."""

from __future__ import annotations

import json
import os
import re
import sys
from contextlib import suppress
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from rasura import __version__
from rasura.cli.shared import app, err, out
from rasura.core.errors import MissingExtra


def _version(wanted: bool) -> None:
    if wanted:
        out.print(f"rasura {__version__}", highlight=False)
        raise typer.Exit()


@app.callback()
def main(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="print the version")] = False,
) -> None:
    """Measure what an adversary can recover from the data that language-model training sends out."""


@app.command("list")
def list_names(
    kind: Annotated[
        str,
        typer.Argument(
            help="what to list: attacks, defenses, metrics, membership-attacks, update-kinds, threats, "
            "service-attacks, service-metrics, service-protections or models"
        ),
    ],
    as_json: Annotated[bool, typer.Option("--json", help="print the result as JSON")] = False,
) -> None:
    """List the names that the command line accepts, each with its source. Installed plug-ins are included.

    Example: rasura list defenses
    """
    from rasura.core.options import known
    from rasura.core.threat import THREATS
    from rasura.registry import KINDS

    unusable: dict[str, str] = {}
    if known("list", kind, (*KINDS, "threats")) == "threats":
        rows = {n: (t.plain, "") for n, t in THREATS.items()}
    else:
        methods = KINDS[kind]
        rows = {_written(s): (s.about, s.source) for s in methods.values()}
        unusable = methods.unusable
    if as_json:
        sys.stdout.write(json.dumps({n: about for n, (about, _) in rows.items()}, ensure_ascii=False) + "\n")
        return
    table = Table(show_header=False, box=None, padding=(0, 2))
    for name, (about, source) in rows.items():
        table.add_row(f"[bold]{escape(name)}[/bold]", escape(about) + (f"\n[dim]{escape(source)}[/dim]" if source else ""))
    out.print(table)
    for plugin, why in unusable.items():
        err.print(f"the plug-in {plugin} could not be loaded: {why}", markup=False, soft_wrap=True)


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
        sys.stdout.write(json.dumps(rows) + "\n")
        return
    for name, value in rows.items():
        out.print(f"{name:20} {value}", markup=False, highlight=False, soft_wrap=True)
