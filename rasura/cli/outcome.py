"""The end of an audit on the command line: summary, report and exit code."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import typer

from rasura.cli.shared import err, out


def conclude(
    records: list[dict[str, Any]], plan: dict[str, Any], folder: Path, fail_above: float | None, as_json: bool
) -> None:
    """Write the report of the run in ``folder``, print a summary of its ``records``, and exit according to ``fail_above``.

    ``plan``: the identity of the run. Exit codes: those of ``rasura.report.gate``.
    """
    from rasura.report.findings import summary_of
    from rasura.report.gate import gate
    from rasura.report.page import found_in, write_report
    from rasura.report.terminal import summary

    path = write_report(folder, show_text=plan["show_text"])
    found = found_in(records, plan)
    judged = None if fail_above is None else gate(found.verdicts, fail_above)
    if as_json:
        told = {} if judged is None else {"gate": asdict(judged)}
        whole = {**summary_of(found), **told, "report": str(path)}
        sys.stdout.write(json.dumps(whole, ensure_ascii=False) + "\n")
    else:
        out.print(summary(found))
        out.print(f"\nreport: {path}", markup=False, highlight=False, soft_wrap=True)
    if judged is not None:
        err.print(f"--fail-above judges: {', '.join(judged.judged)}", markup=False, highlight=False, soft_wrap=True)
        for line in judged.says:
            err.print(line, markup=False, highlight=False, soft_wrap=True)
        if judged.exit:
            raise typer.Exit(judged.exit)
