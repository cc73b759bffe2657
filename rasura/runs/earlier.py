"""An earlier training of a model, as its folder shows it: a new ledger does not count what that one released."""

from __future__ import annotations

from pathlib import Path

from rasura.accounting.ledger import parsed, read
from rasura.core.errors import InputError
from rasura.runs.membership_rows import trained_under

LEDGER = "rasura_ledger.json"
"""The file of a ledger in a folder that ``PrivateTrainer`` saved."""


def trained_before(model: str) -> str:
    """What to say beside the guarantee of a training that begins from ``model``; empty where that is no folder, or shows no
    earlier training."""
    if not model or not Path(model).is_dir():
        return ""
    if (under := trained_under(model)) is not None:
        told = f"rasura train, under {under}"
    elif (Path(model) / LEDGER).exists():
        told = f"PrivateTrainer, {_spent(Path(model) / LEDGER)}"
    else:
        return ""
    return (
        f"{model} was itself trained by {told}: for a text that was in that training too, what it spent or gave away counts "
        "beside this guarantee"
    )


def _spent(ledger: Path) -> str:
    try:
        state, _ = parsed(ledger)
        return f"under {' + '.join(map(str, state['defense']))} ({sum(count for _, count in read(state)[0])} releases)"
    except (InputError, LookupError, TypeError):
        return "and its ledger cannot be read"
