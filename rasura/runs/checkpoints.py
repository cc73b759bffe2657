"""The checkpoints of a Trainer: which releases the ledger beside each of them counts, and where its canaries are."""

from __future__ import annotations

import math
import os
from pathlib import Path

from rasura.accounting import Ledger
from rasura.accounting.compositions import DIRECTIONAL
from rasura.accounting.ledger import releases_in
from rasura.core.errors import InputError
from rasura.runs.earlier import LEDGER

PREFIX = "checkpoint"
"""What the name of a checkpoint's folder begins with, before its step: that of transformers."""

CANARIES = "rasura_canaries.json"
"""The canaries' file in a checkpoint's folder, where earlier versions wrote it."""


def resume(ledger: Ledger, place: Path, output: Path) -> None:
    """Go on from the checkpoint ``place`` in a training that writes to ``output``. Raises ``InputError`` where it has no
    ledger, or one that cannot be written, and as ``_check_newest`` and ``_check_ends``."""
    file = place / LEDGER
    ledger.load(file)
    if not os.access(file, os.W_OK):
        raise InputError(f"{file} cannot be written, and what is released from here on must be counted there too; go on "
            "from a copy of the checkpoint in a folder that can be written")  # fmt: skip
    _check_newest(ledger, place, output)
    _check_ends(ledger, place)


def state_again(ledger: Ledger, *kept: str | Path | None) -> None:
    """Write into each checkpoint that is ``kept`` what ``ledger`` counts by now: later releases may have decided that it is
    kept, or gone on from. How many are in its weights stays there, so that it can be resumed."""
    for file in (Path(one) / LEDGER for one in kept if one is not None):
        if file.exists() and (made := releases_in(file)) <= ledger.releases:
            ledger.save(file, made=made)


def _check_newest(ledger: Ledger, place: Path, output: Path) -> None:
    """Raises ``InputError`` where a checkpoint beside ``place``, or in ``output``, holds more releases than ``ledger``, or
    is newer and does not say how many: a process that is killed while it saves leaves weights without a ledger."""
    for folder in (place.parent, output):
        for other in sorted(folder.glob(f"{PREFIX}-*")):
            if not (other / LEDGER).exists():
                if _step_of(other) > _step_of(place):
                    raise InputError(f"{other} is newer than {place} and has no ledger, so what was released for it is "
                        "not known. Remove it only if its weights never left this machine")  # fmt: skip
            elif (found := releases_in(other / LEDGER)) > ledger.releases:
                raise InputError(
                    f"{other} holds {found} releases, and {place}, to go on from, {ledger.releases}: what "
                    "was released after it would not be counted. Resume from the newest checkpoint. To go back instead, "
                    "move the newer ones elsewhere, and state the epsilon of all releases together"
                )


def _check_ends(ledger: Ledger, place: Path) -> None:
    """Raises ``InputError`` where the planned passes hold fewer steps than are left, since a resumed training begins with a
    new pass: under DirDP, of which passes are counted, it would be refused after its last step."""
    run, made, begun = ledger.run, ledger.releases, ledger.passes
    if ledger.formal is None or ledger.formal.name != DIRECTIONAL or run.sampling == "poisson":
        return
    every, left = run.steps_an_epoch, max(0, run.epochs - begun)
    if left * every >= run.steps - made:
        return
    steps = made + max(1, left) * every
    way = (
        f"Pass max_steps={steps}, which whole passes reach"
        if math.ceil(made / every) >= begun
        else "Begin another training from these weights, for which both epsilons count together"
    )
    raise InputError(
        f"{place} has {made} steps in {begun} of {run.epochs} planned passes, and the last one was left before its end. A "
        f"resumed training begins with a new pass, so the {left} others do not hold the {run.steps - made} steps to go. "
        f"{way}"
    )


def _step_of(checkpoint: Path) -> int:
    """The step of a checkpoint's folder by its name; 0 for a folder with another one."""
    number = checkpoint.name.removeprefix(f"{PREFIX}-")
    return int(number) if number.isdecimal() else 0


def canaries_of(checkpoint: Path) -> Path:
    """The file of a checkpoint's canaries, which must stay secret until the training ends. It is beside the output folder:
    trackers and the hub get what is in a checkpoint or in the output folder while the training runs."""
    real = checkpoint.resolve()
    return real.parent.with_name(f"{real.parent.name}.canaries") / f"{real.name}.json"


def kept_canaries(checkpoint: Path) -> Path:
    """``canaries_of``, or where an earlier version wrote that file if only this one is there."""
    own, old = canaries_of(checkpoint), checkpoint / CANARIES
    return old if old.exists() and not own.exists() else own


def place_for(checkpoint: Path) -> Path:
    """``canaries_of``, in a folder that exists. Raises ``InputError`` where it cannot be made."""
    path = canaries_of(checkpoint)
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(
            f"the folder {path.parent} cannot be made ({error.strerror}). The coins of canaries are kept there, since what "
            "is in output_dir may be uploaded; choose another output_dir, or save_strategy='no'"
        ) from None
    return path
