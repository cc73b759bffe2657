"""The check of a configuration: every mechanism in it by itself, and the outcome of the whole."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import rasura.accounting.configurations.dp_sgd as dp_sgd
import rasura.accounting.configurations.flower as flower
import rasura.accounting.configurations.jax_privacy as jax_privacy
import rasura.accounting.configurations.nvflare as nvflare
import rasura.accounting.configurations.opacus as opacus
from rasura.accounting.configurations.drafts import Draft, Finding
from rasura.accounting.configurations.facts import Call, Facts, Stated, Unknown
from rasura.accounting.configurations.files import Contents, agreeing, read_files
from rasura.accounting.configurations.handled import OPACUS, RESULTS
from rasura.core.errors import InputError

CHECKS: Mapping[str, tuple[Callable[[Draft], None], tuple[str, ...]]] = {
    "LocalDpMod": (flower.local_dp, flower.LOCAL),
    "DifferentialPrivacyServerSideFixedClipping": (flower.server_fixed, flower.FIXED),
    "DifferentialPrivacyClientSideFixedClipping": (flower.client_fixed, flower.FIXED),
    "DifferentialPrivacyServerSideAdaptiveClipping": (flower.server_adaptive, flower.ADAPTIVE),
    "DifferentialPrivacyClientSideAdaptiveClipping": (flower.client_adaptive, flower.ADAPTIVE),
    "SVTPrivacy": (nvflare.sparse_vector, nvflare.ARGUMENTS),
    **dict.fromkeys(nvflare.WITHOUT_NOISE, (nvflare.without_noise, ())),
    "make_private": (opacus.opacus, opacus.OPACUS),
    "make_private_with_epsilon": (opacus.opacus_target, opacus.OPACUS_TARGET),
    "DPKerasConfig": (jax_privacy.keras, jax_privacy.KERAS),
    "gaussian_privatizer": (jax_privacy.privatizer, ("stddev", "prng_key", "dtype", "intermediate_strategy")),
    "protect_training": (dp_sgd.ours, dp_sgd.OURS),
    "PrivateTrainer": (dp_sgd.ours, dp_sgd.OURS),
    "dp_sgd": (dp_sgd.own_loop, dp_sgd.OWN),
    "clip_grad_norm_": (dp_sgd.clip_of_batch, ()),
}
"""For each mechanism what checks it, and the arguments that it may have; none listed: any."""

BESIDE = (
    "PrivacyEngine", "clipped_grad", "CyclicPoissonSampling", "DataLoader", "TrainingArguments", "ServerConfig",
    "get_epsilon", "fixedclipping_mod", "adaptiveclipping_mod", "start",
)  # fmt: skip
"""Components that are read with a mechanism and have no figure of their own."""

_LOSSES = "the loss is the mean of one loss for each example, and no layer mixes examples"
_ONCE = "the data set gives each example once and by itself, and no error ends the training early"
_LABELS = "no label is -100, which PyTorch's losses leave out of their mean"


@dataclass(frozen=True)
class Checked:
    """The outcome for a whole configuration, and the findings on its mechanisms.

    ``outcome``: "does not hold" if any hazard was found; else "not known" if any figure is missing; else "holds" or, where
    nothing is stated, "computed". ``unknown``: what was found in the files and is not known.
    """

    findings: tuple[Finding, ...]
    unknown: tuple[str, ...] = ()

    @property
    def outcome(self) -> str:
        """The worst outcome of all findings."""
        outcomes = {one.outcome for one in self.findings}
        if "does not hold" in outcomes:
            return "does not hold"
        if self.unknown or "not known" in outcomes or not outcomes:
            return "not known"
        return "holds" if "holds" in outcomes else "computed"

    @property
    def exit_code(self) -> int:
        """0 if a figure stands, 3 if a hazard was found, 4 if nothing can be said."""
        return {"holds": 0, "computed": 0, "does not hold": 3}.get(self.outcome, 4)

    def to_dict(self) -> dict[str, object]:
        """Plain values."""
        findings = [{**asdict(one), "outcome": one.outcome} for one in self.findings]
        return {"outcome": self.outcome, "findings": findings, "unknown": list(self.unknown)}


def checked_files(paths: Iterable[Path], facts: Facts | None = None, stated: Stated | None = None) -> Checked:
    """Check the configuration in ``paths``, with further ``facts`` and what is ``stated``, where the files do not say it.

    Raises ``InputError`` for files that cannot be read, and for facts or a statement that contradict those of the files.
    """
    found = read_files(paths)
    both = agreeing(found.facts, facts or Facts(), "options", "the files say")
    if stated is not None and found.stated is not None and stated != found.stated:
        raise InputError(f"options state epsilon {_stated(stated)}, but the files state {_stated(found.stated)}")
    return check(replace(found, facts=both, stated=stated or found.stated))


def _stated(one: Stated) -> str:
    at = "" if one.delta is None else f" at delta {one.delta:g}"
    return f"{one.epsilon:g}{at} for one {one.unit or 'unit'} and one {one.per}"


def check(found: Contents) -> Checked:
    """Check ``found``. What is not known is said in words; it never has an epsilon."""
    names = frozenset(one.name for one in found.calls)
    unknown = list(found.doubts)
    findings = []
    for call in found.calls:
        if call.name in CHECKS and not _redundant(call, names):
            findings.append(_finding(call, found, names))
        elif call.name not in CHECKS and call.name not in BESIDE and "num_rounds" not in call.arguments:
            unknown.append(f"{call.name} ({call.place}) is not known here")
    if sum(bool(one.bounds) for one in findings) > 1:
        unknown.append("there are several mechanisms; what they spend together is not computed")
    if not findings and not unknown:
        unknown.append("no mechanism of differential privacy was found")
    return Checked(tuple(findings), tuple(unknown))


def _redundant(call: Call, names: frozenset[str]) -> bool:
    """Whether a component without noise, or a clip of batches, stands beside a mechanism that does not depend on it."""
    if call.name in nvflare.WITHOUT_NOISE:
        return "SVTPrivacy" in names
    return call.name == "clip_grad_norm_" and bool(names & (set(CHECKS) - {"clip_grad_norm_"}))


def assumed_of(call: Call) -> str:
    """What the figure of a mechanism takes for granted about the rest of the training."""
    if not call.extra.get("program"):
        return "what is trained has these settings, for as long as they say, and nothing else is sent or published"
    if call.name in RESULTS:
        return f"the model, optimizer and loader that {call.name} returned are trained, as they were returned, and no others"
    if call.name == "PrivateTrainer":
        return "this Trainer alone trains the model, once, and with the arguments that it was given"
    if call.name == "LocalDpMod":
        return "every client runs this ClientApp, and sends nothing besides"
    return f"the training uses what {call.name} returned, as it was returned, and nothing else is sent or published"


def _finding(call: Call, found: Contents, names: frozenset[str]) -> Finding:
    checked, arguments = CHECKS[call.name]
    draft = Draft(call, found.facts, found.stated, names, found.calls)
    try:
        strange = [name for name in call.arguments if arguments and name not in arguments]
        if strange:
            raise Unknown(f"{call.name} has arguments that are not known here: {', '.join(strange)}")
        checked(draft)
    except Unknown as reason:
        draft.unknown.append(str(reason))
    except InputError as error:
        draft.unknown.append(f"no epsilon could be computed: {error}")
    except (ArithmeticError, ValueError) as error:
        draft.unknown.append(f"no epsilon could be computed: {type(error).__name__}")
    if any(one.epsilon is not None and not math.isfinite(one.epsilon) for one in draft.bounds):
        draft.unknown.append("an epsilon is not finite")
        draft.bounds.clear()
    if found.doubts:
        draft.unknown.append("no figure stands, since something in the files is not understood")
        draft.bounds.clear()
        draft.one_round = draft.equal_noise = None
    draft.assumptions += [*found.assumed, assumed_of(call)]
    if call.name in RESULTS and call.extra.get("program"):
        draft.assumptions += [_LOSSES, _ONCE, _LABELS] if call.name in OPACUS else [_LOSSES, _ONCE]
    if all(one.epsilon is None for one in draft.bounds):
        draft.assumptions.clear()  # there is no figure that needs one
    return draft.finding()
