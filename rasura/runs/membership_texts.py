"""The texts of an attack on a trained model: members, others, and texts of the same kind, each once."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from rasura.core.batches import Batch, contents, places_of_each
from rasura.core.errors import InputError
from rasura.data.classes import model_classes
from rasura.data.overlap import texts_hash, wording_of
from rasura.data.text import Example, check_named, columns_of, load_examples, place_of
from rasura.runs.membership_plan import MembershipPlan
from rasura.runs.membership_rows import no_rows, told_by
from rasura.runs.training import encoded
from rasura.victims.loading import Victim

Encoded = list[tuple[Example, Batch]]

NUMBER_THEM = "give the numbers that the training used, or the names in id2label of the model's config.json"
"""What to do about labels of which it is not known which class of the model they name."""


class MembershipTexts:
    """The files of ``plan``. ``trained``: every text that the model was trained on, of which a limit makes only the first
    candidates; ``others``, ``reference``: the other texts. ``label_names``: the names of labels that are text.

    Raises ``InputError`` for files that cannot be read, and for texts that stand on two sides.
    """

    def __init__(self, plan: MembershipPlan) -> None:
        self.plan = plan
        self.label_names: tuple[str, ...] | None = None
        self.trained, self.others = self._sides()
        self.reference = self._read(plan.reference) if plan.reference else []
        self._refuse_shared()

    @property
    def sides(self) -> tuple[list[Example], list[Example]]:
        """The candidates: members and others."""
        return self.trained[: self.plan.limit], self.others

    def distinct(self, victim: Victim) -> tuple[Encoded, Encoded, Encoded, int]:
        """Members, others and reference texts as ``victim`` sees them, each once; and how many rows that leaves out.

        A text repeated forty times would count as forty, and one that stands on two sides, once cut, was trained on. So
        others are compared with every text of the training, whatever the limit. Labels count: a classifier is asked about
        both together.
        """
        known: list[Hashable] = []
        found: list[Encoded] = []
        repeated = 0
        for whole, asked in zip((self.trained, self.others, self.reference), (*self.sides, self.reference), strict=True):
            rows = encoded(victim, whole, max_length=self.plan.max_length, truncate=self.plan.truncate)
            if victim.task == "causal":
                _predicted(rows[: len(asked)], asked)
            seen = [one for row in rows for one in contents(row, labels=True)]
            places = [k for k in places_of_each(seen, known) if k < len(asked)]
            found.append([(whole[k], rows[k]) for k in places])
            known += seen
            repeated += len(asked) - len(places)
        inside, outside, beside = found
        return inside, outside, beside, repeated

    def _sides(self) -> tuple[list[Example], list[Example]]:
        """Every text of the training, and as many others as are asked about."""
        plan = self.plan
        inside = self._read(plan.members)
        others = None if plan.non_members is None else self._read(plan.non_members, plan.limit)
        if plan.rows is None:
            return inside, others or []
        everything = inside
        told = told_by(plan.rows, plan.members)
        try:
            numbers = [k for name in ("trained", "held_out") for k in told[name]]
            if not all(type(k) is int and 0 <= k < len(everything) for k in numbers) or len(set(numbers)) < len(numbers):
                raise ValueError
            trained, held = ([everything[k] for k in told[name]] for name in ("trained", "held_out"))
            same = told["texts"] == texts_hash(everything)
        except (ValueError, LookupError, TypeError):
            raise no_rows(plan.rows, plan.members) from None
        if not same:
            raise InputError(
                f"{plan.rows} lists rows of another file than {plan.members}, or of the same texts in another order; pass "
                "the file that the training read"
            )
        if others is None:  # a text that occurs twice may stand on both sides: it was trained on
            seen = set(map(wording_of, trained))
            others = [e for e in held if wording_of(e) not in seen]
        return trained, others[: plan.limit]

    def _read(self, source: str, limit: int | None = None) -> list[Example]:
        """A file's texts. Labels are numbered by the names in the first file read (the members), or otherwise by those of
        the model."""
        read = load_examples(
            source, limit=limit, columns=columns_of(self.plan), label_names=self.label_names, model=self.plan.model
        )
        self.label_names = read.label_names if self.label_names is None else self.label_names
        if self.plan.task == "classification":
            check_named(read, source, model_classes(self.plan.model), self.plan.model, NUMBER_THEM)
        return read

    def _refuse_shared(self) -> None:
        plan = self.plan
        inside, outside, beside = (set(map(wording_of, some)) for some in (self.trained, self.others, self.reference))
        for name, what, both in (
            (plan.non_members, "members", outside & inside),
            (plan.reference, "members or candidates", beside & (inside | outside)),
        ):
            if both:
                raise InputError(f"{name} contains texts that are also {what} ({len(both)}); remove them")


def _predicted(rows: Sequence[Batch], examples: Sequence[Example]) -> None:
    """Raises ``InputError`` for a text of which a causal model predicts no token: it has no loss."""
    for number, (row, example) in enumerate(zip(rows, examples, strict=True), 1):
        if not bool((row.labels[:, 1:] != -100).any()):
            raise InputError(f"{place_of(example, number)}: a causal model predicts no token of this text; remove the row")
