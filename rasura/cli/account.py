"""``rasura account``: the guarantee that noise gives, the noise that a guarantee needs, and what a training run has
spent.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from rasura.cli.shared import app, err, numbers, out, say, say_json, split
from rasura.core.errors import InputError
from rasura.core.rounding import above

MIN_RATE = 1e-12
"""Below this rate the steps of an epoch are too many to count."""


def _figures(text: str | None, name: str) -> list[float]:
    try:
        return [float(part) for part in split(text) or ()]
    except ValueError:
        raise InputError(f"--{name} is {text!r}; expected numbers separated by commas") from None


def _bands(text: str | None, noised: bool, sampled: bool) -> tuple[int, ...]:
    """The bands of dp-ftrl. ``noised``, ``sampled``: as in ``_check_asked``."""
    bands = numbers(text, "band") or ()
    if bands and (sampled or not noised):
        raise InputError("--band needs --sigma or --target-epsilon, and neither --rate nor --noise: nothing is sampled")
    return bands


def _check_asked(noised: bool, sampled: bool, kappas: Sequence[float], dimension: int | None) -> None:
    """Refuse options that do not belong together. ``noised``: a plan of DP-SGD or dp-ftrl is asked for; ``sampled``: an
    option is given that only DP-SGD has."""
    if not (noised or kappas):
        raise InputError("account needs --sigma, --target-epsilon or --kappa")
    if sampled and not noised:
        raise InputError(
            "--rate and --noise need --sigma or --target-epsilon: DirDP-SGD does not sample and has its own noise"
        )
    if kappas and not dimension:
        raise InputError("--kappa needs --dimension, the number of trained parameters")


@app.command()
def account(
    sigma: Annotated[str | None, typer.Option(help="noise multipliers of DP-SGD, separated by commas")] = None,
    target_epsilon: Annotated[
        str | None, typer.Option(help="target epsilons, separated by commas: finds the noise for each")
    ] = None,
    kappa: Annotated[str | None, typer.Option(help="concentrations of DirDP-SGD, separated by commas")] = None,
    dimension: Annotated[int | None, typer.Option(help="number of trained parameters, for --kappa")] = None,
    band: Annotated[str | None, typer.Option(help="bands of dp-ftrl: its rows in place of DP-SGD's")] = None,
    examples: Annotated[int | None, typer.Option(help="number of training examples")] = None,
    batch_size: Annotated[int, typer.Option(help="average number of examples per step")] = 32,
    rate: Annotated[
        float | None,
        typer.Option(help="probability that an example is in a step, instead of --batch-size; an epoch has 1 / rate steps"),
    ] = None,
    epochs: Annotated[int, typer.Option(help="average number of times that each example is used")] = 1,
    delta: Annotated[float | None, typer.Option(help="delta of the guarantee")] = None,
    noise: Annotated[str, typer.Option(help="kind of noise: gaussian or laplace")] = "gaussian",
    ledger: Annotated[
        Path | None, typer.Option(help="ledger or result.json of a training run; prints the privacy budget it spent")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print the figures as JSON")] = False,
) -> None:
    """Plan a guarantee: compute epsilon for each noise multiplier, or the smallest noise for each epsilon, with three
    accountants.

    With --ledger, the command prints the privacy budget that a training run has spent. Add --delta to use another delta.

    With --band, sigmas and targets are those of dp-ftrl, which takes the batches in one fixed order.

    Example: rasura account --sigma 0.5,1,2 --examples 5056 --batch-size 128 --epochs 10
    """
    from rasura.accounting import ACCOUNTANTS, Run
    from rasura.core.options import known

    if ledger is not None:
        if any(value is not None for value in (sigma, target_epsilon, kappa, dimension, band, examples, rate)):
            raise InputError("--ledger can be combined with --delta only; remove the other options")
        _spent(ledger, delta, as_json)
        return
    known("noise", noise, ("gaussian", "laplace"))
    if examples is None:
        raise InputError("account needs --examples, the number of training texts")
    if rate is not None and not MIN_RATE <= rate <= 1:
        raise InputError(f"--rate is {rate}; expected at least {MIN_RATE} and at most 1")
    sigmas, targets = _figures(sigma, "sigma"), _figures(target_epsilon, "target-epsilon")
    noised, sampled = bool(sigmas or targets), rate is not None or noise != "gaussian"
    kappas, bands = _figures(kappa, "kappa"), _bands(band, noised, sampled)
    _check_asked(noised, sampled, kappas, dimension)
    run = Run(examples, batch_size, epochs, delta)
    # A rate that was given is kept to the last digit; its steps are those in which each text comes up ``epochs`` times.
    share, steps = (run.rate, run.steps) if rate is None else (rate, math.ceil(epochs / Fraction(repr(rate))))
    accountants = tuple(ACCOUNTANTS) if noise == "gaussian" else ("pld",)
    with err.status("accounting"):
        rows = [] if bands else _sampled(run.fails, share, steps, sigmas, targets, accountants, noise)
        rows = _ordered(run, bands, sigmas, targets) + rows + _directional(run, kappas, dimension or 0)
    about = {"delta": run.fails, "rate": share, "steps": steps, "examples": examples, "epochs": epochs, "noise": noise}
    _planned(about, rows, accountants, as_json)


def _sampled(
    delta: float, rate: float, steps: int, sigmas: list[float], targets: list[float], accountants: Any, noise: str
) -> list[dict[str, Any]]:
    """A row for each noise multiplier of DP-SGD, then one for the multiplier that each target needs."""
    from rasura.accounting import epsilon, sigma_for

    found = [sigma_for(target, rate, steps, delta, noise=noise) for target in targets]
    asked = [{"sigma": s} for s in sigmas] + [{"sigma": s, "target": t} for s, t in zip(found, targets)]
    return [
        {**row, **{by: epsilon(row["sigma"], rate, steps, delta, by=by, noise=noise) for by in accountants}} for row in asked
    ]


def _ordered(run: Any, bands: Sequence[int], sigmas: list[float], targets: list[float]) -> list[dict[str, Any]]:
    """A row for each band of DP-FTRL and noise multiplier, then one for the multiplier that each target needs."""
    from rasura.accounting.banded import BandedPlan, banded_sigma

    steps, every, fails = run.steps, run.steps_an_epoch, run.fails
    rows: list[dict[str, Any]] = []
    for band in bands:
        asked: list[dict[str, Any]] = [{"sigma": s} for s in sigmas]
        asked += [{"sigma": banded_sigma(target, steps, every, band, fails), "target": target} for target in targets]
        for row in asked:
            spent = BandedPlan(row["sigma"], steps, every, band).epsilon(fails)
            rows.append({"band": band, **row, "epsilon": spent})
    return rows


def _directional(run: Any, kappas: list[float], dimension: int) -> list[dict[str, Any]]:
    """A row for each concentration of DirDP-SGD."""
    from rasura.accounting import directional_epsilon

    spent = [directional_epsilon(one, [dimension], run.epochs, run.fails) for one in kappas]
    return [
        {"kappa": one, "epsilon": epsilon, "pure": 2 * one * run.epochs, "metric": one * run.epochs}
        for one, epsilon in zip(kappas, spent)
    ]


def _planned(about: dict[str, Any], rows: list[dict[str, Any]], accountants: tuple[str, ...], as_json: bool) -> None:
    """Print the ``rows`` of a plan and the assumptions under which they hold."""
    fails, examples, warnings = about["delta"], about["examples"], []
    if fails >= 1 / examples:
        warnings.append(f"delta {fails:g} is not below 1 / {examples}: publishing one example in full would satisfy it")
    if as_json:
        say_json({**about, "rows": rows, "assumptions": _assumed(about, rows), "warnings": warnings})
        return
    _print(rows, accountants)
    out.print(f"planned, delta {above(fails, 3)}", soft_wrap=True)
    for line in _assumed(about, rows):
        out.print(line, soft_wrap=True)
    for warning in warnings:
        err.print(warning, style="bold", soft_wrap=True)


def _assumed(about: dict[str, Any], rows: list[dict[str, Any]]) -> list[str]:
    """What the guarantee of each mechanism among ``rows`` assumes."""
    lines = []
    if any("band" in row for row in rows):
        lines.append(
            f"dp-ftrl: {about['steps']} steps, every pass takes the same batches in the same order (the gradient of one "
            "example is replaced by zero)"
        )
    elif any("sigma" in row for row in rows):
        lines.append(
            f"DP-SGD: {about['steps']} steps, each example is in a step with probability {about['rate']:.4g} (Poisson "
            "sampling; a loader that shuffles does not have this guarantee)"
        )
    if any("kappa" in row for row in rows):
        lines.append("DirDP-SGD: one example is replaced by another; the batches of an epoch are disjoint")
    return lines


def _spent(path: Path, delta: float | None, as_json: bool) -> None:
    from rasura.accounting.ledger import counted

    found = counted(path, delta)
    if as_json:
        say_json(found.to_dict())
        return
    for line in (found.statement, *found.warnings):
        say(line)


def _noise(row: dict[str, Any]) -> str:
    """The noise multiplier; one that was found for a target is rounded up, since a smaller one would miss it."""
    return f"{math.ceil(1e4 * row['sigma']) / 1e4:g}" if "target" in row else f"{row['sigma']:g}"


def _print(rows: list[dict[str, Any]], accountants: tuple[str, ...]) -> None:
    names = {"pld": "epsilon (PLD)", "rdp": "RDP", "paper": "RDP (as in papers)"}
    by_band, by_kappa = [r for r in rows if "band" in r], [r for r in rows if "kappa" in r]
    by_sigma = [r for r in rows if "sigma" in r and "band" not in r]
    if by_band:
        table = Table("band", "sigma", "target", "epsilon")
        for r in by_band:
            target = f"{r['target']:.4g}" if "target" in r else ""
            table.add_row(str(r["band"]), _noise(r), target, above(r["epsilon"]))
        out.print(table)
    if by_sigma:
        table = Table("sigma", "target", *(names[a] for a in accountants))
        for r in by_sigma:
            table.add_row(_noise(r), f"{r['target']:.4g}" if "target" in r else "", *(above(r[a]) for a in accountants))
        out.print(table)
    if by_kappa:
        table = Table("kappa", "epsilon", "pure epsilon", "metric DP: epsilon x distance")
        for r in by_kappa:
            table.add_row(f"{r['kappa']:g}", *(above(r[k]) for k in ("epsilon", "pure", "metric")))
        out.print(table)
