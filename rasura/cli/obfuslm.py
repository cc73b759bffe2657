"""``rasura protect obfuslm``: a model for a service that must not see text."""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from rasura.cli.shared import FreshLabels, TextTask, err, out, protect, say, say_json, text_task
from rasura.core.rounding import above


@protect.command()
def obfuslm(
    model: Annotated[str, typer.Argument(help="the public model: folder or hub id")],
    folder: Annotated[Path, typer.Argument(metavar="OUT", help="output folder, for the server")],
    key: Annotated[Path, typer.Option(help="output key file, for the owner only")],
    k: Annotated[int, typer.Option(help="tokens per cluster; with 1 the vocabulary is only permuted")] = 10,
    epsilon: Annotated[
        float,
        typer.Option(help="mixing parameter; smaller values hide more, without a formal guarantee unless --calibrated"),
    ] = 1.0,
    beta: Annotated[
        float, typer.Option(help="smallest quantile of a token's similarities that is accepted within its cluster")
    ] = 0.99,
    calibrated: Annotated[
        bool, typer.Option("--calibrated", help="wider noise, with a bound on how often the table tells a token")
    ] = False,
    plus: Annotated[
        bool, typer.Option("--plus", help="ObfusLM+: also obfuscate the hidden dimension of all weights")
    ] = False,
    hidden_k: Annotated[int, typer.Option(help="dimensions per cluster, with --plus")] = 10,
    hidden_epsilon: Annotated[float, typer.Option(help="mixing parameter of the dimensions, with --plus")] = 3.0,
    task: TextTask = None,
    num_labels: FreshLabels = None,
    passphrase: Annotated[
        bool, typer.Option("--passphrase", help="ask for a passphrase for the key, unless RASURA_PASSPHRASE is set")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="print the result as JSON")] = False,
) -> None:
    """Obfuscate a model. Write a folder that any server can train and run on token ids, and a key that maps ids to tokens.

    Example: rasura protect obfuslm minilm served --key my.key
    """
    from rasura.service_protections.obfuslm.folder import obfuscate_model
    from rasura.service_protections.obfuslm.settings import ObfuscationSettings
    from rasura.service_protections.obfuslm.synthesis import max_success

    settings = ObfuscationSettings(k, epsilon, beta, plus, hidden_k, hidden_epsilon, calibrated=calibrated)
    kind: Any = text_task(task, model, num_labels)
    secret = os.environ.get("RASURA_PASSPHRASE")
    if passphrase and secret is None:
        secret = typer.prompt("passphrase", hide_input=True, confirmation_prompt=True, err=True)
    with err.status("loading and obfuscating the model"):
        made = obfuscate_model(model, folder, key, settings, passphrase=secret, task=kind, num_labels=num_labels)
    if as_json:
        told = {name: str(value) if isinstance(value, Path) else value for name, value in asdict(made).items()}
        say_json(told)
        return
    merged = "were in clusters that were too small and were merged"
    out.print(f"{made.tokens} tokens in {made.clusters} clusters; {made.merged} {merged}")
    if calibrated:
        out.print(
            f"From the table alone, a token is named in at most {above(100 * max_success(epsilon, k), 3)} % of cases. "
            "Frequencies and the order of words are not counted."
        )
    if k == 1 and not plus:
        out.print("The server's rows are the public ones in another order: who has the public model can read every text.")
    say(f"server: {made.folder}")
    say(f"owner:  {made.key} (anyone with this file can read every text)")
