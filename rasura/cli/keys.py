"""``rasura keys``: a key pair for sealed updates."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from rasura.cli.shared import app, out, say


@app.command()
def keys(
    folder: Annotated[Path, typer.Argument(help="folder for the two files")],
    clients: Annotated[int, typer.Option(help="largest number of clients in a sum")] = 4,
    scheme: Annotated[str, typer.Option(help="scheme: bfv (exact, small) or ckks (for comparison)")] = "bfv",
    as_json: Annotated[bool, typer.Option("--json", help="print the result as JSON")] = False,
) -> None:
    """Create keys for encrypted updates: a secret file for the clients and a public file for the server.

    Example: rasura keys keys --clients 4
    """
    from rasura.core.options import known
    from rasura.defenses.homomorphic_keys import make_keys

    chosen: Any = known("scheme", scheme, ("bfv", "ckks"))
    made = make_keys(clients, chosen)
    folder.mkdir(parents=True, exist_ok=True)
    secret, public = folder / "clients.secret", folder / "server.public"
    made.save(secret)
    made.public().save(public)
    if as_json:
        about = {"key": made.key, "secret": str(secret), "public": str(public), "clients": made.parameters.max_clients}
        sys.stdout.write(json.dumps(about) + "\n")
        return
    out.print(f"key {made.key}, for up to {made.parameters.max_clients} clients")
    out.print(
        f"clients only: {secret} (anyone with this file can decrypt every update)",
        markup=False,
        highlight=False,
        soft_wrap=True,
    )
    say(f"server:       {public}")
