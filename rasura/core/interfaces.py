"""The interfaces of attacks, defenses (transforms), metrics and priors, and the errors they raise."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, Literal, Protocol, TypeVar, runtime_checkable

from torch import Generator, Tensor, nn

from rasura.core.answers import Membership, ModelObservation, ServiceObservation, ServiceTranscript, TokenReading
from rasura.core.errors import AttackFailed, InputError, MissingExtra, NotApplicable, NotSent, Unavailable
from rasura.core.rng import Randomness
from rasura.core.values import OWN, Grant, Mechanism, Observation, Stage, Task, Transcript, Vocabulary

__all__ = [
    "ActiveAttack", "Attack", "AttackFailed", "Budget", "Defense", "InputError", "MembershipAttack", "Metric",
    "MissingExtra", "ModelService", "NotApplicable", "NotSent", "Prior", "ServiceAttack", "ServiceMetric", "Transform",
    "Unavailable", "check_sealed_last", "made",
]  # fmt: skip

G_co = TypeVar("G_co", covariant=True)
G_contra = TypeVar("G_contra", contravariant=True)
X = TypeVar("X")
Y = TypeVar("Y")
S = TypeVar("S")


@dataclass(frozen=True)
class Budget:
    """How much work an attack may do, in units of work rather than seconds, so that the same seed gives the same result.

    ``quick`` is for tests and first looks, ``default`` for audits, ``paper`` spends what the papers spend.
    """

    level: Literal["quick", "default", "paper"] = "default"
    memory_mb: int = 4096
    """Memory that an attack may use beside the model and the update, in MiB. Attacks that can do so work in smaller parts to
    stay within it; others take what they need."""
    entries: float | None = None
    """Fraction of the visible entries, drawn at random, on which a matching attack evaluates L1 and masks; None: set by the
    level."""
    device: str = "cpu"
    """Where an attack that is mostly steps of the model may take them: the CPU or a CUDA GPU. What it is given, and what it
    returns, is on the CPU."""


def attacking_device(device: str) -> str:
    """``device`` of a ``Budget`` where a client takes its steps on ``device``: a CUDA GPU, otherwise the CPU."""
    return device if device.startswith("cuda") else "cpu"


class Adversary(Protocol):
    """What every attack declares: its name, the grants that it requires, and those that help."""

    @property
    def name(self) -> str:
        """The name by which plans and Records know it."""
        ...

    @property
    def needs(self) -> frozenset[Grant]:
        """The grants without which it is not applicable."""
        ...

    @property
    def uses(self) -> frozenset[Grant]:
        """Further grants that it reads where it has them."""
        ...


@runtime_checkable
class Attack(Adversary, Protocol[G_co]):
    """Makes a guess from an observation. ``needs`` must be granted; ``uses`` helps if granted. Nothing else may be read.

    Raises ``NotApplicable`` (cannot be tried here) or ``AttackFailed`` (tried, found nothing).
    """

    def __call__(self, seen: Observation, *, rng: Generator, budget: Budget) -> G_co:
        """The guess, with every random choice drawn from ``rng`` and the work bounded by ``budget``."""
        ...


@runtime_checkable
class ActiveAttack(Attack[G_co], Protocol[G_co]):
    """An attack whose adversary first sends crafted weights, then reads the update on them as other attacks do.

    ``craft`` returns a new model with the parameters' names and shapes of ``model``, which is left as it is. Whatever it
    needs later, it reads from the model that is granted then. Raises ``NotApplicable`` for models that it cannot craft.
    """

    def craft(self, model: nn.Module, task: Task, *, rng: Generator) -> nn.Module:
        """The model to send in place of ``model``, which is left as it is."""
        ...


@runtime_checkable
class MembershipAttack(Adversary, Protocol):
    """As ``Attack``, on a trained model instead of an update: one score per candidate; higher scores mean likelier
    members."""

    def __call__(self, seen: ModelObservation, *, rng: Generator) -> Membership:
        """One score for each candidate of ``seen``, in their order."""
        ...


@dataclass(frozen=True)
class Transform(Generic[X, Y, S]):
    """One protection, as two pure functions.

    ``stage`` fixes ``X`` and ``Y``: DATA ``Batch -> Batch``, MODEL ``Module -> Module`` (the same one, changed in place;
    ``undo`` then restores it), AGGREGATE ``PerExample -> Gradients``, WIRE ``Message -> Message``. ``init`` makes the state
    from the model (DATA: from the pair of model and vocabulary; WIRE: from the model and the inputs of the step);
    ``apply(x, state, rng)`` returns the result and the next state. ``undo`` is for the authorised receiver.
    """

    stage: Stage
    mechanism: Mechanism
    init: Callable[[Any], S]
    apply: Callable[[X, S, Randomness], tuple[Y, S]]
    undo: Callable[[Y, S], X] | None = None
    _ours: ClassVar[bool] = False

    @property
    def counted(self) -> Mechanism:
        """The mechanism that a guarantee counts: ``mechanism`` where Rasura made this transform, and it is unchanged.

        Any other transform may do anything, whatever its mechanism says. It counts as ``own-NAME``, for which nothing is
        proven.
        """
        known = self.mechanism
        if self._ours:
            return known
        return Mechanism(f"{OWN}{known.name.removeprefix(OWN)}", known.stage, known.parameters)


def made(
    stage: Stage,
    mechanism: Mechanism,
    init: Callable[[Any], S],
    apply: Callable[[X, S, Randomness], tuple[Y, S]],
    undo: Callable[[Y, S], X] | None = None,
) -> Transform[X, Y, S]:
    """A transform of Rasura itself: only for functions that do what ``mechanism`` says, since a guarantee rests on it.

    The mark belongs to this object: ``dataclasses.replace`` returns a transform without it.
    """
    found = Transform(stage, mechanism, init, apply, undo)
    object.__setattr__(found, "_ours", True)
    return found


Defense = tuple[Transform[Any, Any, Any], ...]
"""Transforms in the order in which they act; make one with ``rasura.defenses.compose.chain``."""


def check_sealed_last(parts: Sequence[Transform[Any, Any, Any]]) -> None:
    """Raise ``InputError`` where a part stands behind ``sealing``: what is sealed by then stays as it is, so noise would be
    named and be missing in it. A second ``sealing`` would replace the first one's ciphertexts by those of zeros."""
    names = [one.mechanism.name for one in parts]
    if names.count("sealing") > 1:
        raise InputError("the defense seals twice, and the second would lose what the first sealed; remove one of the parts")
    behind = names[names.index("sealing") + 1 :] if "sealing" in names else []
    if behind:
        raise InputError(
            f"{', '.join(behind)} behind sealing would change no entry that is sealed; write sealing last, as in "
            "gaussian:1.0+sealing:all/by=bfv"
        )


@runtime_checkable
class Metric(Protocol[G_contra]):
    """Compares a guess with the truth: one value for every text of the batch.

    ``bounds``: the smallest and the largest possible value, from which an interval of the mean is computed; None without
    such a range, and then no interval is given. Raises ``Unavailable`` if this machine lacks something that the metric
    needs.
    """

    @property
    def name(self) -> str:
        """The metric's name in plans and Records."""
        ...

    @property
    def unit(self) -> str:
        """The unit of its values, as reports print it."""
        ...

    @property
    def higher_is(self) -> Literal["worse", "better"]:
        """Whether a higher value is better or worse for the person whose text it is."""
        ...

    @property
    def bounds(self) -> tuple[float, float] | None:
        """The smallest and the largest possible value, in its unit; None without such a range."""
        ...

    def __call__(self, guess: G_contra, truth: Transcript) -> Sequence[float]:
        """One value in ``unit`` for each text of ``truth``, in their order."""
        ...


class ModelService(Protocol):
    """A model service under a protection: what is ``public``, what is ``served``, and what a client sends it."""

    @property
    def public(self) -> nn.Module:
        """The model that everyone knows, as it was before the protection."""
        ...

    @property
    def served(self) -> nn.Module:
        """The model that the service runs."""
        ...

    @property
    def uploaded(self) -> nn.Module | None:
        """``served`` as it was before the service trained it; None if it did not."""
        ...

    @property
    def vocabulary(self) -> Vocabulary:
        """The client's vocabulary, in its own ids."""
        ...

    @property
    def mechanism(self) -> Mechanism:
        """What is public of the protection."""
        ...

    @property
    def tokens(self) -> Tensor:
        """The id of each token of the client at the service: ``(vocabulary,)`` int64."""
        ...

    @property
    def draws(self) -> bool:
        """Whether the client sends tokens in place of others, drawn again for each text."""
        ...

    def sent(self, texts: Sequence[Sequence[int]], rng: Randomness | None = None) -> tuple[tuple[int, ...], ...]:
        """The ids that the client sends for ``texts``, which are in its own ids."""
        ...

    def states(self, texts: Sequence[Sequence[int]], rng: Randomness) -> tuple[Tensor, ...] | None:
        """The states ``(length, hidden)`` that the client sends in place of ids; None where ids are sent."""
        ...


@runtime_checkable
class ServiceAttack(Protocol):
    """Makes a guess at what clients sent to a service. Raises as an ``Attack`` does."""

    @property
    def name(self) -> str:
        """The name by which plans and Records know it."""
        ...

    def __call__(self, seen: ServiceObservation, *, rng: Generator, budget: Budget) -> TokenReading:
        """The tokens that it takes the texts of ``seen`` to hold."""
        ...


@runtime_checkable
class ServiceMetric(Protocol):
    """Scores such a guess: a value in ``[0, 1]`` for every text, or None if it cannot be scored (the order of a bag of
    words)."""

    @property
    def name(self) -> str:
        """The name by which plans and Records know it."""
        ...

    def __call__(self, guess: TokenReading, truth: ServiceTranscript) -> Sequence[float] | None:
        """One value in ``[0, 1]`` for each text of ``truth``, in their order; None where it cannot be judged so."""
        ...


class Prior(Protocol):
    """The adversary's knowledge of the language."""

    def log_probability(self, ids: Sequence[int]) -> float:
        """Natural log of the probability of ``ids``, in nats."""
        ...
