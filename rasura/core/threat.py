"""The adversaries, and the only functions that turn the truth into what an adversary sees."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from rasura.core.answers import Answers, ModelObservation, ServiceObservation, ServiceTranscript, ShadowModel
from rasura.core.batches import Batch
from rasura.core.interfaces import ModelService, NotApplicable
from rasura.core.records import OPERATOR
from rasura.core.rng import Randomness, secret_generator
from rasura.core.values import UNKNOWN, Grant, Mechanism, Message, Observation, Task, Transcript, Vocabulary


@dataclass(frozen=True)
class ThreatModel:
    """An adversary, defined by what it is granted. ``active``: the server may send a crafted model. ``plain``: the
    description in reports."""

    name: str
    grants: frozenset[Grant]
    plain: str
    active: bool = False


# What is public is granted to everybody as soon as there is any: text of the same kind, a language model.
_PUBLIC = frozenset(
    {Grant.MODEL, Grant.BASE_MODEL, Grant.MECHANISM, Grant.BATCH_SIZE, Grant.REFERENCE_TEXT, Grant.LANGUAGE_MODEL}
)

HONEST_SERVER = ThreatModel(
    "honest-server",
    _PUBLIC,
    "the server operator, who follows the protocol but inspects the updates (honest-but-curious). The operator "
    "knows the model, the protection in use and the number of texts in an update",
)
WITH_LABELS_AND_LENGTHS = ThreatModel(
    "with-labels-and-lengths",
    _PUBLIC | {Grant.LABELS, Grant.LENGTHS},
    "the honest-but-curious server operator, who also knows the label of every text and its length in tokens "
    "(the assumption of earlier papers)",
)

WITH_LENGTHS = ThreatModel(
    "with-lengths",
    _PUBLIC | {Grant.LENGTHS},
    "the honest-but-curious server operator, who also knows the length of every text in tokens",
)
WITH_LABELS = ThreatModel(
    "with-labels", _PUBLIC | {Grant.LABELS}, "the honest-but-curious server operator, who also knows the label of every text"
)

MALICIOUS_SERVER = ThreatModel(
    "malicious-server",
    _PUBLIC,
    "a malicious server operator, who may send crafted weights instead of the model (an active attack). The "
    "operator knows the protection in use and the number of texts in an update",
    active=True,
)

THREATS: Mapping[str, ThreatModel] = {
    t.name: t for t in (HONEST_SERVER, WITH_LABELS, WITH_LENGTHS, WITH_LABELS_AND_LENGTHS, MALICIOUS_SERVER)
}

MODEL_USER = ThreatModel(
    "model-user",
    frozenset(
        {
            Grant.MODEL,
            Grant.BASE_MODEL,
            Grant.REFERENCE_MODEL,
            Grant.CANDIDATES,
            Grant.REFERENCE_TEXT,
            Grant.MECHANISM,
            Grant.TRAINING,
        }
    ),
    "an adversary who can query the trained model for probabilities, holds candidate texts with their labels, "
    "and knows how the model was trained: the public model, the recipe and the protection",
)
"""The adversary of membership inference. It can query the trained model but sees no update of its training."""

SERVICE_OPERATOR = ThreatModel(
    OPERATOR,
    frozenset({Grant.MODEL, Grant.BASE_MODEL, Grant.REFERENCE_TEXT, Grant.MECHANISM}),
    "the operator of a model service, who follows the protocol but inspects the data (honest-but-curious). The "
    "operator sees the uploaded model and everything that clients send, and knows the public model, the "
    "protection in use and texts of the same kind",
)
"""The adversary of a model service: reads the data that clients send."""


def adversary_copy(model: nn.Module) -> nn.Module:
    """The adversary's copy of the model, on the CPU, in eval mode and without gradients. It has its own modules but shares
    the read-only weights.

    A victim on another device is copied.
    """
    shared: dict[int, Any] = {id(p): nn.Parameter(p.detach().cpu(), requires_grad=False) for p in model.parameters()}
    shared |= {id(b): b.detach().cpu() for b in model.buffers()}
    return copy.deepcopy(model, shared).eval()


def observe(
    truth: Transcript,
    threat: ThreatModel,
    *,
    adversary_model: nn.Module | None = None,
    reference_text: tuple[str, ...] | None = None,
    language_model: tuple[nn.Module, Vocabulary] | None = None,
) -> Observation:
    """What ``threat`` sees of ``truth``: the message, and what it is granted. For updates, this is the only way from the
    truth to an adversary.

    Pass ``adversary_model`` (from ``adversary_copy``) to save making one for every observation.
    """
    sources: dict[Grant, Any] = {
        Grant.MODEL: lambda: adversary_model if adversary_model is not None else adversary_copy(truth.model),
        Grant.BASE_MODEL: lambda: truth.vocabulary,
        Grant.LABELS: lambda: truth.batch.labels.clone(),
        Grant.BATCH_SIZE: lambda: len(truth.batch),
        Grant.MECHANISM: lambda: copy.deepcopy(truth.mechanism),
    }
    if isinstance(truth.batch, Batch):
        lengths = truth.batch.lengths
        sources[Grant.LENGTHS] = lambda: lengths
    if reference_text is not None:
        sources[Grant.REFERENCE_TEXT] = lambda: reference_text
    if language_model is not None:
        sources[Grant.LANGUAGE_MODEL] = lambda: language_model
    granted = {g: sources[g]() for g in Grant if g in threat.grants and g in sources}
    return Observation(truth.message, truth.task, granted)


def observe_update(
    message: Message,
    task: Task,
    *,
    model: nn.Module,
    vocabulary: Vocabulary,
    mechanism: tuple[Mechanism, ...] = (),
    batch_size: int | None = None,
    labels: Sequence[int] | None = None,
    lengths: Sequence[int] | None = None,
    reference_text: tuple[str, ...] | None = None,
    language_model: tuple[nn.Module, Vocabulary] | None = None,
) -> Observation:
    """The view of someone who captured ``message``. There is no truth here, so what is not passed is not granted, and what
    is passed of the texts and of the training is a claim.

    ``model``: the model with which the update was computed; the adversary gets a copy.
    """
    known: dict[Grant, Any] = {
        Grant.MODEL: adversary_copy(model),
        Grant.BASE_MODEL: vocabulary,
        Grant.MECHANISM: mechanism,
        Grant.BATCH_SIZE: batch_size,
        Grant.LABELS: None if labels is None else torch.tensor(list(labels)),
        Grant.LENGTHS: None if lengths is None else tuple(lengths),
        Grant.REFERENCE_TEXT: reference_text,
        Grant.LANGUAGE_MODEL: language_model,
    }
    granted = {g: value for g, value in known.items() if value is not None}
    claimed = {Grant.BATCH_SIZE, Grant.LABELS, Grant.LENGTHS, Grant.MECHANISM} & granted.keys()
    return Observation(message, task, granted, frozenset(claimed))


def observe_model(
    threat: ThreatModel,
    task: Task,
    *,
    ask: Callable[[Sequence[Batch]], Answers],
    candidates: Sequence[Batch],
    base: tuple[nn.Module, Vocabulary] | None = None,
    ask_reference: Callable[[Sequence[Batch]], Answers] | None = None,
    reference: Sequence[Batch] = (),
    mechanism: tuple[Mechanism, ...] = (),
    shadow_models: Callable[[], tuple[ShadowModel, ...]] | None = None,
) -> ModelObservation:
    """What ``threat`` sees of a trained model, which is queried through ``ask``. The members are not passed, so they cannot
    leak.

    ``candidates`` must be in an uninformative order (shuffle them). ``shadow_models`` trains the adversary's models at its
    first call. What is not passed is not granted.
    """
    sources: dict[Grant, Any] = {Grant.MODEL: ask, Grant.CANDIDATES: tuple(candidates), Grant.MECHANISM: mechanism}
    if base is not None:
        sources[Grant.BASE_MODEL] = base
    if ask_reference is not None:
        sources[Grant.REFERENCE_MODEL] = ask_reference
    if reference:
        sources[Grant.REFERENCE_TEXT] = tuple(reference)
    if shadow_models is not None:
        sources[Grant.TRAINING] = shadow_models
    return ModelObservation(task, {g: sources[g] for g in Grant if g in threat.grants and g in sources})


def service_transcript(
    service: ModelService, ids: Sequence[tuple[int, ...]], rng: Randomness | None = None
) -> ServiceTranscript:
    """The truth of sending the texts ``ids``, special tokens included, to ``service``. Raises ``NotApplicable`` for states
    that are not finite and for ids outside the vocabulary: no model can use them, and no attack is measured by them."""
    rng = rng or secret_generator()
    drawn = service.sent(ids, rng) if service.draws else None
    vectors = service.states(ids, rng)
    if not all(bool(states.isfinite().all()) for states in vectors or ()):
        raise NotApplicable("the states that are sent hold values that are not finite, so nothing can be measured")
    if any(not 0 <= token < service.vocabulary.size for text in drawn or () for token in text):
        raise NotApplicable("ids that are sent are outside the vocabulary, so nothing can be measured")
    return ServiceTranscript(
        service.public, service.served, service.tokens, tuple(ids), service.vocabulary, service.mechanism, drawn, vectors,
        service.uploaded,
    )  # fmt: skip


def observe_service(truth: ServiceTranscript, *, reference_text: tuple[str, ...] = ()) -> ServiceObservation:
    """What the operator of a model service sees; ``reference_text`` of the same kind is public. For services, this is the
    only way from the truth to an adversary."""
    sent = truth.sent or tuple(tuple(truth.tokens[list(text)].tolist()) for text in truth.ids)
    if truth.vectors is not None:
        special = truth.vocabulary.special_ids
        sent = tuple(tuple(i if i in special else UNKNOWN for i in text) for text in truth.ids)
    return ServiceObservation(
        adversary_copy(truth.public), adversary_copy(truth.served), sent, truth.vocabulary, truth.mechanism, reference_text,
        truth.vectors or (), None if truth.uploaded is None else adversary_copy(truth.uploaded),
    )  # fmt: skip


def own_copy(seen: ServiceObservation) -> ServiceObservation:
    """``seen`` with models and states of its own, for one attack: it shares no memory with what others see."""
    public, served, uploaded = copy.deepcopy((seen.public, seen.served, seen.uploaded))
    vectors = tuple(v.clone() for v in seen.vectors)
    return replace(seen, public=public, served=served, uploaded=uploaded, vectors=vectors)
