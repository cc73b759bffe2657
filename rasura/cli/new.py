"""``rasura new``: project templates."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rasura.cli.shared import app, out, say


@app.command()
def new(
    kind: Annotated[str, typer.Argument(help="kind of project; federated: a Flower app with secure aggregation")],
    folder: Annotated[Path, typer.Argument(help="folder for the project")],
    clients: Annotated[int, typer.Option(help="largest number of clients in a sum")] = 4,
    by: Annotated[str, typer.Option(help="secagg: no key opens an update; bfv: all clients share one key")] = "secagg",
) -> None:
    """Create a project from a template, with protection switched on.

    Example: rasura new federated my-app --clients 4
    """
    from rasura.core.options import known
    from rasura.integrations.flower.new_app import new_app

    known("project", kind, ("federated",))
    place = new_app(folder, clients, by)
    say(f"app: {place}; its README.md says how to run it")
    if by == "bfv":
        out.print(
            "keys/clients.secret decrypts every update: copy it to the clients' machines only", markup=False, highlight=False
        )
