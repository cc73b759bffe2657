"""Flower's differential privacy: ``LocalDpMod`` and the wrappers for fixed and adaptive clipping (flwr 1.42 was read).

All of them protect a client's whole update. Neighbours differ in one client, whose update is left out (its contribution is
zero) or replaced by another: the first has half the sensitivity of the second. One example can change a client's whole
update, so that it has the figure of a replaced client.
"""

from __future__ import annotations

import math
from statistics import NormalDist

from rasura.accounting.configurations.drafts import LEFT_OUT, REPLACED, Draft
from rasura.accounting.configurations.facts import Stated, Unknown, probability
from rasura.accounting.gaussian import gaussian_epsilon

SERVER = "the server adds the noise: nothing is guaranteed against the server, which sees each update"
LOCAL = ("clipping_norm", "sensitivity", "epsilon", "delta")
FIXED = ("strategy", "noise_multiplier", "clipping_norm", "num_sampled_clients", "accountant")
ADAPTIVE = (
    "strategy", "noise_multiplier", "num_sampled_clients", "initial_clipping_norm", "target_clipped_quantile",
    "clip_norm_lr", "clipped_count_stddev",
)  # fmt: skip
WRAPPERS = (
    "DifferentialPrivacyServerSideFixedClipping", "DifferentialPrivacyClientSideFixedClipping",
    "DifferentialPrivacyServerSideAdaptiveClipping", "DifferentialPrivacyClientSideAdaptiveClipping",
)  # fmt: skip
MODS = ("fixedclipping_mod", "adaptiveclipping_mod")
GENERATOR = "noise is from NumPy's global generator: not secret against anyone who knows or guesses its state"


def local_dp(draft: Draft) -> None:
    """``LocalDpMod(clipping_norm, sensitivity, epsilon, delta)``.

    An update is clipped to ``clipping_norm`` and sent with noise of deviation ``sensitivity * sqrt(2 ln(1.25 / delta)) /
    epsilon`` (flwr ``clientapp/mod/localdp_mod.py``). That formula is Dwork and Roth 2014, theorem A.1, which needs an
    epsilon of at most 1. Two clipped updates differ by up to twice the clip, whatever ``sensitivity`` says.
    """
    clip, sensitivity = draft.clip("clipping_norm"), draft.noise("sensitivity")
    epsilon, delta = draft.noise("epsilon"), draft.number("delta")
    if not probability(delta):
        draft.hazard("delta", f"delta is {delta:g}; a probability above 0 and below 1 is needed")
        raise Unknown(f"with delta {delta:g} there is no guarantee")
    deviation = sensitivity * math.sqrt(2 * math.log(1.25 / delta)) / epsilon
    if sensitivity < clip:
        draft.hazard(
            "sensitivity",
            f"sensitivity is {sensitivity:g}, but updates are clipped to {clip:g}: two of them differ by up to {2 * clip:g}",
        )
    elif sensitivity < 2 * clip * (1 - 1e-9):
        draft.hazard(
            "sensitivity", f"sensitivity {sensitivity:g} covers an update that is left out; two differ by up to {2 * clip:g}"
        )
    nominal = gaussian_epsilon(sensitivity / deviation, delta)
    if nominal > epsilon:
        draft.hazard("formula", f"noise by this formula has epsilon {nominal:.4g} at its own sensitivity, not {epsilon:g}")
    if draft.stated is None:
        draft.stated = Stated(epsilon, delta, by_argument=True)
    draft.equal_noise = (deviation / clip, clip)
    draft.notes += [GENERATOR, "epsilon of a client holds against the server as well"]
    at = draft.delta("client", delta)
    draft.one_round = gaussian_epsilon(2 * clip / deviation, at)
    rounds = _counted_rounds(draft)
    total = gaussian_epsilon(math.sqrt(rounds) * 2 * clip / deviation, at)
    draft.bound("client", total, at, REPLACED)
    draft.bound("example", total, at, REPLACED, "one example can change a client's whole update")
    draft.compared("client", draft.one_round)


def _counted_rounds(draft: Draft) -> int:
    """The rounds of a client. Without them, a first round that already breaks the statement is a hazard as well."""
    stated, first = draft.stated, draft.one_round
    try:
        rounds = draft.rounds()
    except Unknown:
        if stated is not None and first is not None and first > stated.epsilon * (1 + 1e-6):
            draft.hazard("exceeds", f"epsilon of one round is {first:.4g} for one client; {stated.epsilon:g} is stated")
        raise
    if rounds > 1 and stated is not None and stated.by_argument:
        draft.hazard("per-round", f"epsilon {stated.epsilon:g} is an argument for one message; a client sends {rounds}")
    return rounds


def server_fixed(draft: Draft) -> None:
    """``DifferentialPrivacyServerSideFixedClipping(strategy, noise_multiplier, clipping_norm, num_sampled_clients)``."""
    multiplier = draft.noise("noise_multiplier")
    clip = draft.clip("clipping_norm")
    _central(draft, multiplier, clip, clip)


def client_fixed(draft: Draft) -> None:
    """``DifferentialPrivacyClientSideFixedClipping``: as on the server, if the ClientApp has ``fixedclipping_mod``."""
    _needs_mod(draft, "fixedclipping_mod")
    server_fixed(draft)


def server_adaptive(draft: Draft) -> None:
    """``DifferentialPrivacyServerSideAdaptiveClipping`` (Andrew et al. 2021).

    The noise of the average and of the count of clipped updates together have multiplier ``noise_multiplier``: the average
    has ``(z^-2 - (2 b)^-2)^(-1/2)``, with ``b`` the deviation of the count, num_sampled_clients / 20 if it is not given.
    flwr 1.42 moves the clip before it draws the noise of the average, by ``exp(-rate (fraction - quantile))``, so that
    the noise fits the new clip while the updates have the old one. The worst such factor counts here, at a noisy fraction
    that is exceeded with a tenth of delta at most in all rounds.
    """
    draft.clip("initial_clipping_norm", 0.1)
    multiplier, clients = draft.noise("noise_multiplier"), draft.count("num_sampled_clients")
    rate, quantile = draft.number("clip_norm_lr", 0.2), draft.number("target_clipped_quantile", 0.5)
    count = clients / 20 if draft.value("clipped_count_stddev") is None else draft.noise("clipped_count_stddev")
    if multiplier >= 2 * count:
        raise Unknown(f"Flower refuses noise_multiplier {multiplier:g}: it is not below twice {count:g}, that of the count")
    average = (multiplier**-2 - (2 * count) ** -2) ** -0.5
    rounds, delta = draft.rounds(), draft.delta("client")
    highest = 1 + count / clients * NormalDist().inv_cdf(1 - 0.1 * delta / rounds)
    worst = math.exp(-max(0.0, rate * (highest - quantile)))
    effective = ((average * worst) ** -2 + (2 * count) ** -2) ** -0.5
    draft.notes.append(
        f"the clip moves before the noise is drawn: noise multiplier {multiplier:g} counts as {effective:.4g}"
    )
    _central(draft, effective, draft.number("initial_clipping_norm", 0.1), None, spare=0.1)


def client_adaptive(draft: Draft) -> None:
    """``DifferentialPrivacyClientSideAdaptiveClipping``: as on the server, if the ClientApp has ``adaptiveclipping_mod``."""
    _needs_mod(draft, "adaptiveclipping_mod")
    server_adaptive(draft)


def _needs_mod(draft: Draft, mod: str) -> None:
    if mod not in draft.names and mod not in draft.facts.client_mods:
        draft.hazard(
            "no-clip",
            f"{mod} was not found: clients clip only if their ClientApp has it (pass the client's file, or client_mods)",
        )
        raise Unknown("without clipping there is no guarantee")


def _central(draft: Draft, multiplier: float, clip: float, confusable: float | None, spare: float = 0.0) -> None:
    """Noise of deviation ``multiplier * clip / num_sampled_clients`` on the average (flwr ``compute_stdv``).

    The average is weighted by FedAvg, by the number of examples unless they are equal, and divided by the replies that
    came: no other aggregation has this sensitivity. Flower draws a fixed number of clients without replacement; no
    amplification is counted. ``spare``: the fraction
    of delta that was spent before.
    """
    facts, configured = draft.facts, draft.count("num_sampled_clients")
    if not draft.call.extra.get("program") and facts.aggregation != "mean":  # in a program the strategy itself is read
        given = "not known" if facts.aggregation is None else repr(facts.aggregation)
        raise Unknown(
            f"how the updates are aggregated is {given}; the noise fits the mean of FedAvg and FedProx alone: "
            'pass --aggregation mean, or aggregation = "mean" in [run]'
        )
    answering = facts.clients_per_round or min(configured, facts.clients or configured)
    if facts.clients_per_round is None:
        draft.notes.append(f"assumes that exactly {answering} clients answer in each round; Flower only warns otherwise")
    if facts.sampling == "poisson":
        draft.hazard("sampling", "Flower draws a fixed number of clients; the accounting of Poisson sampling does not apply")
    weight = facts.weights
    if weight is None and draft.call.arguments.get("accountant") is not None:
        weight = "equal"  # Flower's own accountant refuses replies with unequal weights
    if weight is None:
        raise Unknown("FedAvg weights a client by its number of examples; pass --weights equal, or the largest fraction")
    largest = 1 / answering if weight == "equal" else float(weight)
    if largest * answering < 1 - 1e-9:
        raise Unknown(f"of {answering} clients one has at least 1 / {answering} of the average, but weights is {largest:g}")
    effective = multiplier / (configured * largest)
    draft.equal_noise = (effective, clip)
    delta = draft.delta("client") * (1 - spare)
    rounds = draft.rounds()

    def spent(sigma: float, times: float = 1, steps: int = rounds) -> float:
        return gaussian_epsilon(times * math.sqrt(steps) / sigma, delta)

    draft.one_round = spent(effective, steps=1)
    full = delta / (1 - spare)
    draft.bound("client", spent(effective), full, LEFT_OUT, f"replaced by another client: {spent(effective, 2):.4g}")
    draft.bound("example", spent(effective, 2), full, REPLACED, "one example can change a client's whole update")
    draft.notes += [SERVER, GENERATOR, "losses and metrics of the clients are not covered"]
    if confusable is not None:
        draft.confused(
            spent, effective, {"takes noise_multiplier for the deviation of the noise on the sum": effective / confusable}
        )
    draft.compared("client", draft.one_round)
    _misfits(draft, configured, answering, largest)


def _misfits(draft: Draft, configured: int, answering: int, largest: float) -> None:
    """Say where the noise is too small for the clients that there are: a hazard if the stated epsilon does not hold."""
    broken = any(one.code == "exceeds" for one in draft.hazards)
    found = []
    if answering < configured:
        found.append(("count", f"the noise fits {configured} clients in a round, but {answering} answer"))
    if largest * answering > 1 + 1e-9:
        found.append(("weights", f"one client may have {largest:.3g} of the average, not 1 / {answering}"))
    for code, says in found:
        if broken:
            draft.hazard(code, says)
        else:
            draft.notes.append(f"{says}; this is counted")
