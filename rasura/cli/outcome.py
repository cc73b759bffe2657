"""The end of an audit on the command line: summary, report, files for machines, trackers and exit code."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from rasura.cli.shared import err, out, say, say_json
from rasura.core.errors import InputError

Junit = Annotated[Path | None, typer.Option(help="also write the verdicts as JUnit XML to this file")]
Sarif = Annotated[Path | None, typer.Option(help="also write what did not pass as SARIF to this file")]
Mlflow = Annotated[str | None, typer.Option(help="also log the figures to this experiment of MLflow (never texts)")]
Wandb = Annotated[str | None, typer.Option(help="also log the figures to this project of Weights & Biases (never texts)")]


@dataclass(frozen=True)
class Ending:
    """Where the results of a run go, the limit that sets the exit code, and the numbers of ``clients`` whose sums were
    audited."""

    fail_above: float | None = None
    as_json: bool = False
    junit: Path | None = None
    sarif: Path | None = None
    mlflow: str | None = None
    wandb: str | None = None
    language: str = "en"
    clients: tuple[int, ...] | None = None

    def checked(self) -> Ending:
        """This ending. Raises ``InputError`` if the limit or the language is wrong or a tracker is not installed, before
        anything runs."""
        from rasura.core.options import known
        from rasura.integrations import trackers
        from rasura.report.gate import checked_limit
        from rasura.report.language import LANGUAGES
        from rasura.report.sums import checked_clients

        known("language", self.language, LANGUAGES)
        if self.clients is not None:
            checked_clients(self.clients)
        if self.fail_above is not None:
            checked_limit(self.fail_above)
        for tracker in self.trackers:
            trackers.ready(tracker)
        return self

    @property
    def trackers(self) -> dict[str, str]:
        """The trackers asked for, each with its experiment or project."""
        wanted = {"mlflow": self.mlflow, "wandb": self.wandb}
        return {name: place for name, place in wanted.items() if place is not None}


def conclude(records: list[dict[str, Any]], plan: dict[str, Any], folder: Path, ending: Ending) -> None:
    """Write the report of the run in ``folder``, send its ``records`` where ``ending`` says, and exit accordingly.

    ``plan``: the identity of the run. Exit codes: those of ``rasura.report.gate``; 2 if a file or a tracker failed.
    """
    from rasura.report.findings import summary_of
    from rasura.report.gate import gate
    from rasura.report.page import opened, write_report
    from rasura.report.sums import curve, curve_lines
    from rasura.report.terminal import summary

    path = write_report(folder, show_text=plan["show_text"], language=ending.language)
    found = opened(folder).found
    judged = None if ending.fail_above is None else gate(found.verdicts, ending.fail_above)
    if ending.as_json:
        told = {} if judged is None else {"gate": asdict(judged)}
        whole = {**summary_of(found), **told, "report": str(path)}
        say_json(whole)
    else:
        out.print(summary(found))
        say(f"\nreport: {path}")
    if ending.clients is not None:
        for line in curve_lines(curve(records, ending.clients, found.metric, found.unfinished)):
            say(line, to=err if ending.as_json else out)
    sent = _sent(records, plan, folder, ending, found)
    if judged is not None:
        say(f"--fail-above judges: {', '.join(judged.judged)}", to=err)
        for line in judged.says:
            say(line, to=err)
        if judged.exit:
            raise typer.Exit(judged.exit)
    if not sent:
        raise typer.Exit(2)


def _sent(records: list[dict[str, Any]], plan: dict[str, Any], folder: Path, ending: Ending, found: Any) -> bool:
    """Whether all files and trackers of ``ending`` took the results; what failed is printed."""
    from rasura import __version__
    from rasura.integrations import trackers
    from rasura.report.machine import tracked, write_junit, write_sarif

    whole = True
    try:
        if ending.junit is not None:
            write_junit(ending.junit, found, ending.fail_above, sum(r["wall_seconds"] for r in records))
        if ending.sarif is not None:
            write_sarif(ending.sarif, found, ending.fail_above, plan, __version__)
    except InputError as error:  # the gate still sets the exit code
        whole = False
        say(f"rasura: {error}", to=err)
    for tracker, place in ending.trackers.items():
        try:
            trackers.log(tracker, place, folder.name, *tracked(found, plan))
        except Exception as error:  # of a network or of a service
            whole = False
            why = ": ".join((type(error).__name__, *str(error).splitlines()[:1]))
            say(f"{tracker} did not take the results ({why[:200]})", to=err)
    return whole
