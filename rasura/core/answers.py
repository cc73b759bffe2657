"""The values of attacks on models that answer queries: membership in the training data, and the data sent to a model
service."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from rasura.core.batches import Batch
from rasura.core.values import Grant, Granted, Mechanism, Parameter, Task, Vocabulary


@dataclass(frozen=True)
class Membership:
    """A guess for each candidate: the higher the score, the likelier a member.

    ``threshold``: the score above which the attack itself calls a text a member, chosen without knowing the members. None
    where the paper sets no threshold.
    """

    scores: Tensor
    threshold: float | None = field(default=None, kw_only=True)
    details: Mapping[str, Parameter] = field(default_factory=dict)


@dataclass(frozen=True)
class TokenAnswers:
    """One causal model's answers to the predicted tokens of one text, each ``(tokens,)``.

    ``logs``: log probability of the token in nats, float64. ``standard``: the same, minus its mean and over its standard
    deviation for tokens drawn from the model's own distribution at that place. ``first``: bool, whether the token is the
    model's first choice.
    """

    logs: Tensor
    standard: Tensor
    first: Tensor


@dataclass(frozen=True)
class Answers:
    """One model's answers to ``n`` texts, in float64.

    ``losses`` ``(n,)``: the loss of the label in nats; for a causal model, the mean over predicted tokens. ``margins``
    ``(n,)``: the log odds of that probability, ``log(p / (1 - p))``. ``logits`` ``(n, classes)``, without columns for a
    causal model. ``tokens``: a causal model's answers to each token of each text, where they were asked for.
    """

    losses: Tensor
    margins: Tensor
    logits: Tensor
    tokens: tuple[TokenAnswers, ...] = ()


@dataclass(frozen=True)
class ShadowModel:
    """A model that the adversary trained in the same way as the audited model, on texts of its choice.

    ``inside`` ``(candidates,)`` bool: the candidates among them. ``reference``: its answers to the reference texts.
    """

    answers: Answers
    inside: Tensor
    reference: Answers | None = None


@dataclass(frozen=True)
class ModelObservation(Granted):
    """What one adversary sees of a *trained* model to decide which candidates it was trained on. It does not contain the
    answer.

    The adversary can only query the model: ``MODEL`` grants a function from texts to ``Answers``.
    """

    task: Task
    granted: Mapping[Grant, Any]

    @property
    def candidates(self) -> tuple[Batch, ...]:
        """The texts in question, one per batch, with their labels, in an uninformative order."""
        candidates: tuple[Batch, ...] = self._get(Grant.CANDIDATES)
        return candidates

    @property
    def ask(self) -> Callable[[Sequence[Batch]], Answers]:
        """The trained model's answers to any texts; the candidates are queried once."""
        ask: Callable[[Sequence[Batch]], Answers] = self._get(Grant.MODEL)
        return ask

    @property
    def ask_reference(self) -> Callable[[Sequence[Batch]], Answers]:
        """The answers of the reference model, on which the training began; the candidates are queried once."""
        ask: Callable[[Sequence[Batch]], Answers] = self._get(Grant.REFERENCE_MODEL)
        return ask

    @property
    def base(self) -> tuple[torch.nn.Module, Vocabulary]:
        """The public model from which training started, and its vocabulary."""
        base: tuple[torch.nn.Module, Vocabulary] = self._get(Grant.BASE_MODEL)
        return base

    @property
    def reference(self) -> tuple[Batch, ...]:
        """Texts of the same kind that the model was not trained on, one per batch, with their labels."""
        reference: tuple[Batch, ...] = self._get(Grant.REFERENCE_TEXT)
        return reference

    @property
    def shadow_models(self) -> tuple[ShadowModel, ...]:
        """The adversary's shadow models, trained at the first access."""
        train: Callable[[], tuple[ShadowModel, ...]] = self._get(Grant.TRAINING)
        return train()


@dataclass(frozen=True)
class ServiceTranscript:
    """The truth of a model service that receives token ids, with its secrets. Only ``observe_service`` and metrics read it.

    ``public`` is the model as published, ``served`` the obfuscated one, ``tokens`` ``(vocabulary,)`` int64 the secret: the
    id of each token at the service. ``ids``: the client's texts in the public tokenizer's ids, special tokens included.
    ``sent``: the ids as sent, where a protection replaces private ids. ``vectors``: the states sent, ``(length, hidden)``
    per text, where states are sent instead of ids; ``served`` is then a ``rasura.service_protections.split.Split``.
    ``uploaded``: ``served`` as it was before the service trained it, if it did.
    """

    public: torch.nn.Module
    served: torch.nn.Module
    tokens: Tensor = field(repr=False)
    ids: tuple[tuple[int, ...], ...] = field(repr=False)
    vocabulary: Vocabulary
    mechanism: Mechanism
    sent: tuple[tuple[int, ...], ...] | None = None
    vectors: tuple[Tensor, ...] | None = None
    uploaded: torch.nn.Module | None = None


@dataclass(frozen=True)
class ServiceObservation:
    """What the operator of a model service sees: the model that it serves, every id that clients send, as ``ids``, and the
    model as it was ``uploaded`` where the service trained it.

    Also public are the base model, its ``vocabulary``, the mechanism, and text of the same kind. Special tokens keep their
    ids. Where states are sent instead, ``vectors`` holds them, ``(length, hidden)`` per text, and ``ids`` are ``UNKNOWN``
    except at special tokens; the client's half of ``served`` is public, since every client has it.
    """

    public: torch.nn.Module
    served: torch.nn.Module
    ids: tuple[tuple[int, ...], ...]
    vocabulary: Vocabulary
    mechanism: Mechanism
    reference_text: tuple[str, ...] = ()
    vectors: tuple[Tensor, ...] = ()
    uploaded: torch.nn.Module | None = None

    @property
    def as_uploaded(self) -> ServiceObservation:
        """The same ids beside the model as it was uploaded: training changes no id, and the operator has both models."""
        return self if self.uploaded is None else replace(self, served=self.uploaded, uploaded=None)


@dataclass(frozen=True)
class TokenReading:
    """A guess at the tokens behind the ids of a service: ``ranked`` holds ``(length, guesses)`` int64 for every text: public
    ids, the likeliest first, ``UNKNOWN`` where there is no guess. ``ordered`` is false for a bag of tokens, one in each
    row."""

    ranked: tuple[Tensor, ...]
    ordered: bool = True
    details: Mapping[str, Parameter] = field(default_factory=dict)
