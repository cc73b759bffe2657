"""NVIDIA FLARE's privacy filters, as they stand in ``config_fed_client.json``.

Versions 2.5.2, 2.6.2, 2.7.1, 2.8.0 and 2.9.0 were read.
"""

from __future__ import annotations

import math

from rasura.accounting.configurations.drafts import REPLACED, Draft
from rasura.accounting.configurations.facts import Stated, Unknown, positive

FIRST_SOUND = (2, 8)
"""From this version on ``SVTPrivacy`` clips the values before it adds noise to them."""

WITHOUT_NOISE = ("PercentilePrivacy", "ExcludeVars", "DXOBlocker", "ConvertWeights")
"""Filters that add no noise. They have no guarantee, and beside ``SVTPrivacy`` they change nothing in its guarantee."""

UNTRAINED = ("CrossSiteModelEval", "CrossSiteEval", "GlobalModelEval", "InitializeGlobalWeights")
"""Workflows without rounds of training. Their tasks are those of the client's configuration."""

ARGUMENTS = (
    "fraction", "epsilon", "noise_var", "gamma", "tau", "data_kinds", "replace", "epsilon_threshold", "epsilon_query",
    "epsilon_release",
)  # fmt: skip


def without_noise(draft: Draft) -> None:
    """A filter that leaves out or truncates values. What is left is sent as it is (Shokri and Shmatikov 2015 for
    ``PercentilePrivacy``), so nothing is guaranteed."""
    draft.hazard("no-noise", f"{draft.call.name} leaves out or truncates values and adds no noise to the others")
    raise Unknown(f"{draft.call.name} is not differentially private")


def sparse_vector(draft: Draft) -> None:
    """``SVTPrivacy(fraction, epsilon, noise_var, gamma, tau, ...)``.

    Of ``parameters`` values the ``c = ceil(fraction * parameters)`` that pass a noisy threshold are sent with Laplace noise
    of scale ``2 gamma c / epsilon_release``. The parts of the cost (Lyu, Su and Li 2017, theorems 2 and 4):

    - threshold and queries: ``epsilon_threshold + epsilon_query`` for ``c`` accepted values. The filter accepts all values
      that pass, up to all ``parameters``, and draws ``c`` of them afterwards, so that the second part counts
      ``parameters / c`` times.
    - the values sent: ``epsilon_release``, which is ``c * noise_var`` if it is not given.

    Rounds add up. At a delta above 0 the Laplace noise has the smaller figure of concentrated privacy (Bun and Steinke 2016,
    propositions 1.3 and 1.4). Up to 2.7 the filter added noise to values before it clipped them: no epsilon is finite.
    """
    fraction, gamma = draft.number("fraction", 0.1), draft.number("gamma", 1e-5)
    epsilon = draft.noise("epsilon", 0.1)
    if draft.stated is None:
        draft.stated = Stated(epsilon, by_argument=True)
    if not 0 < fraction <= 1 or not positive(gamma):
        raise Unknown(f"fraction {fraction:g} with gamma {gamma:g}: expected a fraction up to 1 and a gamma above 0")
    if sum(one.name == "SVTPrivacy" for one in draft.others) > 1:
        raise Unknown("there are several SVTPrivacy filters; what they spend together is not computed")
    _sound_version(draft)
    _tasks(draft)
    parameters = draft.fact("parameters")
    sent = min(math.ceil(parameters * fraction), parameters)
    threshold, query = _split(draft, epsilon, sent)
    released = draft.noise("epsilon_release", sent * draft.noise("noise_var", 0.1))
    selected = threshold + query * parameters / sent
    if draft.stated.by_argument:
        draft.hazard("partial", f"epsilon {epsilon:g} covers the selection; the values sent spend {released:.6g} in a round")
    draft.notes += [
        "values without a dimension, such as counters of batch norm, are sent as they are, without noise",
        "the division by the number of local steps is taken as public",
    ]

    def spent(rounds: int, delta: float) -> float:
        pure = rounds * (selected + released)
        if not delta:
            return pure
        concentrated = rounds * sent * (released / sent) ** 2 / 2
        return min(pure, rounds * selected + concentrated + 2 * math.sqrt(concentrated * -math.log(delta)))

    asked = draft.facts.delta if draft.stated.delta is None else draft.stated.delta
    delta = draft.delta("client") if asked else 0.0
    draft.one_round = spent(1, delta)
    try:
        # The task submit_model sends the model once more.
        rounds = draft.rounds() + int(draft.call.extra.get("submits") is True)
    except Unknown:
        if draft.one_round > draft.stated.epsilon:
            draft.hazard("exceeds", f"epsilon of one round is {draft.one_round:.6g}; {draft.stated.epsilon:g} is stated")
        raise
    if rounds > 1 and draft.stated.by_argument:
        draft.hazard("per-round", f"epsilon {epsilon:g} is spent again in each of {rounds} rounds")
    draft.bound("client", spent(rounds, delta), delta, REPLACED, f"at delta 0: {spent(rounds, 0):.6g}")
    draft.bound("example", spent(rounds, delta), delta, REPLACED, "one example can change a client's whole update")
    draft.compared("client", draft.one_round)


def _split(draft: Draft, epsilon: float, sent: int) -> tuple[float, float]:
    """Epsilon of the threshold and of the queries, split 1 : (2c)^(2/3) unless one is given (Lyu et al. 2017, sec. 4.2)."""
    threshold, query = draft.value("epsilon_threshold"), draft.value("epsilon_query")
    if threshold is None and query is None:
        share = 1 / (1 + (2 * sent) ** (2 / 3))
        return epsilon * share, epsilon * (1 - share)
    first = draft.noise("epsilon_threshold") if threshold is not None else epsilon - draft.noise("epsilon_query")
    second = draft.noise("epsilon_query") if query is not None else epsilon - first
    if first <= 0 or second <= 0 or not math.isclose(first + second, epsilon, rel_tol=1e-5):
        raise Unknown("epsilon_threshold and epsilon_query do not add up to epsilon; the filter refuses them")
    return first, second


def _sound_version(draft: Draft) -> None:
    version = draft.facts.version
    if version is None:
        raise Unknown("SVTPrivacy has a guarantee from NVFlare 2.8 on only; pass --version, such as 2.9.0")
    try:
        found = tuple(int(part) for part in version.split(".")[:2])
    except ValueError:
        raise Unknown(f"version {version!r} is not one of NVFlare; expected a text such as 2.9.0") from None
    if found < FIRST_SOUND:
        draft.hazard(
            "noise-before-clip", f"NVFlare {version} adds noise to values without a clip, and clips the sum afterwards"
        )
        raise Unknown("values of any size are let through, so no epsilon is finite")


def _tasks(draft: Draft) -> None:
    """Raises ``Unknown`` if something that a client sends does not pass the filter."""
    extra = draft.call.extra
    if extra.get("program"):
        raise Unknown("which tasks the filter covers is not read from a program; pass the JSON that NVFlare exports")
    if extra.get("server"):
        draft.notes.append("the filter works on the server: nothing is guaranteed against the server")
    if extra.get("direction", "result") != "result":
        draft.hazard("unfiltered-task", "the filter works on what a client receives, not on what it sends")
        raise Unknown("what a client sends has no noise")
    kinds = draft.value("data_kinds")
    if kinds and not (isinstance(kinds, list) and {"WEIGHTS", "WEIGHT_DIFF"} <= set(kinds)):
        raise Unknown(f"data_kinds is {kinds!r}: data of another kind passes without noise")
    open_tasks = extra.get("unfiltered", ())
    assert isinstance(open_tasks, tuple)
    sending = [one for one in open_tasks if one in ("train", "submit_model", "*")]
    if sending:
        draft.hazard("unfiltered-task", f"no noise is added to the result of {', '.join(sending)}, which is a model")
        raise Unknown("a model is sent without noise")
    if others := [one for one in open_tasks if one != "validate"]:
        raise Unknown(f"it is not known what the tasks without this filter send: {', '.join(others)}")
    strange = extra.get("strange", ())
    assert isinstance(strange, tuple)
    if strange:
        raise Unknown(f"it is not known what these filters beside it do: {', '.join(strange)}")
    if "validate" in open_tasks:
        draft.notes.append("the metrics of the task validate are not covered")
