"""``rasura check-dp``: what the differential privacy settings of a framework guarantee."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rasura.cli.shared import Out, app, err, say, say_json, split
from rasura.core.errors import InputError
from rasura.core.rounding import above

if TYPE_CHECKING:
    from rasura.accounting.configurations import Checked, Finding

Files = Annotated[list[Path], typer.Argument(metavar="CONFIG...", help="NVFlare's JSON, a Python program, or TOML")]
Examples = Annotated[int | None, typer.Option(help="number of training examples (of one client)")]
Clients = Annotated[int | None, typer.Option(help="number of all clients")]
ClientsPerRound = Annotated[int | None, typer.Option(help="number of clients that answer in a round")]
Rounds = Annotated[int | None, typer.Option(help="number of rounds")]
RoundsPerClient = Annotated[int | None, typer.Option(help="the most rounds that one client takes part in")]
BatchSize = Annotated[int | None, typer.Option(help="examples in a step, on average")]
Epochs = Annotated[int | None, typer.Option(help="passes over the examples, in a round")]
Sampling = Annotated[str | None, typer.Option(help="how batches are drawn: poisson, shuffled or fixed")]
Weights = Annotated[str | None, typer.Option(help="equal, or the largest fraction of one client in the average")]
Aggregation = Annotated[str | None, typer.Option(help="mean, if the server averages the updates, as FedAvg does")]
Parameters = Annotated[int | None, typer.Option(help="number of entries of an update")]
Version = Annotated[str | None, typer.Option(help="version of the framework")]
Epsilon = Annotated[float | None, typer.Option(help="epsilon that is stated")]
Delta = Annotated[float | None, typer.Option(help="delta of the guarantee")]
Unit = Annotated[str | None, typer.Option(help="what the stated epsilon protects: example or client")]
Per = Annotated[str, typer.Option(help="what the stated epsilon covers: run or round")]
Model = Annotated[str | None, typer.Option(help="model to attack at that noise: folder or hub id")]
Data = Annotated[str | None, typer.Option(help="file with texts for the attack")]
Attack = Annotated[str, typer.Option(help="attacks, separated by commas; see: rasura list attacks")]
Texts = Annotated[int, typer.Option(help="number of texts to attack")]
AsJson = Annotated[bool, typer.Option("--json", help="print the result as JSON, and an audit as a second line")]


@app.command(name="check-dp")
def check_dp(
    config: Files,
    examples: Examples = None,
    clients: Clients = None,
    clients_per_round: ClientsPerRound = None,
    rounds: Rounds = None,
    rounds_per_client: RoundsPerClient = None,
    batch_size: BatchSize = None,
    epochs: Epochs = None,
    sampling: Sampling = None,
    weights: Weights = None,
    aggregation: Aggregation = None,
    parameters: Parameters = None,
    version: Version = None,
    epsilon: Epsilon = None,
    delta: Delta = None,
    unit: Unit = None,
    per: Per = "run",
    model: Model = None,
    data: Data = None,
    attack: Attack = "span,pursuit,lamp-weighted",
    limit: Texts = 4,
    folder: Out = Path("runs/check-dp"),
    as_json: AsJson = False,
) -> None:
    """Recompute what the differential privacy settings of Flower, NVFlare, Opacus or jax-privacy guarantee.

    The files are read and never run. With --model and --data, an attack reads texts at the same noise. Exit code 0: a
    figure stands, and no less than stated. 3: a stated guarantee does not hold, or a hazard was found. 4: nothing can be
    said, and the reason is printed.

    Example: rasura check-dp config_fed_client.json --version 2.9.0 --parameters 22713216 --rounds 10
    """
    from rasura.accounting.configurations import Facts, Stated, checked_files

    if (model is None) != (data is None):
        raise InputError("--model and --data go together: an attack needs the model and texts")
    if epsilon is None and (unit is not None or per != "run"):
        raise InputError("--unit and --per say what --epsilon covers; pass --epsilon as well")
    facts = Facts(
        examples=examples, clients=clients, clients_per_round=clients_per_round, rounds=rounds,
        rounds_per_client=rounds_per_client, batch_size=batch_size, epochs=epochs, sampling=sampling, delta=delta,
        weights=_weights(weights), parameters=parameters, version=version, aggregation=aggregation,
    )  # fmt: skip
    stated = None if epsilon is None else Stated.read(_given(epsilon=epsilon, delta=delta, unit=unit, per=per))
    with err.status("accounting"):
        found = checked_files(config, facts, stated)
    if as_json:
        say_json(found.to_dict())
    else:
        _told(found)
    if model is not None and data is not None:
        _attacked(found, model, data, attack, limit, folder, as_json)
    if found.exit_code:
        raise typer.Exit(found.exit_code)


def _given(**options: object) -> dict[str, object]:
    return {name: value for name, value in options.items() if value is not None}


def _weights(text: str | None) -> str | float | None:
    if text is None or text == "equal":
        return text
    try:
        return float(text)
    except ValueError:
        raise InputError(f"--weights is {text!r}; expected equal, or a fraction") from None


def _told(found: Checked) -> None:
    for one in found.findings:
        _finding(one)
    for text in found.unknown:
        say(f"not known: {text}")
    say(f"\n{_OUTCOMES[found.outcome]}", style="bold")


_OUTCOMES = {
    "holds": "The stated guarantee holds, under the assumptions above.",
    "computed": "No guarantee is stated; the figures above hold under the assumptions above.",
    "does not hold": "Not private as configured: see the hazards above.",
    "not known": "No guarantee can be confirmed: see above for what is not known.",
}


def _finding(one: Finding) -> None:
    from rasura.accounting.configurations.drafts import HAZARDS

    say(f"{one.mechanism} ({one.place})", style="bold")
    if one.stated is not None:
        at = "" if one.stated.delta is None else f" at delta {one.stated.delta:g}"
        origin = ", by its arguments" if one.stated.by_argument else ""
        say(f"  stated: epsilon {one.stated.epsilon:g}{at} for one {one.stated.per}{origin}")
    if one.one_round is not None:
        say(f"  after one round: epsilon {above(one.one_round, 6)} for one client")
    for bound in one.bounds:
        if bound.epsilon is None or bound.delta is None:
            say(f"  one {bound.unit}: no guarantee; {bound.says}")
        else:
            says = f" ({bound.says})" if bound.says else ""
            at = f"epsilon {above(bound.epsilon, 6)} at delta {above(bound.delta, 3)}"
            say(f"  one {bound.unit}: {at}, {bound.relation}{says}")
    for hazard in one.hazards:
        say(f"  hazard: {HAZARDS[hazard.code]}: {hazard.says}")
    for text in one.unknown:
        say(f"  not known: {text}")
    for text in one.assumptions:
        say(f"  assumed: {text}")
    for text in one.notes:
        say(f"  note: {text}")


def _attacked(found: Checked, model: str, data: str, attack: str, limit: int, folder: Path, as_json: bool) -> None:
    """Audit single texts under the equal noise: the clip and the noise of one contribution, nothing of others."""
    from rasura.cli.audit import run_audit
    from rasura.cli.outcome import Ending
    from rasura.cli.shared import device_named
    from rasura.runs.plans import Plan

    noises = {one.equal_noise for one in found.findings if one.equal_noise is not None}
    if len(noises) != 1:
        err.print(f"no attack was run: the noise of {len(noises)} mechanisms is known; expected one", soft_wrap=True)
        return
    multiplier, clip = noises.pop()
    defense = f"dp-sgd:{multiplier:.6g}/clip={clip:.6g}"
    err.print(f"attack on single texts under {defense}, by an adversary who knows all other contributions", soft_wrap=True)
    attacks = ("blind", *(split(attack) or ()))
    plan = Plan(data=data, model=model, attacks=attacks, defenses=("none", defense), batch_sizes=(1,), limit=limit)
    run_audit(plan.checked(), folder, device_named("auto"), Ending(as_json=as_json), workers=1)
