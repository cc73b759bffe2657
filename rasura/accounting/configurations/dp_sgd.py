"""DP-SGD as configured for Opacus, this package and loops of one's own: single examples are protected.

Neighbours differ in one example, added or removed. A client, or another group of examples, has no guarantee of its own.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import NamedTuple

from rasura.accounting.compositions import POISSON
from rasura.accounting.configurations.drafts import ADDED, LEFT_OUT, Draft
from rasura.accounting.configurations.facts import Stated, Unknown, positive
from rasura.accounting.epsilon import Sampled, composed_epsilon, sigma_for
from rasura.accounting.gaussian import gaussian_epsilon, sampled_epsilon

OPACUS = (
    "module", "optimizer", "criterion", "data_loader", "noise_multiplier", "max_grad_norm", "batch_first",
    "loss_reduction", "poisson_sampling", "clipping", "noise_generator", "grad_sample_mode", "wrap_model", "rand_on_empty",
    "epochs",
)  # fmt: skip
OPACUS_TARGET = (*OPACUS, "target_epsilon", "target_delta")
OURS = (
    "model", "optimizer", "loader", "defense", "epochs", "delta", "poisson", "seed", "args", "data_collator",
    "train_dataset", "eval_dataset", "processing_class", "compute_metrics", "callbacks", "optimizers",
    "optimizer_cls_and_kwargs", "preprocess_logits_for_metrics",
)  # fmt: skip
OWN = (
    "clip", "clip_of", "layers", "noise_multiplier", "noise_std", "noise_on", "noise_seed", "counted_steps",
    "accounted_as", "delta",
)  # fmt: skip
NO_CLIENT = "DP-SGD protects single examples; nothing is proven for all examples of one client together"


def opacus(draft: Draft) -> None:
    """``PrivacyEngine.make_private`` (Opacus 1.6): noise of deviation ``noise_multiplier * max_grad_norm`` on the sum of
    clipped gradients, Poisson sampling at 1 / len(loader), and as many steps in an epoch."""
    _opacus_clip(draft)
    _planned(draft, draft.noise("noise_multiplier"), _opacus_poisson(draft))


def opacus_target(draft: Draft) -> None:
    """``PrivacyEngine.make_private_with_epsilon``: the multiplier that meets ``target_epsilon`` after ``epochs``.

    The noise is computed here by PLD to a thousandth, as Opacus does it by its own accountant.
    """
    _opacus_clip(draft)
    target, epochs = draft.noise("target_epsilon"), draft.count("epochs")
    delta = draft.delta("example", draft.number("target_delta"))
    if draft.stated is None:
        draft.stated = Stated(target, delta)
    rate, in_epoch = loader(draft)
    made = passes_made(draft) if draft.facts.epochs or draft.facts.rounds else epochs
    if made > epochs:
        draft.hazard("steps", f"the noise is for {epochs} epochs, but {made} are made")
    # An epsilon within a thousandth of the target is the target's: both accountants round.
    multiplier = 1.001 * sigma_for(target, rate, epochs * in_epoch, delta)
    poisson = _opacus_poisson(draft)
    accounted(draft, multiplier, Steps(rate, made * in_epoch, made, poisson), delta)


def _opacus_poisson(draft: Draft) -> bool:
    return draft.value("poisson_sampling", True) is True or draft.facts.sampling == "poisson"


def _opacus_clip(draft: Draft) -> None:
    norms = draft.value("max_grad_norm")
    mode = draft.value("clipping", "flat")
    if isinstance(norms, list) and mode == "per_layer":
        # The noise fits the norm of all clips together (Opacus ``DPPerLayerOptimizer``).
        if not norms or not all(positive(one) for one in norms):
            draft.hazard("no-clip", f"max_grad_norm is {norms}: a layer is not clipped")
            raise Unknown("without clipping there is no guarantee")
    elif mode == "flat":
        draft.clip("max_grad_norm")
    else:
        raise Unknown(f"clipping is {mode!r} with max_grad_norm {norms!r}; flat, and per_layer with a list, are known")
    draft.secret_noise("noise_generator")
    draft.notes.append("without secure_mode the noise is from PyTorch's generator, which is not secret by design")


def own_loop(draft: Draft) -> None:
    """A loop of one's own, described by ``clip``, ``clip_of`` (example, layer, batch) and the noise.

    The noise is ``noise_multiplier`` times the clip on the sum, or has the deviation ``noise_std`` on the sum or mean
    (``noise_on``). A clip of each of ``layers`` layers bounds an example by sqrt(layers) clips. A clip of a whole batch
    bounds what one example can change by twice the clip, whatever the batch size.
    """
    if draft.value("clip") is None:
        draft.hazard("no-clip", "no clip is given: one example can change the sum by any amount")
        raise Unknown("without clipping there is no guarantee")
    clip, of = draft.clip("clip"), draft.value("clip_of", "example")
    rate, in_epoch = loader(draft)
    size = draft.fact("batch_size")
    if draft.value("noise_std") is not None:
        on = draft.value("noise_on")
        if on not in ("sum", "mean"):
            raise Unknown(f"noise_on is {on!r}: whether noise_std is that of the sum or of the mean is not known")
        deviation = draft.noise("noise_std") * (size if on == "mean" and of != "batch" else 1)
    elif draft.value("noise_multiplier") is not None:
        deviation = draft.noise("noise_multiplier") * clip
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
    made = passes_made(draft)
    steps = Steps(rate, made * in_epoch, made, draft.facts.sampling == "poisson")
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
    _planned(draft, multiplier, draft.value("poisson", True) is True, noise)


def loader(draft: Draft) -> tuple[float, int]:
    """The rate of Poisson sampling and the steps of an epoch, as one over and the length of a PyTorch loader."""
    examples, size = draft.fact("examples"), draft.fact("batch_size")
    if size > examples:
        raise Unknown(f"batch_size {size} is above the number of examples, {examples}")
    steps = examples // size if draft.facts.drop_last else math.ceil(examples / size)
    return 1 / steps, steps


def passes_made(draft: Draft) -> int:
    """Passes over the examples: those of a round times the rounds."""
    epochs = draft.facts.epochs
    if epochs is None and isinstance(given := draft.call.arguments.get("epochs"), int):
        epochs = given
    if epochs is None:
        epochs = draft.fact("epochs")
    return epochs * (draft.facts.rounds_per_client or draft.facts.rounds or 1)


def _planned(draft: Draft, multiplier: float, poisson: bool, noise: str = "gaussian") -> None:
    rate, in_epoch = loader(draft)
    made = passes_made(draft)
    delta = draft.delta("example", draft.value("delta"))
    accounted(draft, multiplier, Steps(rate, made * in_epoch, made, poisson), delta, noise=noise)


class Steps(NamedTuple):
    """``made`` steps in ``passes`` passes over the examples; with Poisson sampling, each example at ``rate``."""

    rate: float
    made: int
    passes: int
    poisson: bool


def accounted(
    draft: Draft, multiplier: float, steps: Steps, delta: float, readings: Mapping[str, float] | None = None,
    noise: str = "gaussian", *, assumed: bool = True,
) -> None:  # fmt: skip
    """Record the figures of ``steps`` with noise of ``multiplier`` times what one example can reach.

    Without Poisson sampling an example is in one batch of each pass (shuffled), or in every step as far as is known (fixed).
    Then it is left out, with its place in the batch. ``assumed``: the framework accounts all batches as Poisson sampled.
    """
    if not steps.poisson and assumed:
        draft.hazard("sampling", "batches are not drawn by Poisson sampling, which the framework's accountant assumes")
    if noise == "laplace" and not steps.poisson:
        raise Unknown("Laplace noise without Poisson sampling is not counted here")
    if not steps.poisson and draft.facts.sampling is None:
        raise Unknown("how batches are drawn is not known; pass --sampling shuffled or fixed")
    releases = steps.passes if draft.facts.sampling == "shuffled" else steps.made

    def spent(sigma: float) -> float:
        if noise == "laplace":
            return composed_epsilon((Sampled(sigma, steps.rate, steps.made, noise),), delta)
        if steps.poisson:
            return sampled_epsilon(sigma, steps.rate, steps.made, delta)
        return gaussian_epsilon(math.sqrt(releases) / sigma, delta)

    draft.bound("example", spent(multiplier), delta, ADDED if steps.poisson else LEFT_OUT)
    draft.bound("client", None, None, ADDED, NO_CLIENT)
    if noise == "gaussian":
        draft.equal_noise = (multiplier, 1.0)
    draft.confused(spent, multiplier, readings or {})
    if draft.stated is not None and draft.stated.per == "round":
        draft.unknown.append("a figure of one round is stated, but DP-SGD was counted over the whole run")
        return
    draft.compared("example")


def clip_of_batch(draft: Draft) -> None:
    """``clip_grad_norm_`` without a mechanism that clips each example: it clips the batch's gradient as a whole."""
    draft.hazard("clip-of-batch", "clip_grad_norm_ clips the gradient of a whole batch; one example is not bounded by it")
    raise Unknown("no noise that fits such a clip is known in this file")
