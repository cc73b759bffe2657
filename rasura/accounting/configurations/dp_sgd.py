"""DP-SGD as configured for Opacus, this package and loops of one's own: single examples are protected.

Neighbours differ in one example, added or removed. A client, or another group of examples, has no guarantee of its own.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

from rasura.accounting.compositions import POISSON
from rasura.accounting.configurations.drafts import ADDED, LEFT_OUT, Draft
from rasura.accounting.configurations.facts import Unknown, Unread, positive
from rasura.accounting.epsilon import sigma_for
from rasura.accounting.gaussian import gaussian_epsilon, sampled_epsilon
from rasura.accounting.guarantees import Run, guarantee
from rasura.core.values import Mechanism, Stage

OURS = (
    "model", "optimizer", "loader", "defense", "epochs", "max_steps", "delta", "physical_batch_size", "poisson", "seed",
    "args", "data_collator", "train_dataset", "eval_dataset", "processing_class", "compute_metrics", "callbacks",
    "optimizers", "optimizer_cls_and_kwargs", "preprocess_logits_for_metrics",
)  # fmt: skip
OWN = (
    "clip", "clip_of", "layers", "noise_multiplier", "noise_std", "noise_on", "mean_over", "noise_seed",
    "counted_steps", "accounted_as", "delta",
)  # fmt: skip
NO_CLIENT = "DP-SGD protects single examples; nothing is proven for all examples of one client together"


def own_loop(draft: Draft) -> None:
    """A loop of one's own, described by ``clip``, ``clip_of`` (example, layer, batch) and the noise.

    The noise is ``noise_multiplier`` times the clip on the sum, or has the deviation ``noise_std`` on the sum or mean
    (``noise_on``; ``mean_over``: what the mean divides by). A clip of each of ``layers`` layers bounds an example by
    sqrt(layers) clips. A clip of a whole batch bounds what one example can change by twice the clip, whatever its size.
    """
    if draft.value("clip") is None:
        draft.hazard("no-clip", "no clip is given: one example can change the sum by any amount")
        raise Unknown("without clipping there is no guarantee")
    clip, of = draft.clip("clip"), draft.value("clip_of", "example")
    rate, in_epoch = loader(draft)
    size = draft.fact("batch_size")
    _check_divisor(draft)
    if draft.value("noise_std") is not None and draft.value("noise_multiplier") is not None:
        raise Unknown("noise_multiplier and noise_std are both given; which of them is the noise is not known")
    if draft.value("noise_std") is not None:
        on = draft.value("noise_on")
        if on not in ("sum", "mean"):
            raise Unknown(f"noise_on is {on!r}: whether noise_std is that of the sum or of the mean is not known")
        deviation = draft.noise("noise_std") * (_least_divisor(draft, size) if on == "mean" and of != "batch" else 1)
    elif draft.value("noise_multiplier") is not None:
        deviation = draft.noise("noise_multiplier") * clip
        if draft.value("mean_over") is None and draft.facts.sampling == "poisson":
            draft.assumptions.append("no sum is divided by the number of examples that were drawn")
    else:
        draft.hazard("no-noise", "neither noise_multiplier nor noise_std is given")
        raise Unknown("without noise there is no guarantee")
    draft.secret_noise("noise_seed")
    reach = {"example": clip, "batch": 2 * clip}.get(str(of))
    if of == "layer":
        reach = clip * math.sqrt(draft.count("layers"))
        if draft.value("noise_std") is None:
            draft.hazard("clip-of-layer", f"one example reaches {reach:.4g}, but the noise fits {clip:g}")
    if of == "batch":
        draft.hazard("clip-of-batch", f"a whole batch is clipped: one example can change it by {2 * clip:g}")
    if reach is None:
        raise Unknown(f"clip_of is {of!r}; example, layer and batch are known")
    if draft.facts.sampling is None:
        raise Unknown("how batches are drawn is not known; pass --sampling poisson, shuffled or fixed")
    counted = draft.value("counted_steps")
    steps = steps_made(draft, rate, in_epoch, draft.facts.sampling == "poisson")
    if counted is not None and draft.count("counted_steps") < steps.made:
        draft.hazard("steps", f"{counted} steps were counted, but {steps.made} are made")
    delta, multiplier = draft.delta("example"), deviation / reach
    readings = {
        "takes the multiplier for a deviation": multiplier / clip,
        "takes noise on the sum for noise on the mean": multiplier * size,
    }
    expected = str(draft.value("accounted_as", draft.facts.sampling))
    if expected != draft.facts.sampling:
        draft.hazard("sampling", f"the accounting assumes {expected} batches, but they are {draft.facts.sampling}")
    accounted(draft, multiplier, steps, delta, readings, assumed=False)


def _check_divisor(draft: Draft) -> None:
    """Raises ``Unknown`` for a mean over something unknown, and over a number of examples that is drawn, however its noise
    is given."""
    over = draft.value("mean_over")
    if over not in (None, "batch_size", "batch"):
        raise Unknown(f"mean_over is {over!r}; batch_size and batch (the examples that are in it) are known")
    if over == "batch" and draft.facts.sampling == "poisson":
        raise Unknown(
            "the mean divides by the number of examples that were drawn, which one example changes as well: nothing is "
            "proven for it; divide by batch_size"
        )


def _least_divisor(draft: Draft, size: int) -> int:
    """The least number that a mean divides by: ``mean_over`` batch_size, or the examples of the batch, of which a last batch
    may have fewer. Raises ``Unknown`` where batches differ in size and that is not given."""
    over, poisson = draft.value("mean_over"), draft.facts.sampling == "poisson"
    last = draft.fact("examples") % size
    if over == "batch_size" or (not poisson and (draft.facts.drop_last or not last)):
        return size
    if over is None:
        raise Unknown(
            "mean_over is not given: batches differ in size, and it is not known whether their means divide by batch_size "
            "or by the number of examples in the batch"
        )
    draft.notes.append(f"the last batch has {last} of {size} examples, and its mean less noise; this is counted")
    return last


def ours(draft: Draft) -> None:
    """``rasura.protect_training`` and ``rasura.PrivateTrainer``, with ``dp-sgd:S`` or ``normalised:S`` as defense."""
    defense = draft.value("defense")
    form = re.fullmatch(r"(dp-sgd|normalised):([\d.eE+-]+)((?:/\w+=[\w.+-]+)*)", str(defense))
    if form is None or form.group(1) not in POISSON:
        raise Unknown(f"defense {defense!r}: dp-sgd:S and normalised:S are checked here; see rasura account for others")
    options = dict(one.split("=", 1) for one in form.group(3).split("/")[1:])
    if set(options) - {"clip", "noise"} or (noise := options.get("noise", "gaussian")) not in ("gaussian", "laplace"):
        raise Unknown(f"defense {defense!r} has options that are not known here")
    try:
        multiplier = float(form.group(2))
    except ValueError:
        multiplier = 0.0
    if not positive(multiplier):
        raise Unknown(f"the noise of {defense!r} is not a number above 0")
    draft.secret_noise("seed")
    if draft.value("poisson", True) is not True:
        rate, in_epoch = loader(draft)
        steps = steps_made(draft, rate, in_epoch, poisson=False)
        accounted(draft, multiplier, steps, draft.delta("example", draft.value("delta")), noise=noise)
        return
    settings: dict[str, float | str] = {"sigma": multiplier, "clip": float(options.get("clip", 1)), "noise": noise}
    run = _our_run(draft)
    found = guarantee((Mechanism(form.group(1), Stage.AGGREGATE, settings),), run)
    if found.epsilon is None or found.delta != run.fails:
        raise Unknown(found.statement)
    told(draft, found.epsilon, run.fails, ADDED, (multiplier, 1.0) if noise == "gaussian" else None)


def _our_run(draft: Draft) -> Run:
    """The plan of a training of this package, whose loader draws each example at batch size over examples."""
    draft.facts = replace(draft.facts, drop_last=False)  # each pass has the steps for all examples
    rate, in_epoch = loader(draft)
    steps = steps_made(draft, rate, in_epoch, poisson=True)
    most = draft.count("max_steps") * draft.facts.rounds_made if draft.value("max_steps") is not None else steps.made
    delta = draft.delta("example", draft.value("delta"))
    return Run(draft.fact("examples"), draft.fact("batch_size"), steps.passes, delta, max_steps=min(most, steps.made))


def loader(draft: Draft, *, by_length: bool = False) -> tuple[float, int]:
    """The rate of Poisson sampling, and the steps of an epoch, which are the length of a PyTorch loader.

    A batch has ``batch_size`` examples on average. Some loops draw at one over the length of their loader, which is a higher
    rate where the last batch is left out: then it counts. ``by_length``: the rate is one over the length in any case, as
    that of Opacus, which may be lower.
    """
    examples, size = draft.fact("examples"), draft.fact("batch_size")
    if size > examples:
        raise Unknown(f"batch_size {size} is above the number of examples, {examples}")
    steps = examples // size if draft.facts.drop_last else math.ceil(examples / size)
    return 1 / steps if by_length else max(size / examples, 1 / steps), steps


def sought(target: float, rate: float, steps: int, delta: float) -> float:
    """The least noise multiplier that an accountant chooses so that ``steps`` releases spend at most ``target``.

    A thousandth below the one that is found here to a thousandth: two accountants round in their own ways.
    """
    return sigma_for(target, rate, steps, delta) / 1.001


def passes_made(draft: Draft) -> int:
    """Passes over the examples: those of a round times the rounds."""
    epochs, given = draft.facts.epochs, draft.call.arguments.get("epochs")
    if not isinstance(given, Unread | None):
        planned = draft.count("epochs")
        if epochs is not None and epochs < planned:
            raise Unknown(f"epochs is {planned} in {draft.call.name}, and {epochs} elsewhere: they contradict each other")
        epochs = epochs or planned
    if epochs is None:
        epochs = draft.fact("epochs")
    return epochs * draft.facts.rounds_made


class Steps(NamedTuple):
    """``made`` steps in ``passes`` passes over the examples; with Poisson sampling, each example at ``rate``."""

    rate: float
    made: int
    passes: int
    poisson: bool


def steps_made(draft: Draft, rate: float, in_epoch: int, poisson: bool) -> Steps:
    """The steps of all passes and rounds. Where the facts give the steps of a round as well, the larger number counts."""
    facts, given = draft.facts, draft.call.arguments.get("epochs")
    rounds = facts.rounds_made
    if facts.steps is None:
        passes = _looped(draft, passes_made(draft), rounds)
        return Steps(rate, passes * in_epoch, passes, poisson)
    # A round begins a pass of its own, so that an example may be in one batch of each, however few steps it has.
    made, passes = facts.steps * rounds, math.ceil(facts.steps / in_epoch) * rounds
    if facts.epochs is not None or given is not None:
        planned = passes_made(draft)
        made, passes = max(made, planned * in_epoch), max(passes, planned)
    return Steps(rate, made, passes, poisson)


def _looped(draft: Draft, passes: int, rounds: int) -> int:
    """``passes``, or those that the loops of the program make, if they are more."""
    shown = draft.call.extra.get("passes")
    if not isinstance(shown, int):
        if draft.call.extra.get("program"):
            draft.assumptions.append(f"the training makes {passes} passes over the loader, with one step for each batch")
        return passes
    if shown * rounds != passes:
        says = f"{passes} passes are stated, but the loops of the program make {shown * rounds}"
        if shown * rounds < passes:
            draft.notes.append(f"{says}; the larger number is counted")
        else:
            draft.hazard("steps", says)
    return max(passes, shown * rounds)


def accounted(
    draft: Draft, multiplier: float, steps: Steps, delta: float, readings: Mapping[str, float] | None = None,
    noise: str = "gaussian", *, assumed: bool = True, known: float = math.inf,
) -> None:  # fmt: skip
    """Record the figures of ``steps`` with noise of ``multiplier`` times what one example can reach.

    Without Poisson sampling an example is in one batch of each pass (shuffled), or in every step as far as is known (fixed).
    Then it is left out, with its place in the batch. ``assumed``: the framework accounts all batches as Poisson sampled.
    ``known``: an epsilon that holds in any case, since the noise was chosen for it.
    """
    if not steps.poisson and assumed:
        draft.hazard("sampling", "batches are not drawn by Poisson sampling, which the framework's accountant assumes")
    if noise == "laplace" and not steps.poisson:
        raise Unknown("Laplace noise without Poisson sampling is not counted here")
    if not steps.poisson and draft.facts.sampling is None:
        raise Unknown("how batches are drawn is not known; pass --sampling shuffled or fixed")
    releases = steps.passes if draft.facts.sampling == "shuffled" else steps.made

    def spent(sigma: float) -> float:
        if steps.poisson:
            return sampled_epsilon(sigma, steps.rate, steps.made, delta)
        return gaussian_epsilon(math.sqrt(releases) / sigma, delta)

    draft.confused(spent, multiplier, readings or {})
    told(draft, min(spent(multiplier), known), delta, ADDED if steps.poisson else LEFT_OUT, (multiplier, 1.0))


def told(draft: Draft, epsilon: float, delta: float, relation: str, equal_noise: tuple[float, float] | None) -> None:
    """Record the figure of one example, and compare it with what is stated. Raises ``Unknown`` where Poisson sampling was
    counted and the facts have another."""
    if relation == ADDED and draft.facts.sampling not in (None, "poisson"):
        raise Unknown(
            f"{draft.call.name} draws by Poisson sampling, but sampling is {draft.facts.sampling}: they contradict"
        )
    draft.bound("example", epsilon, delta, relation)
    draft.bound("client", None, None, ADDED, NO_CLIENT)
    draft.equal_noise = equal_noise
    if draft.stated is not None and draft.stated.per == "round":
        draft.unknown.append("a figure of one round is stated, but DP-SGD was counted over the whole run")
        return
    draft.compared("example")


def clip_of_batch(draft: Draft) -> None:
    """``clip_grad_norm_`` without a mechanism that clips each example: it clips the batch's gradient as a whole."""
    draft.hazard("clip-of-batch", "clip_grad_norm_ clips the gradient of a whole batch; one example is not bounded by it")
    raise Unknown("no noise that fits such a clip is known in this file")
