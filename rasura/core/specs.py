"""The description of a method, in one frozen value beside its code.

The registry (``rasura.registry``) collects these values from the package and from installed plug-ins. Names, lists, help
texts, estimates, calibration, the rule for adversaries who know a protection, and the contract laws are derived from them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from rasura.core.errors import InputError
from rasura.core.interfaces import Attack, MembershipAttack, Metric, ServiceAttack, ServiceMetric
from rasura.core.values import Reconstruction, Task

_NAME = "[A-Za-z0-9][A-Za-z0-9_-]*"

CLASSIFIERS: frozenset[Task] = frozenset({"classification"})
TEXT: frozenset[Task] = CLASSIFIERS | {"causal"}
IMAGES: frozenset[Task] = frozenset({"vision"})


@dataclass(frozen=True, kw_only=True)
class MethodSpec:
    """The description of any method.

    ``name`` is what users write, ``about`` is one sentence for lists and help texts, ``source`` the paper with its section,
    or ``Rasura``. Raises ``InputError`` for names that could be read as other methods or as options, and for empty texts.
    """

    NAMES: ClassVar[str] = _NAME + "[+]*"

    name: str
    about: str
    source: str

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not re.fullmatch(self.NAMES, self.name):
            raise InputError(
                f"method name {self.name!r}; expected letters, digits, '-' and '_' only: '+' joins protections, and other "
                "signs begin options"
            )
        for what in ("about", "source"):
            text = getattr(self, what)
            if not isinstance(text, str) or not text.strip() or "\n" in text:
                raise InputError(f"method {self.name}: {what} is {text!r}; expected one line of text")
        for what in ("knows", "known_by", "known_by_on_images"):
            names = getattr(self, what, None)
            # In a text, ``in`` would find a part of another name.
            if names is not None and not (isinstance(names, tuple) and all(isinstance(one, str) for one in names)):
                raise InputError(f"method {self.name}: {what} is {names!r}; expected names in a tuple, such as ('mine',)")


@dataclass(frozen=True)
class Home:
    """A setting in which an attack must return a guess, for the contract laws: model family, task, and protection.

    ``reads``: the attack recovers the whole text there, with certainty.
    """

    family: str = "bert"
    task: Task = "classification"
    defense: str = "none"
    reads: bool = False


WORK: Mapping[str, float] = {"quick": 0.25, "default": 1.0, "paper": 30.0}
"""The factor of each budget level on an attack's cost, where its spec names no other."""


@dataclass(frozen=True, kw_only=True)
class Portfolio:
    """What a portfolio runs, by the names of attacks; used only for estimates.

    ``always``: its attacks on every update. Where nothing is certain it also runs those that know the protection, and ends
    with ``last``, or with ``instead`` if that knows the protection, or with ``causal`` on causal models. ``signs`` reads one
    text of a causal model where its adapters were trained by an optimizer that leaves little but signs.
    """

    always: frozenset[str] = frozenset()
    last: str
    instead: str
    causal: str
    signs: str


@dataclass(frozen=True, kw_only=True)
class AttackSpec(MethodSpec):
    """An attack on an update.

    ``make`` builds it. ``seconds`` is a rough cost in CPU seconds for one text of 11 tokens on MiniLM (or one image), used
    only for estimates: the cost on other models scales with their step. ``once``: what the first text behind a protection
    takes beyond that, where the others use what it learned. ``growth``: beyond that, the power of the number of
    tokens with which the cost grows. ``pairs``: on several texts of a classifier, the product of texts and tokens from which
    the cost grows with that product; 0: it does not. ``causal_seconds``: in place of ``seconds`` on causal models, if it
    does something else there. ``work``: the factor of each budget level. ``portfolio``: what it runs, if it is one.
    ``tasks``: those of the models that it applies to. ``embedding``: it reads only the gradient of the word embedding.
    ``protection``: it reads the protection itself, so it cannot run without one. ``knows``: the protections of other
    packages that it is written for, which name it in ``known_by``.
    """

    make: Callable[[], Attack[Reconstruction]]
    seconds: float
    once: float = 0.0
    causal_seconds: float | None = None
    growth: float = 0.0
    pairs: float = 0.0
    work: Mapping[str, float] = field(default_factory=lambda: WORK)
    portfolio: Portfolio | None = None
    tasks: frozenset[Task] = TEXT
    embedding: bool = False
    protection: bool = False
    knows: tuple[str, ...] = ()
    home: Home = field(default_factory=Home)


@dataclass(frozen=True, kw_only=True)
class Strength:
    """The single number that sets the strength of a protection, and the range in which calibration searches for it.

    ``points``: how many values are tried first, including ``weakest`` and ``strongest``; the values in between are spaced
    geometrically. ``dropped``: the number is the fraction that is dropped, and the rest is spaced geometrically. ``whole``:
    it is a whole number. ``entries``: it is in units of the model's trained entries. ``end``: what is written after it.
    ``keys``: if the number is given as an option, the options that can carry it, the default first.
    """

    name: str
    weakest: float
    strongest: float
    points: int
    dropped: bool = False
    whole: bool = False
    entries: bool = False
    end: str = ""
    keys: tuple[str, ...] = ()

    def positions(self) -> tuple[float, ...]:
        """The positions tried first, from weak (0) to strong (1)."""
        return tuple(k / (self.points - 1) for k in range(self.points))

    def value(self, position: float, entries: int = 1) -> float:
        """The number at ``position``, to two digits."""
        first, last = (1 - self.weakest, 1 - self.strongest) if self.dropped else (self.weakest, self.strongest)
        at: float = first * (last / first) ** position * (entries if self.entries else 1)
        if self.whole:
            return round(at)
        rounded = float(f"{at:.2g}")
        return round(1 - rounded, 12) if self.dropped else rounded


@dataclass(frozen=True, kw_only=True)
class DefenseSpec(MethodSpec):
    """A protection of an update.

    ``make`` builds it: without an argument if ``parameter`` is None, otherwise with an argument of that type; ``str`` means
    options, which may be empty. ``example`` is the protection as users write it, at a setting that has an effect;
    ``neutral`` builds it at a setting without effect, if there is one. ``guarantee``: the formal guarantee, or ``none``.
    ``known_by``: the attacks that know how it works; a run must include all of them before a verdict says that the
    protection stops anything. None means that no attack knows it. Of a protection that is not Rasura's, an attack counts
    only if it names the protection in turn (``knows``). ``known_by_on_images``: the same for images. ``waits``: it acts by
    sending nothing. ``draws``: it is random, so two updates of the same texts differ. ``seconds``: what it takes for a text,
    as an attack's ``seconds``, if that is more than a step.
    """

    NAMES: ClassVar[str] = _NAME

    make: Callable[..., Any]
    example: str
    parameter: type[int] | type[float] | type[str] | None = None
    tasks: frozenset[Task] = TEXT | IMAGES
    guarantee: str = "none"
    known_by: tuple[str, ...] | None = None
    known_by_on_images: tuple[str, ...] | None = None
    strength: Strength | None = None
    neutral: Callable[[], Any] | None = None
    waits: bool = False
    draws: bool = False
    seconds: float = 0.0


@dataclass(frozen=True, kw_only=True)
class MetricSpec(MethodSpec):
    """A metric of recovered texts or images.

    ``make`` builds it; if ``encoder`` is set, from a function that embeds texts, which the registry makes from the model
    given after the name (``sentence_cosine:FOLDER``). ``usual``: an audit computes it by default.
    """

    make: Callable[..., Metric[Reconstruction]]
    tasks: frozenset[Task] = TEXT
    encoder: bool = False
    usual: bool = True


@dataclass(frozen=True, kw_only=True)
class UpdateSpec(MethodSpec):
    """A kind of update: what a client sends.

    ``make`` builds it from the figures after the name, as text: at least ``needed`` and at most ``figures`` of them.
    """

    NAMES: ClassVar[str] = _NAME

    make: Callable[..., Any]
    figures: int = 0
    needed: int = 0
    example: str


@dataclass(frozen=True, kw_only=True)
class MembershipSpec(MethodSpec):
    """An attack on a trained model, which infers whether the model was trained on an example.

    ``tasks``: the tasks that it works on; ``usual``: those on which it runs by default.
    """

    make: Callable[[], MembershipAttack]
    tasks: frozenset[Task] = TEXT
    usual: frozenset[Task] = TEXT


@dataclass(frozen=True, kw_only=True)
class ServiceAttackSpec(MethodSpec):
    """An attack by a service's operator.

    ``home``: a protection and a model family for which it must return a guess. ``protection`` and ``knows``: as those of
    ``AttackSpec``.
    """

    make: Callable[[], ServiceAttack]
    home: tuple[str, str] = ("obfuslm:k=4", "bert")
    protection: bool = False
    knows: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class ServiceMetricSpec(MethodSpec):
    """A metric of what was read of the texts that a service was sent."""

    make: Callable[[], ServiceMetric]


@dataclass(frozen=True, kw_only=True)
class ServiceProtectionSpec(MethodSpec):
    """A protection of a model service. ``make`` takes the model, its vocabulary, and options by name.

    ``example``: the protection as users write it, at a setting that has an effect. ``known_by``: the attacks that know how
    it works, as in ``DefenseSpec``. ``known_by_with``: for an option, the attacks that replace them when that option is set.
    ``files``: the options that name a file to read, where they differ from their default.
    """

    NAMES: ClassVar[str] = _NAME + "[+]?"

    make: Callable[..., Any]
    example: str
    known_by: tuple[str, ...] | None = None
    known_by_with: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    files: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class ModelSpec(MethodSpec):
    """An adapter for a model family whose parts are not found by structure.

    ``name`` is the model's ``config.model_type``; ``make`` takes the model and returns its ``Parts``.
    """

    make: Callable[..., Any]
