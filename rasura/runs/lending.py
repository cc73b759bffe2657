"""What the attacks of one step share, and whether each left it as it was: an audit looks after every one of them.

A method that changes what it is given would change what the next one reads, and so a verdict. Its own result is not
believed either, and what it changed is put back, or computed again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

from torch import nn

from rasura.core.local import Adapter
from rasura.core.threat import ThreatModel, observe
from rasura.core.unchanged import Lent, lent_message, tensors_of
from rasura.core.values import Observation, Transcript, Vocabulary
from rasura.runs.attempt import Outcome, meddled
from rasura.runs.audit_models import AuditModels
from rasura.victims.fingerprint import fingerprints

G = TypeVar("G")
Prior = tuple[nn.Module, Vocabulary]


class Lending:
    """``models`` and the public language model, with the step that is attacked.

    ``stale``: something had changed since ``begin``, so that the step must be taken again. ``load``: loads that model.
    """

    def __init__(self, models: AuditModels, load: Callable[[], Prior | None]) -> None:
        self.models, self._load = models, load
        self.language_model = load()
        self._prior = self._lent_prior()
        self._step: list[Lent] = []
        self.stale = False

    @property
    def fixed(self) -> dict[str, str | Mapping[str, str]]:
        """The fingerprints of the public language model, for ``RunStore.describe``; empty without one."""
        return {} if self.language_model is None else fingerprints("language model", *self.language_model)

    def _lent_prior(self) -> Lent | None:
        if self.language_model is None:
            return None
        model = self.language_model[0]
        return Lent(lambda: tensors_of(model))

    def begin(self, adapter: Adapter, truth: Transcript | None = None) -> None:
        """Remember how everything is, before methods have it: the models, and the step if it was taken."""
        self.adapter, self.stale = adapter, False
        self.models.lend(adapter)
        self._step = [] if truth is None else [lent_message(truth.message)]
        if truth is not None and truth.model is not self.models.public(adapter):
            crafted = truth.model
            self._step.append(Lent(lambda: tensors_of(crafted)))

    def observed(self, truth: Transcript, threat: ThreatModel, reference: tuple[str, ...] | None) -> Observation:
        """What ``threat`` sees of the step that ``begin`` got; ``reference`` text is public."""
        adversary = self.models.adversary(self.adapter, truth.model)
        return observe(
            truth, threat, adversary_model=adversary, reference_text=reference, language_model=self.language_model
        )

    def put_back(self) -> bool:
        """Whether a number was changed since ``begin``. Whatever was done to models is undone."""
        changed = self.models.put_back(self.adapter)
        if any(one.changed for one in self._step):
            self.models.forget_crafted()
            changed = True
        if self._prior is not None and self._prior.changed:
            self.language_model, changed = self._load(), True
            self._prior = self._lent_prior()
        self.stale = self.stale or changed
        return changed

    def checked(self, outcome: Outcome[G]) -> Outcome[G]:
        """``outcome``, or a crash if the attack changed what it was given."""
        return meddled(outcome) if self.put_back() else outcome
