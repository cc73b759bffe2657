"""The models of an audit: the trained ones, those that a server crafted, and the adversary's copies. What a method did to
one of them is found and undone here."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

from rasura.core.interfaces import ActiveAttack, Attack, InputError
from rasura.core.local import Adapter
from rasura.core.rng import generator
from rasura.core.threat import THREATS, adversary_copy
from rasura.core.unchanged import Assembled, Clean, Lent, tensors_of
from rasura.core.values import Reconstruction, Vocabulary
from rasura.runs.cells import Cell
from rasura.runs.plans import Plan
from rasura.victims.adapters import with_fresh_adapter
from rasura.victims.loading import Victim, load, with_one_label
from rasura.victims.on_disk import copied
from rasura.victims.structure import check_blocks
from rasura.victims.weights import classes_for


def load_victim(plan: Plan, num_labels: int, device: str) -> Victim:
    """The model of ``plan``. Its head stays if it has the ``num_labels`` classes that the texts need, unless the plan sets a
    number.

    Raises ``InputError`` as ``load`` and ``check_blocks`` do.
    """
    task: Any = plan.task
    labels = plan.num_labels or (num_labels if task == "vision" else classes_for(plan.model, num_labels))
    victim = with_one_label(load(plan.model, task, num_labels=labels, seed=plan.seed, device=device))
    if task != "vision":
        check_blocks(victim.model)
    return victim


def load_language_model(plan: Plan) -> tuple[nn.Module, Vocabulary] | None:
    """The public language model that the plan grants to the adversary, if any."""
    prior = None if plan.language_model is None else load(plan.language_model, "causal", attacked=False)
    return None if prior is None else (prior.model, prior.vocabulary)


def on_cpu(model: nn.Module) -> nn.Module:
    """``model``, or a copy of it where it is on another device."""
    return model if next(model.parameters()).device.type == "cpu" else copied(model).to("cpu")


class AuditModels:
    """For each of the ``adapters``, the model that is trained and the adversary's copy of it. ``keep``: a clean copy of the
    weights is kept, so that they can be put back; ``put_back`` says of what."""

    def __init__(self, victim: Victim, adapters: Iterable[Adapter], seed: int, keep: bool = False) -> None:
        self.task = victim.task
        self._public = {
            adapter: with_fresh_adapter(victim.model, victim.task, adapter, seed) for adapter in sorted(set(adapters))
        }
        self._clean = {adapter: Clean(model, keep) for adapter, model in self._public.items()}
        self._assembled = {adapter: Assembled(model) for adapter, model in self._public.items()}
        self._copies = {adapter: adversary_copy(model) for adapter, model in self._public.items()}
        self._lent: dict[Adapter, tuple[Lent, Assembled]] = {}
        self._crafted: dict[tuple[str, Adapter, int], nn.Module] = {}

    def lend(self, adapter: Adapter) -> None:
        """Remember how the models of ``adapter`` are, before a method has them."""
        if adapter not in self._lent:
            mine, theirs = self._public[adapter], self._copies[adapter]
            self._lent[adapter] = Lent(lambda: tensors_of(mine, theirs)), Assembled(theirs)

    def put_back(self, adapter: Adapter) -> bool:
        """Undo whatever was done to the models of ``adapter`` since ``lend``: to their modules, modes and numbers. Returns
        whether a number had changed. Raises ``InputError`` if one had, and no clean copy was kept."""
        lent, theirs = self._lent[adapter]
        changed = lent.changed
        self._assembled[adapter].put_back()
        theirs.put_back()
        if not changed:
            return False
        self._clean[adapter].put_back()
        if not self._clean[adapter].whole and lent.changed:
            raise InputError(
                "a method changed the weights of the model, and weights above 4 GiB are not kept to put them back. So the "
                "run ends here; the method must copy what it changes"
            )
        self._copies[adapter] = adversary_copy(self._public[adapter])
        del self._lent[adapter]
        self.lend(adapter)
        return True

    def forget_crafted(self) -> None:
        """Forget what was crafted, since a method changed it: it is crafted again when it is asked for."""
        self._crafted = {}

    def public(self, adapter: Adapter) -> nn.Module:
        """The model that an honest server sends."""
        return self._public[adapter]

    def trained(self, adapter: Adapter, attack: Attack[Reconstruction], cell: Cell) -> nn.Module:
        """The model that the client trains: the public one, or the one that the server sends instead under an active threat
        model."""
        public = self.public(adapter)
        if not (THREATS[cell.threat].active and isinstance(attack, ActiveAttack)):
            return public
        key = cell.attack, adapter, cell.seed
        if key not in self._crafted:
            # One at a time: each is as large as the model.
            self._crafted = {key: attack.craft(public, self.task, rng=generator(cell.seed, "craft", cell.attack))}
        return self._crafted[key]

    def adversary(self, adapter: Adapter, sent: nn.Module) -> nn.Module:
        """The adversary's copy of ``sent``, the model that the client trained."""
        return self._copies[adapter] if sent is self.public(adapter) else adversary_copy(sent)
