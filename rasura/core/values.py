"""The values that flow from a private batch to a score.

One way through: ``Batch`` -> ``PerExample`` -> ``Message`` -> ``Transcript`` (the truth) -> ``Observation`` (what one
adversary sees) -> ``Reconstruction`` (a guess). Every value is frozen: each stage returns a new one. The values of trained
models and model services are in ``rasura.core.answers``. This module imports only ``rasura.core.batches`` and
``rasura.core.vocabulary`` from the package.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from rasura.core.batches import Batch, ImageBatch
from rasura.core.vocabulary import NO_TEXT as NO_TEXT
from rasura.core.vocabulary import Vocabulary as Vocabulary

Task = Literal["classification", "causal", "vision"]
Confidence = Literal["verified", "span", "matched", "none"]
ProofName = Literal["gradient", "embedding-rows"]
Parameter = float | int | str | bool | None

UNKNOWN = -1
"""Marks a position in a reconstruction whose token was not recovered."""


class Grant(enum.Enum):
    """One thing that an adversary may know besides the message itself."""

    MODEL = "the weights of the trained model before the step"
    BASE_MODEL = "the public pretrained model and its tokenizer"
    REFERENCE_MODEL = "the answers of the public model on which the training began"
    LABELS = "the labels of the batch"
    LENGTHS = "the number of tokens of every text in the batch"
    BATCH_SIZE = "how many texts the batch holds"
    CANDIDATES = "a set of texts that contains the private ones"
    REFERENCE_TEXT = "public text of the same kind as the private text"
    LANGUAGE_MODEL = "a public causal language model of such text"
    MECHANISM = "which protection is used, with its parameters (never its keys)"
    TRAINING = "how the model was trained, so that similar models can be trained on chosen texts"


class Stage(enum.Enum):
    """The stage of training at which a defense acts."""

    DATA = "data"
    MODEL = "model"
    AGGREGATE = "aggregate"
    WIRE = "wire"


OWN = "own-"
"""Begins the name of a method that is not Rasura's own, where it could be taken for one."""


@dataclass(frozen=True)
class Mechanism:
    """The public description of one protection (Kerckhoffs: never a key)."""

    name: str
    stage: Stage
    parameters: Mapping[str, Parameter] = field(default_factory=dict)


Gradients = Mapping[str, Tensor]
"""One tensor per parameter name, as in ``model.named_parameters()``."""


Weigh = Callable[[Tensor], Tensor]
"""From gradient norms, ``(texts,)`` or, by layer, ``(layers, texts)``, to the weights of a sum, of the same shape."""


class Weighted(Protocol):
    """The sum of the gradients of a batch, each weighted by ``weigh`` of its Euclidean norm. ``by_layer``: the part of each
    layer (``core.layers``) has a norm and a weight of its own."""

    def __call__(self, weigh: Weigh, by_layer: bool = False) -> Gradients: ...


@dataclass(frozen=True)
class PerExample:
    """The gradients of a batch before aggregation, computed on demand, since most defenses need only the mean.

    ``mean()`` is the gradient of the batch loss; ``each()`` yields the gradient of every text's own loss, one at a time;
    ``weighted(weigh)`` is their sum, each weighted by ``weigh`` of its Euclidean norm, without keeping any of them.
    ``expected`` is the average batch size under Poisson sampling; sums are divided by it, since the true size is private.
    """

    mean: Callable[[], Gradients]
    each: Callable[[], Iterator[Gradients]]
    size: int
    weighted: Weighted
    expected: float | None = None


@dataclass(frozen=True)
class Message:
    """What leaves the client.

    ``gradients`` holds the clear tensors. ``visible`` (bool, same shapes; a missing name means all visible) is false where
    an entry was sealed, or dropped in a way that the receiver can see; the clear tensor holds zeros there. ``sealed`` holds
    ciphertexts. ``kind``: of update; ``"fedsgd"`` is one gradient. ``header``: what the receiver must know about the
    sealing (scheme, which keys, digest of the mask). ``sign``: whether that of the entries is known. A captured file may
    hold a gradient or a change of weights, which goes the other way; ``stated`` if somebody says which.
    """

    gradients: Gradients
    visible: Mapping[str, Tensor] = field(default_factory=dict)
    sealed: Mapping[str, bytes] = field(default_factory=dict)
    kind: str = "fedsgd"
    header: Mapping[str, Parameter] = field(default_factory=dict)
    sign: Literal["known", "stated", "unknown"] = "known"


@dataclass(frozen=True)
class Transcript:
    """The truth of one step, with its secrets. Only ``threat.observe`` and metrics read it."""

    batch: Batch | ImageBatch
    model: torch.nn.Module
    message: Message
    mechanism: tuple[Mechanism, ...]
    loss: float
    task: Task
    vocabulary: Vocabulary
    seconds: float = 0.0
    """Wall-clock seconds of the protections on data and message, without the training itself."""

    @property
    def text_batch(self) -> Batch:
        """The batch of a language model's step. Raises ``TypeError`` for images."""
        if not isinstance(self.batch, Batch):
            raise TypeError("this step was computed on images, not texts")
        return self.batch

    @property
    def image_batch(self) -> ImageBatch:
        """The batch of an image classifier's step. Raises ``TypeError`` for texts."""
        if not isinstance(self.batch, ImageBatch):
            raise TypeError("this step was computed on texts, not images")
        return self.batch


class NotGranted(LookupError):
    """An attack read something that its threat model does not grant, or that it does not declare."""

    of_rasura = True
    """These are Rasura's own words, which name no text: a record shows them."""


class Unproven(ValueError):
    """A guess says of itself what it cannot, such as ``verified`` without a proof."""

    of_rasura = True


class Granted:
    """Reading an ungranted field raises ``NotGranted``; ask ``Grant.X in seen`` first where a grant is optional."""

    granted: Mapping[Grant, Any]

    def __contains__(self, grant: Grant) -> bool:
        return grant in self.granted

    def _get(self, grant: Grant) -> Any:
        if grant not in self.granted:
            raise NotGranted(f"{grant.name} ({grant.value}) is not granted, or not among what the attack needs and uses")
        return self.granted[grant]

    @property
    def mechanism(self) -> tuple[Mechanism, ...]:
        """The protections in use, public parameters only."""
        mechanism: tuple[Mechanism, ...] = self._get(Grant.MECHANISM)
        return mechanism


@dataclass(frozen=True)
class Observation(Granted):
    """What one adversary sees: the message and what is granted; ``claimed`` rests on somebody's word. No Transcript."""

    message: Message
    task: Task
    granted: Mapping[Grant, Any]
    claimed: frozenset[Grant] = frozenset()

    @property
    def gradients(self) -> Gradients:
        """The clear tensors of the message, by parameter name."""
        return self.message.gradients

    @property
    def visible(self) -> Mapping[str, Tensor]:
        """Boolean masks of the visible entries, each with the shape of its gradient; a missing name means that all are
        visible."""
        return self.message.visible

    def whole(self, name: str | None) -> Tensor | None:
        """The clear gradient called ``name``, with the shape of its parameter; None unless all of it is visible."""
        if name is None or name not in self.gradients or (name in self.visible and not bool(self.visible[name].all())):
            return None
        return self.gradients[name]

    @property
    def model(self) -> torch.nn.Module:
        """The adversary's own copy of the trained model, in eval mode, without gradients."""
        model: torch.nn.Module = self._get(Grant.MODEL)
        return model

    @property
    def vocabulary(self) -> Vocabulary:
        """The public tokenizer's vocabulary."""
        vocabulary: Vocabulary = self._get(Grant.BASE_MODEL)
        return vocabulary

    @property
    def labels(self) -> Tensor:
        """Labels of the batch, ``(batch,)``; order as in the batch."""
        labels: Tensor = self._get(Grant.LABELS)
        return labels

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of every text, special tokens included."""
        lengths: tuple[int, ...] = self._get(Grant.LENGTHS)
        return lengths

    @property
    def batch_size(self) -> int:
        """The number of texts in the batch."""
        size: int = self._get(Grant.BATCH_SIZE)
        return size

    @property
    def reference_text(self) -> tuple[str, ...]:
        """Public text of the same kind."""
        text: tuple[str, ...] = self._get(Grant.REFERENCE_TEXT)
        return text

    @property
    def language_model(self) -> tuple[torch.nn.Module, Vocabulary]:
        """A public causal language model, with its vocabulary."""
        model: tuple[torch.nn.Module, Vocabulary] = self._get(Grant.LANGUAGE_MODEL)
        return model


@dataclass(frozen=True)
class Proof:
    """Why a reconstruction is ``verified``. Only ``rasura.attacks.shared.verify`` makes one; ``docs/attacks.md`` defines
    each name.

    It holds the very ``tokens`` and ``labels`` that it proves, the guess's relative ``error``, and ``decoys``: the least
    error, or a lower bound of it, among texts that differ from the guess by little. Raises ``ValueError`` unless the decoys
    are told from the guess.
    """

    name: ProofName
    tokens: tuple[tuple[int, ...], ...]
    error: float
    decoys: float
    labels: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.error < self.decoys:
            raise Unproven(f"a proof needs decoys that fit worse: error {self.error:g}, decoys {self.decoys:g}")


@dataclass(frozen=True)
class Reconstruction:
    """A guess at the private texts or images.

    ``tokens`` holds one id sequence per guessed text, special tokens included where the attack places them and ``UNKNOWN``
    where a position stayed open. ``ordered`` is false for a bag of tokens. ``confidence``: ``verified`` (a ``proof`` says
    so), ``span`` (every token lies in the observed row space, and hardly any other token would), ``matched`` (the best
    result of a search) or ``none``. ``residual`` is the attack's own measure of misfit, smaller is better. ``details`` holds
    plain figures for the record. ``texts`` is filled in by the caller, with the vocabulary.

    A guess at private images has no tokens but ``images``, ``(batch, channels, height, width)`` in ``[0, 1]``.
    Raises ``ValueError`` for ``verified`` without a proof of these tokens, and for a proof of anything else.
    """

    tokens: tuple[tuple[int, ...], ...]
    confidence: Confidence = "none"
    ordered: bool = True
    labels: tuple[int, ...] | None = None
    residual: float | None = None
    details: Mapping[str, Parameter] = field(default_factory=dict)
    texts: tuple[str, ...] = ()
    images: Tensor | None = None
    proof: Proof | None = None

    def __post_init__(self) -> None:
        if (self.confidence == "verified") != (self.proof is not None):
            raise Unproven(f"confidence {self.confidence!r}: verified needs a proof, and no other confidence takes one")
        if self.proof is not None and (self.proof.tokens != self.tokens or not self.ordered):
            raise Unproven("the proof is for other tokens")
