"""The data of an audit: private texts or images, loaded, checked and tokenized into batches."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from typing import Any

from torch import nn

from rasura.core.accumulation import gathered, needed_tokens, tokens_in
from rasura.core.batches import contents, places_of_each
from rasura.core.interfaces import Defense, InputError
from rasura.data.images import ImageExample, demo_images, encode_images, images_hash, load_images
from rasura.data.overlap import refuse_shared
from rasura.data.sizes import image_sizes, text_sizes
from rasura.data.text import E, Example, columns_of, data_hash, demo_examples, encode, groups, load_examples, load_reference
from rasura.runs.plans import Plan
from rasura.victims.batching import joined
from rasura.victims.loading import Victim


@dataclass(frozen=True)
class AuditData:
    """The private ``examples`` or ``images``, one of them empty, and public text of the same kind, if any.

    ``label_names``: the names of labels that are text in a data file; None if no file of texts was read.
    """

    examples: Sequence[Example]
    images: Sequence[ImageExample]
    reference: tuple[str, ...] | None = None
    label_names: tuple[str, ...] | None = None

    @property
    def private(self) -> Sequence[Any]:
        """The texts or the images."""
        return self.images or self.examples

    @cached_property
    def name(self) -> str:
        """Sixteen hex digits that name the private data."""
        return _name(self.private)

    @cached_property
    def reference_name(self) -> str | None:
        """The same for the public text; None without any."""
        return None if self.reference is None else data_hash([Example(t) for t in self.reference])

    def fixed(self, first: int) -> dict[str, str | Mapping[str, str]]:
        """What all results of a run depend on. Private data count by their ``first`` row in the file, since a calibration
        verifies on others than it searched with."""
        return {"data set": {str(first): self.name}, "reference text": self.reference_name or "none"}

    @property
    def num_labels(self) -> int:
        """The number of classes that the labels need, at least two."""
        return max(2, 1 + max((e.label or 0) for e in self.private))

    @property
    def commonest_label(self) -> int:
        """The class of most texts or images; the smallest of equally frequent ones."""
        labels = [e.label or 0 for e in self.private]
        return max(sorted(set(labels)), key=labels.count)


def _name(private: Sequence[Any]) -> str:
    return images_hash(private) if private and isinstance(private[0], ImageExample) else data_hash(private)


def load_data(plan: Plan) -> AuditData:
    """The data of a checked plan. Raises ``InputError`` for unreadable files, empty texts, a ``skip`` that leaves nothing,
    and a reference that contains private texts."""
    if plan.task == "vision":
        pictures = demo_images() if plan.data is None else load_images(plan.data, limit=plan.skip + plan.limit)
        return AuditData([], _wanted(pictures, plan))
    names: tuple[str, ...] | None = None
    found: list[Example]
    if plan.texts:
        if any(not t.strip() for t in plan.texts):
            raise InputError("--text is empty; expected a text")
        found = [Example(t, None, k % 2, source="--text", row=k + 1) for k, t in enumerate(plan.texts)]
    elif plan.data is None:
        found = demo_examples()
    else:
        read = load_examples(plan.data, limit=plan.skip + plan.limit, columns=columns_of(plan), model=plan.model)
        found, names = read, read.label_names or ()
    examples = _wanted(found, plan)
    return AuditData(examples, [], _reference(plan, examples), names)


def _wanted(found: list[E], plan: Plan) -> list[E]:
    if plan.skip and len(found) <= plan.skip:
        raise InputError(f"skip is {plan.skip}, but there are only {len(found)} texts or images; expected a smaller number")
    return found[plan.skip : plan.skip + plan.limit]


def _reference(plan: Plan, examples: Sequence[Example]) -> tuple[str, ...] | None:
    if plan.reference is None:
        return None
    found = load_reference(plan.reference, columns_of(plan))
    refuse_shared(examples, found, plan.reference)
    return tuple(e.text for e in found)[: plan.references]


@dataclass(frozen=True)
class EncodedData:
    """By protection and batch size: the ``batches`` that clients send, the numbers of the ``examples`` in each batch, its
    name: sixteen hex digits of its texts or images, whatever others the audit has, and what was ``cut`` of it
    (``CUT``)."""

    batches: dict[tuple[str, int], list[Any]]
    examples: Mapping[tuple[str, int], list[list[int]]]
    names: Mapping[tuple[str, int], list[str]]
    cut: Mapping[tuple[str, int], list[list[tuple[int, int]]]]


def encoded_data(data: AuditData, plan: Plan, victim: Victim, defenses: Mapping[str, Defense]) -> EncodedData:
    """``data`` as batches. Everything is tokenized here, before the first cell, so that a bad text is refused at once. Under
    ``accumulate``, a client sends several batches as one.
    """
    private = {size: groups(data.private, size) for size in plan.batch_sizes}
    batches = {size: [_encoded(group, plan, victim) for group in private[size]] for size in plan.batch_sizes}
    given: dict[Any, int] = {}
    numbers = {
        size: [[given.setdefault(one, len(given)) for one in contents(batch)] for batch in some]
        for size, some in batches.items()
    }
    cuts = {size: [_cut(group, plan, victim) for group in private[size]] for size in plan.batch_sizes}
    sent: dict[tuple[str, int], list[Any]] = {}
    examples: dict[tuple[str, int], list[list[int]]] = {}
    names: dict[tuple[str, int], list[str]] = {}
    cut: dict[tuple[str, int], list[list[tuple[int, int]]]] = {}
    for text, size in product(defenses, batches):
        places = _sent_together(defenses[text], batches[size], victim.model)
        sent[text, size] = [_joined([batches[size][k] for k in some], victim) for some in places]
        examples[text, size] = [[n for k in some for n in numbers[size][k]] for some in places]
        names[text, size] = [_name([one for k in some for one in private[size][k]]) for some in places]
        cut[text, size] = [_of_any([one for k in some for one in cuts[size][k]]) for some in places]
    return EncodedData(sent, examples, names, cut)


def _cut(group: Sequence[Any], plan: Plan, victim: Victim) -> list[tuple[int, int]]:
    """What is sent of each of ``group``, and what there was; empty if nothing may be cut."""
    if not plan.truncate:
        return []
    if victim.task == "vision":
        return image_sizes(group, victim.max_length)
    return text_sizes(group, victim.tokenizer, victim.longest(plan.max_length))


def _of_any(cut: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """``cut``, or nothing where all is sent as it is."""
    return cut if any(sent != whole for sent, whole in cut) else []


def different(data: AuditData, plan: Plan, victim: Victim) -> frozenset[Hashable]:
    """What ``victim`` sees of ``data``: each different text or image once, as ``contents``."""
    return frozenset(_seen(data, plan, victim))


def without(data: AuditData, plan: Plan, victim: Victim, known: Collection[Hashable], most: int) -> AuditData:
    """The first ``most`` of ``data`` that are different and not ``known``."""
    kept = [data.private[k] for k in places_of_each(_seen(data, plan, victim), known)][:most]
    return replace(data, images=kept) if data.images else replace(data, examples=kept)


def _seen(data: AuditData, plan: Plan, victim: Victim) -> list[Hashable]:
    return [one for batch in batches_of(data.private, plan, victim) for one in contents(batch)]


def batches_of(examples: Sequence[Any], plan: Plan, victim: Victim) -> list[Any]:
    """All ``examples``, in order, in batches as ``victim`` sees them. Raises ``InputError`` as ``data.text.encode`` does."""
    return [_encoded(examples[k : k + 256], plan, victim) for k in range(0, len(examples), 256)]


def _encoded(group: Sequence[Any], plan: Plan, victim: Victim) -> Any:
    v = victim
    if v.task == "vision":
        return encode_images(group, size=v.max_length, num_labels=v.num_labels, truncate=plan.truncate)
    longest = v.longest(plan.max_length)
    return encode(group, v.tokenizer, v.task, max_length=longest, num_labels=v.num_labels, truncate=plan.truncate)


def _sent_together(defense: Defense, batches: Sequence[Any], model: nn.Module) -> list[list[int]]:
    """The indices of the batches that a client sends as one. Under ``accumulate`` these are several. Batches left over are
    not sent and not audited; if nothing is sent at all, one batch of all texts records this.
    """
    needed = needed_tokens((p.mechanism for p in defense), model)
    if not needed:
        return [[k] for k in range(len(batches))]
    whole, rest = gathered([tokens_in(b.inputs()) for b in batches], needed)
    return whole or [rest]


def _joined(batches: list[Any], victim: Victim) -> Any:
    return batches[0] if len(batches) == 1 else joined(batches, victim.vocabulary.pad_id or 0)
