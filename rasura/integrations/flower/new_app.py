"""``rasura new federated``: a Flower app with protection switched on."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

from rasura.core.interfaces import InputError
from rasura.defenses.homomorphic_keys import make_keys
from rasura.integrations.flower.agreement import MIN_CLIENTS
from rasura.integrations.flower.identities import make_identities

PLACES = {
    "pyproject.toml": "pyproject.toml",
    "README.md": "README.md",
    "gitignore": ".gitignore",
    "__init__.py": "federated/__init__.py",
    "task.py": "federated/task.py",
    "client_app.py": "federated/client_app.py",
    "server_app.py": "federated/server_app.py",
}
"""File of the template -> where it goes."""


BY = ("secagg", "bfv")

IDENTITIES = """Secure aggregation makes new keys in every round, in memory. The server learns the sum of the updates
(`docs/secure-aggregation.md` of Rasura says who can read what). A round bears a third of its clients gone, and one fewer
if there are three, six, nine and so on: of three clients, none may be gone before the sum is opened.

Each client signs its keys with its identity, and refuses keys that no identity on the list has signed. Clients sign which
updates are in the sum, too, so that the server cannot tell them two lists. `keys/` holds
identities for $clients clients, for a try on this machine: client K has `identity-K.secret`. On real machines each makes
its own (`rasura keys FOLDER --scheme identity --clients 1`), and keeps the secret file. Collect the public lines in one
file, and give it to all on a way that the server does not control. Each SuperNode then names both:
`--node-config 'identity="/path/to/identity-0.secret" identities="/path/to/identities.public"'`. What a SuperNode names
counts more than what the run says. `identities = ""` in `pyproject.toml` is without: the log says so."""

SHARED_KEY = """`keys/clients.secret` opens every update: it belongs on the clients' machines
(`--node-config 'clients-key="..."'`) and never on the server's, which needs `keys/server.public` alone. Both were made for
up to $clients clients; `rasura keys` makes others."""


def new_app(folder: str | Path, clients: int = 4, by: str = "secagg") -> Path:
    """Write the app to ``folder``, which must not hold one: with secure aggregation and identities of ``clients`` clients,
    or by ``bfv`` with keys for sums of as many.

    Raises ``InputError`` for a folder that holds such files, for fewer than three clients, and for more than any keys fit.
    """
    place = Path(folder).resolve()
    taken = [target for target in (*PLACES.values(), "keys") if (place / target).exists()]
    if taken:
        raise InputError(f"{place / taken[0]} already exists; choose a new folder")
    if '"' in str(place) or "\\" in str(place):
        raise InputError(f"{place} cannot be written into TOML; choose a folder without quotes and backslashes")
    if clients < MIN_CLIENTS:
        raise InputError(
            f"{clients} clients: with two, each can subtract its own update from the sum and obtain the "
            f"other's; expected at least {MIN_CLIENTS}"
        )
    if by not in BY:
        raise InputError(f"by is {by!r}; expected {' or '.join(BY)}")
    keys = make_keys(clients, "bfv") if by == "bfv" else None
    most = keys.parameters.max_clients if keys is not None else 0
    filling = {
        "$keys": (IDENTITIES if keys is None else SHARED_KEY).replace("$clients", str(most or clients)),
        "$defense": f"sealing:all/by={by}",
        "$clients_key": "" if keys is None else f"{place}/keys/clients.secret",
        "$server_key": "" if keys is None else f"{place}/keys/server.public",
        "$identities": f"{place}/keys/identities.public" if keys is None else "",
        "$identity": f"{place}/keys/identity-{{client}}.secret" if keys is None else "",
    }
    for name, target in PLACES.items():
        text = resources.files("rasura.integrations.flower").joinpath("template", f"{name}.txt").read_text(encoding="utf-8")
        for placeholder, value in filling.items():
            text = text.replace(placeholder, value)
        (place / target).parent.mkdir(parents=True, exist_ok=True)
        (place / target).write_text(text, encoding="utf-8")
    (place / "keys").mkdir(mode=0o700)
    if keys is None:
        make_identities(place / "keys", clients)
    else:
        keys.save_both(place / "keys")
    return place
