"""What will go wrong in a private training, said before its first step: the clip, the noise, the rate, the layers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor, nn

from rasura.accounting import Run, formal, sigma_for
from rasura.core.batches import places_of_each
from rasura.core.errors import InputError
from rasura.core.interfaces import Defense
from rasura.core.rng import drawing, secret_generator
from rasura.core.values import Mechanism, Stage
from rasura.runs.loop_checks import loop_defense
from rasura.runs.noise_target import SAMPLED, solved
from rasura.victims.per_example import fault, per_example
from rasura.victims.step import defended, gradients
from rasura.victims.trial_texts import check_taken

FAR = 10.0
"""A clip that is so many times below or above the median norm is said to be wrong."""

ENOUGH = 3.0
"""The ratio of signal to noise after all steps below which little is learned: a head learned nothing at 1.1 and little at
1.8 (``benchmarks/README.md``)."""

PLAIN = {"noise": "gaussian", "quantile": None, "per": None}
"""The options of ``dp-sgd`` whose clips and noise a diagnosis knows."""

PRIVATE = (
    "These {m} texts were looked at without noise, and no epsilon counts it. Use public texts of the same kind, or choose "
    "no setting by what is said here."
)


@dataclass(frozen=True)
class Diagnosis:
    """What a look at a few texts says of a planned training.

    ``findings``: what will go wrong, in sentences; empty if nothing was found. ``norms``: the norm of each text's gradient.
    ``signal_to_noise``: the length of what the texts of one step agree on, over the length of the noise, both expected; None
    where it cannot be estimated. ``after``: the same after all steps, if the texts agreed on one direction throughout;
    ``least``: the lower end of its 95 % interval over texts, 0 where it may be nothing.
    """

    findings: tuple[str, ...]
    norms: tuple[float, ...]
    clip: float
    sigma: float
    steps: int
    trained: int
    signal_to_noise: float | None
    after: float | None
    least: float | None = None


def diagnose_training(
    model: nn.Module,
    batch: Mapping[str, Tensor],
    defense: str | Defense,
    *,
    examples: int,
    batch_size: int,
    public: bool,
    epochs: int = 1,
    delta: float | None = None,
    target_epsilon: float | None = None,
    optimizer: torch.optim.Optimizer | None = None,
) -> Diagnosis:
    """Look at a few texts, and say what will go wrong in a training under ``dp-sgd`` or ``normalised``.

    ``batch``: the model's keyword arguments for some texts, with labels; two different ones at least, and better thirty.
    Each counts once. ``public``: they are not private; looking at private texts spends privacy that no ledger counts, and
    the findings say so. ``examples``, ``batch_size``, ``epochs``, ``delta`` and ``target_epsilon`` describe the planned
    training as in ``rasura.protect_training``. ``optimizer``: for findings on its rate.

    The signal is estimated from products of different texts' clipped gradients, with a jackknife interval; its lower end is
    what the findings go by. It holds for the model as it is now: later it is mostly smaller. Raises ``InputError`` for other
    protections, also beside these, for ``dp-sgd`` with Laplace noise or other clips (``quantile``, ``per``), for fewer than
    two texts, for a batch without labels, for a model without trained weights, and as ``protect_training`` does.
    """
    run = Run(examples, batch_size, epochs, delta)
    if target_epsilon is not None:
        defense = solved(defense, target_epsilon, run)
    parts = loop_defense(defense)
    carrier = formal([p.counted for p in parts])
    if carrier is None or carrier.name not in SAMPLED:
        names = " + ".join(p.counted.name for p in parts) or "no protection"
        raise InputError(f"a diagnosis needs {' or '.join(SAMPLED)} with a guarantee; found {names}")
    other = [f"{name}={carrier.parameters[name]}" for name, usual in PLAIN.items() if carrier.parameters.get(name) != usual]
    if carrier.name == "dp-sgd" and other:
        raise InputError(
            "a diagnosis knows one clip for the length of a whole gradient, and Gaussian noise; "
            f"leave {' and '.join(other)} out of what is diagnosed"
        )
    beside = [p.mechanism.name for p in parts if p.mechanism is not carrier and p.mechanism.stage is not Stage.MODEL]
    if beside:
        raise InputError(
            f"a diagnosis knows {carrier.name} alone; leave out {' and '.join(beside)}, which change a step too"
        )
    batch, size = _different(batch)
    if size < 2:
        raise InputError(f"{size} different texts; expected at least two, and better thirty")
    with defended(model, parts):
        found = _looked(model, batch, size, carrier)
        slow = _of_speed(model, batch)
    times = min(run.batch_size, run.examples) / (found.sigma * found.clip * math.sqrt(found.trained))
    once = None if found.signal is None else times * found.signal
    after, least = (None if s is None else times * s * math.sqrt(run.steps) for s in (found.signal, found.least))
    findings = [] if public else [PRIVATE.format(m=size)]
    findings += _of_norms(found, carrier, optimizer) + _of_noise(found, run, after, least or 0.0, target_epsilon)
    findings += _of_one_class(batch) + slow
    if run.fails >= 1 / examples:
        findings.append(f"Delta {run.fails:.3g} is not below 1 / {examples}: publishing one text in full would satisfy it.")
    return Diagnosis(tuple(findings), found.norms, found.clip, found.sigma, run.steps, found.trained, once, after, least)


def _different(batch: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], int]:
    """``batch`` with each text once, and how many these are: copies would count as texts that agree."""
    size = len(next(iter(batch.values())))
    rows = [tuple(tuple(t[k].flatten().tolist()) for t in batch.values() if len(t) == size) for k in range(size)]
    kept = places_of_each(rows)
    return {name: t[kept] if len(t) == size else t for name, t in batch.items()}, len(kept)


def _of_speed(model: nn.Module, batch: Mapping[str, Tensor]) -> list[str]:
    why = fault(model, batch)
    return [] if why is None else [f"The texts of a batch go one by one, which is slow: {why}."]


def _of_one_class(batch: Mapping[str, Tensor]) -> list[str]:
    """What is to be said where every text has the same label; nothing for a causal model, which has one a token."""
    labels = batch.get("labels")
    if labels is None or labels.dim() != 1 or len(set(labels.tolist())) > 1:
        return []
    return [f"All {len(labels)} texts have one class, so what they agree on may be that class alone, which says nothing of "
            "telling classes apart. Look at texts of every class."]  # fmt: skip


@dataclass(frozen=True)
class _Look:
    """The gradients of some texts: norms, trained entries, and the length of the mean clipped gradient (None: not known)
    with the lower end of its interval; beside the clip and the noise multiplier of the protection."""

    norms: tuple[float, ...]
    clip: float
    sigma: float
    trained: int
    signal: float | None
    least: float | None


def _looked(model: nn.Module, batch: Mapping[str, Tensor], size: int, carrier: Mechanism) -> _Look:
    if not any(p.requires_grad for p in model.parameters()):
        raise InputError("the model has no trainable parameter; expected at least one with requires_grad")
    rng = secret_generator()
    with drawing(rng):
        check_taken(model, batch)
        each = per_example(model, batch, size, mean=lambda: gradients(model, batch)[0], told=lambda loss: None).each
        clip = float(carrier.parameters["clip"] or 0)
        norms: list[float] = []
        weights: list[float] = []
        total: dict[str, Tensor] = {}
        trained = 0
        for found in each():
            norm = math.sqrt(sum(float(g.double().square().sum()) for g in found.values()))
            trained = sum(g.numel() for g in found.values())
            norms.append(norm)
            weights.append(1.0 if not norm else clip / norm if carrier.name == "normalised" else min(1.0, clip / norm))
            for name, g in found.items():
                part = weights[-1] * g.double()
                total[name] = total[name] + part if name in total else part
        whole = sum(float(g.square().sum()) for g in total.values())
        shares = [w * sum(float((g.double() * total[n]).sum()) for n, g in f.items()) for w, f in zip(weights, each())]
    squares = [(w * n) ** 2 for w, n in zip(weights, norms)]
    # The square of the mean is that of the sum without each text's product with itself, which is no agreement.
    square = (whole - sum(squares)) / (size * (size - 1))
    sigma = float(carrier.parameters["sigma"] or 0)
    if not square > 0:
        return _Look(tuple(norms), clip, sigma, trained, None, None)
    least = square - _margin(whole, squares, shares)
    return _Look(tuple(norms), clip, sigma, trained, math.sqrt(square), math.sqrt(max(0.0, least)))


def _margin(whole: float, squares: Sequence[float], shares: Sequence[float]) -> float:
    """How far the squared signal may lie below its estimate, by the jackknife over texts; infinite for two texts.

    ``whole``: the square of the sum of the texts' gradients, ``squares``: those of each, ``shares``: their products with the
    sum.
    """
    from scipy.stats import t

    m = len(squares)
    if m < 3:
        return math.inf
    without = [
        (whole - 2 * share + square - (sum(squares) - square)) / ((m - 1) * (m - 2))
        for square, share in zip(squares, shares)
    ]
    mean = sum(without) / m
    return float(t.ppf(0.975, m - 1)) * math.sqrt((m - 1) / m * sum((one - mean) ** 2 for one in without))


def _of_norms(found: _Look, carrier: Mechanism, optimizer: torch.optim.Optimizer | None) -> list[str]:
    broken = sum(not math.isfinite(n) for n in found.norms)
    if broken:
        return [f"The gradients of {broken} of {len(found.norms)} texts are not finite: no step could be released. Train in "
                "float32, or start from other weights."]  # fmt: skip
    middle, out = median(found.norms), []
    if not middle:
        return ["At least half of the texts have a gradient of zero: their loss does not depend on what is trained. A "
                "causal model predicts nothing in a text of one token."]  # fmt: skip
    if carrier.name == "dp-sgd" and found.clip < middle / FAR:
        out.append(f"The clip {found.clip:g} is {middle / found.clip:.0f} times below the median norm of a text's gradient "
            f"({middle:.3g}): texts that are already right push nearly as hard as those that are wrong.")  # fmt: skip
    if carrier.name == "dp-sgd" and found.clip > FAR * middle:
        out.append(f"The clip {found.clip:g} is {found.clip / middle:.0f} times above the median norm of a text's gradient "
            f"({middle:.3g}), and the noise grows with it. Clip near the median.")  # fmt: skip
    if optimizer is None:
        return out
    rate, kind = optimizer.param_groups[0]["lr"], type(optimizer).__name__
    if kind == "SGD":
        if found.clip < middle / 2:
            out.append(f"With SGD, a step is about {middle / found.clip:.0f} times shorter than without clipping: a rate of "
                f"{rate:g} from a training without privacy is too low by that factor.")  # fmt: skip
    elif not kind.startswith(("Adam", "NAdam", "RAdam")):
        out.append(f"The rate of {kind} was not judged; SGD and Adam are known.")
    return out


def _of_noise(found: _Look, run: Run, after: float | None, least: float, target: float | None) -> list[str]:
    count = len(found.norms)
    if not all(map(math.isfinite, found.norms)):
        return []
    if after is None:
        return [f"The {count} texts agree on no direction, so nothing can be said of signal and noise. Look at more texts."]
    if least >= ENOUGH:
        return []
    seen = f"After all {run.steps} steps, what the texts agree on is {after:.2g} times as long as the noise"
    below = f"below {ENOUGH:g} expect to learn little."
    if after >= ENOUGH:
        return [f"{seen}, but these {count} texts do not exclude {least:.2g}; {below} Look at more texts."]
    says = f"{seen}; {below} Train fewer weights than {found.trained}, or"
    batch = min(4 * run.batch_size, run.examples)
    if target is not None and batch > run.batch_size:
        wide = Run(run.examples, batch, run.epochs, run.delta)
        less = found.sigma / sigma_for(target, wide.rate, wide.steps, wide.fails)
        gain = batch / run.batch_size * less * math.sqrt(wide.steps / run.steps)
        if gain > 1.05:
            return [
                f"{says} take batches of {batch}: they would make the ratio {gain:.1f} times better at the same epsilon."
            ]
    if target is not None:  # larger batches help little, and more epochs need more noise
        return [f"{says} accept a larger epsilon."]
    return [f"{says} take {'larger batches, ' * (batch > run.batch_size)}more epochs or less noise."]
