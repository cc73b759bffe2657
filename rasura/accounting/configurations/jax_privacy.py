"""jax-privacy (2.0 was read): ``DPKerasConfig``, and ``gaussian_privatizer`` on what ``clipped_grad`` returns."""

from __future__ import annotations

import math

from rasura.accounting.configurations.dp_sgd import Steps, accounted, loader, passes_made, sought
from rasura.accounting.configurations.drafts import Draft
from rasura.accounting.configurations.facts import Call, Facts, Stated, Unknown, positive

KERAS = (
    "epsilon", "delta", "clipping_norm", "batch_size", "gradient_accumulation_steps", "train_steps", "train_size",
    "poisson_sampling_in_fit", "noise_multiplier", "rescale_to_unit_norm", "microbatch_size", "seed",
)  # fmt: skip


def keras(draft: Draft) -> None:
    """``DPKerasConfig`` of jax-privacy 2.0: noise ``noise_multiplier * clipping_norm / batch_size`` on the mean.

    With accumulation over k batches each has 1 / sqrt(k) of the noise; each is counted as a release of its own. Without
    ``poisson_sampling_in_fit`` the batches are those that ``fit`` is given.
    """
    draft.clip("clipping_norm")
    examples, size = draft.count("train_size"), draft.count("batch_size")
    steps, parts = draft.count("train_steps"), draft.count("gradient_accumulation_steps", 1)
    if size > examples:
        raise Unknown(f"batch_size {size} is above train_size {examples}")
    target, chosen_at = draft.noise("epsilon"), draft.number("delta")
    if draft.stated is None:
        draft.stated = Stated(target, chosen_at if 0 < chosen_at < 1 else None)
    delta = chosen_at if draft.stated.delta is None else draft.stated.delta
    known = draft.facts.examples or examples
    if known < examples:
        draft.hazard("sampling", f"train_size is {examples}, but there are {known} examples: each is drawn more often")
    if delta >= 1 / known:
        draft.hazard("delta", f"delta {delta:g} is not below 1 / {known} examples")
        raise Unknown(f"with delta {delta:g} there is no useful guarantee")
    draft.secret_noise("seed")
    poisson = draft.value("poisson_sampling_in_fit", False) is True
    if not poisson and draft.facts.sampling == "poisson" and draft.call.extra.get("program"):
        raise Unknown("sampling poisson is given, but poisson_sampling_in_fit is off in the program")
    poisson = poisson or draft.facts.sampling == "poisson"
    searched = draft.value("noise_multiplier") is None
    if searched:
        multiplier = sought(target, min(1.0, size * parts / examples), steps, chosen_at)
    else:
        multiplier = draft.noise("noise_multiplier")
    made = max(steps, draft.facts.steps or 0) * draft.facts.rounds_made
    if made > steps:
        draft.hazard("steps", f"train_steps is {steps}, but {made} are made")
    rate, count = min(1.0, size / min(known, examples)), made * parts
    passes = math.ceil(count * size / known)
    as_planned = searched and poisson and (parts, made, known, delta) == (1, steps, examples, chosen_at)
    drawn = Steps(rate, count, passes, poisson)
    accounted(draft, multiplier / math.sqrt(parts), drawn, delta, known=target if as_planned else math.inf)


def privatizer(draft: Draft) -> None:
    """``gaussian_privatizer(stddev=...)`` of jax-privacy 2.0 on the output of ``clipped_grad``.

    The sensitivity of that output is ``l2_clip_norm`` (1 with ``rescale_to_unit_norm``) over ``normalize_by``; batches are
    drawn by ``CyclicPoissonSampling`` with ``cycle_length`` 1 and no truncation, or as the facts say.
    """
    draft.secret_noise("prng_key")
    clipped = [one for one in draft.others if one.name == "clipped_grad"]
    if len(clipped) != 1:
        if not clipped:
            draft.hazard("no-clip", "no clipped_grad was found: nothing bounds what one example changes")
        raise Unknown(f"{len(clipped)} calls of clipped_grad were found; exactly one is expected")
    sensitivity = jax_sensitivity(clipped[0])
    if math.isinf(sensitivity):
        draft.hazard("no-clip", "l2_clip_norm is infinite: contributions of any size are let through")
        raise Unknown("without clipping there is no guarantee")
    multiplier = draft.noise("stddev") / sensitivity
    drawn = [one for one in draft.others if one.name == "CyclicPoissonSampling"]
    if len(drawn) > 1:
        raise Unknown(f"{len(drawn)} calls of CyclicPoissonSampling were found; at most one is expected")
    if drawn:
        plan = Draft(drawn[0], draft.facts, None)
        if plan.count("cycle_length", 1) != 1 or plan.value("truncated_batch_size") is not None:
            raise Unknown("cyclic or truncated sampling is not counted here; plain Poisson sampling is")
        made = max(plan.count("iterations"), draft.facts.steps or 0) * draft.facts.rounds_made
        steps = Steps(plan.number("sampling_prob"), made, 1, True)
    else:
        if draft.facts.sampling is None:
            raise Unknown("how batches are drawn is not known; pass --sampling poisson, shuffled or fixed")
        rate, in_epoch = loader(draft)
        passes = passes_made(draft)
        steps = Steps(rate, passes * in_epoch, passes, draft.facts.sampling == "poisson")
    if not 0 < steps.rate <= 1 or steps.made < 1:
        raise Unknown(f"a rate of {steps.rate:g} over {steps.made} steps; expected a probability and at least one step")
    readings = {"takes stddev for the noise multiplier": draft.noise("stddev")}
    accounted(draft, multiplier, steps, draft.delta("example"), readings)


def jax_sensitivity(call: Call) -> float:
    """The sensitivity of what ``clipped_grad`` returns. Raises ``Unknown`` if it cannot be computed."""
    draft = Draft(call, Facts(), None)
    clip, by = draft.number("l2_clip_norm"), draft.number("normalize_by", 1.0)
    if clip <= 0 or not positive(by):
        raise Unknown(f"l2_clip_norm {clip:g} with normalize_by {by:g}; expected numbers above 0")
    return (1.0 if draft.value("rescale_to_unit_norm", False) is True else clip) / by
