"""What ``rasura read --candidates`` prints."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Any

import typer

from rasura.cli.shared import out, say, say_json, watched

Candidates = Annotated[
    Path | None, typer.Option(help="file with texts; prints for each whether it was in the round (see --reference)")
]
SimulatedRounds = Annotated[
    int, typer.Option(help="number of simulated rounds on the reference texts that measure how reliable --candidates is")
]


def candidates_read(update: Path, candidates: Path, victim: Any, request: Any, simulated: int, as_json: bool) -> None:
    """Print which texts of the file ``candidates`` were in the round, and how reliable such an answer is."""
    from rasura.runs.candidates import read_candidates

    with watched(resumable=False) as bar:
        line = bar.add_task("scoring", total=None)

        def scored(done: int, total: int) -> None:
            bar.update(line, completed=done, total=total)

        found = read_candidates(update, candidates, victim, request, simulated, scored)
    if as_json:
        say_json(found.to_dict())
    else:
        listed(found, request.size)


def listed(found: Any, size: int | None) -> None:
    """Print the answers of ``found``, a ``CandidatesRead``, of a batch of ``size`` texts, and what they are worth."""
    from rasura.runs.candidates import BEYOND, ENOUGH, IN

    for one in found.candidates:
        p = "" if one.p is None else f" p {one.p:.3f}"
        score = f"score {one.score:.4f}{p}" if math.isfinite(one.score) else "its gradient or loss is zero or not finite"
        say(f"{one.verdict}: {score}: {one.text[:80]}")
    told = {one.verdict for one in found.candidates}
    if IN in told:
        out.print(
            f'"{IN}": this text, or one much like it; of candidates that were not, up to {found.by_chance:g} on average are '
            "called so by chance"
        )
    if BEYOND in told:
        out.print(f"the batch holds {size}: no more texts are said to be in the round")
    if found.repeated:
        out.print(f"{found.repeated} repeated reference texts were left out: a text counts once, as the model sees it")
    if found.few:
        classes = ", ".join(f"{name} ({count})" for name, count in found.few.items())
        say(f"no answer for classes with too few reference texts: {classes}; an answer needs {ENOUGH} of the text's class")
    elif found.references < ENOUGH:
        out.print(f"no answer: {found.references} reference texts that were not in the round; an answer needs {ENOUGH}")
    if found.simulated and found.auc is None:
        out.print(
            f"in {found.simulated} simulated rounds, no class had reference texts both inside and outside: nothing measured"
        )
    if found.auc is not None:
        low, high = found.auc.low, found.auc.high
        out.print(f"in {found.simulated} simulated rounds: AUC {found.auc.mean:.2f} ({low:.2f} to {high:.2f})")
    if found.tpr is not None:
        low, high = found.tpr.low, found.tpr.high
        out.print(f"true positive rate at 1 % false positives: {found.tpr.mean:.2f} ({low:.2f} to {high:.2f})")
