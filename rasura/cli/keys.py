"""``rasura keys``: a key pair for sealed updates, or identities of clients."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from rasura.cli.shared import app, out, say, say_json


@app.command()
def keys(
    folder: Annotated[Path, typer.Argument(help="folder for the files")],
    clients: Annotated[int, typer.Option(help="largest number of clients in a sum; with identity, how many to make")] = 4,
    scheme: Annotated[
        str, typer.Option(help="bfv (exact, small), ckks (for comparison) or identity (secure aggregation)")
    ] = "bfv",
    as_json: Annotated[bool, typer.Option("--json", help="print the result as JSON")] = False,
) -> None:
    """Create keys for encrypted updates: a secret file for the clients and a public file for the server.

    With --scheme identity: a secret file for each client, which signs its keys in secure aggregation, and the list of all.

    Example: rasura keys keys --clients 4
    """
    from rasura.core.options import known
    from rasura.defenses.homomorphic_keys import make_keys

    if known("scheme", scheme, ("bfv", "ckks", "identity")) == "identity":
        _identities(folder, clients, as_json)
        return
    chosen: Any = scheme
    made = make_keys(clients, chosen)
    secret, public = made.save_both(folder)
    if as_json:
        about = {"key": made.key, "secret": str(secret), "public": str(public), "clients": made.parameters.max_clients}
        say_json(about)
        return
    out.print(f"key {made.key}, for up to {made.parameters.max_clients} clients")
    out.print(
        f"clients only: {secret} (anyone with this file can decrypt every update)",
        markup=False,
        highlight=False,
        soft_wrap=True,
    )
    say(f"server:       {public}")


def _identities(folder: Path, clients: int, as_json: bool) -> None:
    from rasura.core.errors import InputError
    from rasura.integrations.flower.identities import make_identities

    if clients < 1:
        raise InputError(f"--clients is {clients}; expected at least 1")
    *own, listed = make_identities(folder, clients)
    secret = [str(path) for path in own]
    if as_json:
        say_json({"secret": secret, "public": str(listed)})
        return
    say(f"each client only its own: {', '.join(secret)}")
    say(f"all clients and the server: {listed}")
