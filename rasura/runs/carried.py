"""What the modules of a model carry of protected trainings, whichever model they come into later.

A guard belongs to one model object. Its modules outlive it: adapters are merged into their base layers, an encoder gets a
new head, a part is copied. A new ledger would not count what earlier trainings released into them.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from rasura.accounting import Ledger
from rasura.victims.fingerprint import tensor_digest

KEY = "_rasura_trainings"
"""The attribute of a module that lists what it carries, one ``Training`` for each."""


class Training:
    """One protected training of a module: its ``ledger``, and digests of the module's ``frozen`` weights from before it."""

    def __init__(self, ledger: Ledger, frozen: dict[str, str | None]) -> None:
        self.ledger, self.frozen = ledger, frozen

    def __deepcopy__(self, memo: dict[int, Any]) -> Training:
        """Itself: weights may be written into a copy later, as averages are."""
        return self


def mark(model: nn.Module, ledger: Ledger, trained: set[str]) -> None:
    """Let the modules of ``model`` carry the training of ``ledger``, of the parameters called ``trained``."""
    learning = {id(p) for name, p in model.named_parameters() if name in trained}
    for module in model.modules():
        own = dict(module.named_parameters(recurse=False))
        if own:
            frozen = {name: _digest(p) for name, p in own.items() if id(p) not in learning}
            vars(module)[KEY] = [*vars(module).get(KEY, ()), Training(ledger, frozen)]


def carried(model: nn.Module) -> tuple[str, int] | None:
    """The first parameter of ``model`` that may hold releases of earlier trainings, and the number of the releases of all
    that its parameters may hold; None where they hold none. A weight that was frozen and has its values from before the
    training holds none of it."""
    first, ledgers = "", {}
    for path, module in model.named_modules():
        trainings = [one for one in vars(module).get(KEY, ()) if one.ledger.releases]
        for name, parameter in module.named_parameters(recurse=False) if trainings else ():
            now = _digest(parameter) if any(name in one.frozen for one in trainings) else None
            for one in trainings:
                if now is None or one.frozen.get(name) != now:
                    first = first or f"{path}.{name}".lstrip(".")
                    ledgers[id(one.ledger)] = one.ledger
    return (first, sum(one.releases for one in ledgers.values())) if ledgers else None


def _digest(parameter: Tensor) -> str | None:
    """None for a weight whose bits cannot be read, such as one that is not in memory."""
    try:
        return tensor_digest(parameter)
    except (NotImplementedError, RuntimeError, TypeError):
        return None
