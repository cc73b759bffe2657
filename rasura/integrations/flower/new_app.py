"""``rasura new federated``: a Flower app with protection switched on, and its keys."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

from rasura.core.interfaces import InputError
from rasura.defenses.homomorphic_keys import make_keys
from rasura.integrations.flower.collector import MIN_CLIENTS

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


def new_app(folder: str | Path, clients: int = 4) -> Path:
    """Write the app to ``folder``, which must not hold one, with keys for sums of ``clients`` clients.

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
    keys = make_keys(clients, "bfv")
    for name, target in PLACES.items():
        text = resources.files("rasura.integrations.flower").joinpath("template", f"{name}.txt").read_text(encoding="utf-8")
        filled = text.replace("$folder", str(place)).replace("$clients", str(keys.parameters.max_clients))
        (place / target).parent.mkdir(parents=True, exist_ok=True)
        (place / target).write_text(filled, encoding="utf-8")
    (place / "keys").mkdir()
    keys.save(place / "keys" / "clients.secret")
    keys.public().save(place / "keys" / "server.public")
    return place
