"""``rasura new``: project templates."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rasura.cli.shared import app, out, say


@app.command()
def new(
    kind: Annotated[str, typer.Argument(help="kind of project; federated: a Flower app with encrypted updates")],
    folder: Annotated[Path, typer.Argument(help="folder for the project")],
    clients: Annotated[int, typer.Option(help="largest number of clients in a sum")] = 4,
) -> None:
    """Create a project from a template, with protection switched on.

    Example: rasura new federated my-app --clients 4
    """
    from rasura.core.options import known
    from rasura.integrations.flower.new_app import new_app

    known("project", kind, ("federated",))
    place = new_app(folder, clients)
    say(f"app: {place}; its README.md says how to run it")
    out.print(
        "keys/clients.secret decrypts every update: copy it to the clients' machines only", markup=False, highlight=False
    )
