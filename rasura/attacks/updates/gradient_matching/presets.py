"""The published methods as settings of the engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

from rasura.attacks.updates.gradient_matching.engine import GradientMatching
from rasura.attacks.updates.gradient_matching.settings import Settings, Work
from rasura.core.specs import CLASSIFIERS, AttackSpec

# LAMP takes 2,000 steps (GRAB sec. 5.1); its public code tries 200 orders every 75 of them after a first tenth.
LAMP_LEVELS: Mapping[str, Work] = {
    "quick": Work(8, 2, 80, 10, 25),
    "default": Work(64, 4, 120, 50, 30),
    "paper": Work(2000, 1, 2000, 200, 75),
}


# GRAB, sec. 5.1: n_e = n_p = 2,000, n_h = 5, n_c = 2,000, n_d = 5, n_b = 4.
GRAB_LEVELS: Mapping[str, Work] = {
    "quick": Work(8, 1, 60, orders=16, rounds=2, beam=2, sweeps=1, entries=0.0),
    "default": Work(64, 1, 200, orders=64, rounds=4, beam=2, sweeps=2, entries=0.0),
    "paper": Work(2000, 1, 2000, orders=2000, rounds=5, beam=4, sweeps=5),
}

# One short round of LAMP is most of it; GRAB's beam search then settles words that the noise moved.
WEIGHTED_LEVELS: Mapping[str, Work] = {
    "quick": LAMP_LEVELS["quick"],
    "default": Work(8, 1, 60, orders=16, rounds=2, beam=2, sweeps=1, entries=0.0),
    "paper": Work(64, 4, 200, orders=64, rounds=4, beam=2, sweeps=2, entries=0.0),
}

DLG_COST: Mapping[str, float] = {"quick": 0.05, "default": 1.0, "paper": 30.0}
LAMP_COST: Mapping[str, float] = {"quick": 0.35, "default": 1.0, "paper": 31.0}

GUIDED_LEVELS: Mapping[str, Work] = {level: replace(work, guided=True) for level, work in GRAB_LEVELS.items()}


def dlg() -> GradientMatching:
    """Deep Leakage from Gradients (Zhu et al. 2019): squared L2, dummy labels optimised with the dummy text.

    The paper uses L-BFGS on images; the text papers that compare with it (LAMP, GRAB sec. 5.1) use Adam, as here.
    """
    return GradientMatching("dlg", Settings("l2"))


def tag() -> GradientMatching:
    """TAG (Deng et al. 2021): squared L2 plus alpha times L1; alpha 0.01 as in GRAB sec. 5.1."""
    return GradientMatching("tag", Settings("l2", alpha=0.01))


def lamp_cos() -> GradientMatching:
    """LAMP with cosine distance (Balunovic et al. 2022): embedding-norm regulariser 1, other orders now and then, with
    0.2 times the prior.

    The paper's prior is GPT-2 with the victim's tokenizer; here it is any causal language model that is granted, else
    trigrams of the reference text.
    """
    return GradientMatching("lamp-cos", Settings("cosine", embedding_norm=1.0, reorder=True, prior=0.2), levels=LAMP_LEVELS)


def lamp_l1l2() -> GradientMatching:
    """LAMP with squared L2 plus 0.01 times L1 (Balunovic et al. 2022); else as ``lamp_cos``."""
    settings = Settings("l2", alpha=0.01, embedding_norm=1.0, reorder=True, prior=0.2)
    return GradientMatching("lamp-l1l2", settings, levels=LAMP_LEVELS)


def lamp_weighted() -> GradientMatching:
    """Ours, for noise: LAMP whose cosine weighs parameters by their signal (``Distance``, ``weighted``). GRAB's masks are
    learned, and but in a quick look its beam search follows.

    LAMP's mean over parameters lets those of weak gradients, which noise fills, say as much as all others.
    """
    settings = Settings("weighted", embedding_norm=1.0, reorder=True, prior=0.2, learn_masks=True)
    return GradientMatching("lamp-weighted", settings, levels=WEIGHTED_LEVELS)


def grab(*, masks: bool = True, discrete: bool = True) -> GradientMatching:
    """GRAB (Feng et al. 2024): L2 plus 0.01 times L1, learned dropout masks, rounds with a beam search, norm matching.

    Its ablations: without ``masks``, dropout masks stay at their mean (Tables 3 and 7, "without dropout masks"); without the
    ``discrete`` steps, there are no rounds, and the nearest tokens of one continuous optimisation are read.

    The L1 term forms every entry of every gradient, which doubles a step's cost; it is left to the budget ``paper``. Masks
    start at their mean, 1 - p, where the paper draws them: a random mask is wrong at 2p(1-p) of its places, and on MiniLM
    half as many words came back after 200 steps.
    """
    name = "grab" + "-without-masks" * (not masks) + "-without-discrete" * (not discrete)
    levels = GRAB_LEVELS if discrete else {k: replace(w, rounds=1, beam=0, orders=0) for k, w in GRAB_LEVELS.items()}
    return GradientMatching(name, Settings("norm", alpha=0.01, learn_masks=masks, match_norm=True), levels=levels)


def guided_grab() -> GradientMatching:
    """Ours: GRAB's beam search over words that block 0's gradient makes likely, for one text (``likely``).

    The distance of a whole gradient only settles them. No masks are learned, and no text is optimised. For several texts,
    and where block 0 shows no row space, it is ``grab``.
    """
    return replace(grab(), name="guided-grab", levels=GUIDED_LEVELS)


def tuned(method: GradientMatching) -> GradientMatching:
    """``method`` with GRAB's settings for large models (sec. 5.4.1, Table 4): the learning rate falls in a line, and the
    gradient of a dummy text's embeddings is clipped to the norm 0.5."""
    return replace(method, name=f"{method.name}-tuned", settings=replace(method.settings, linear=True, steepest=0.5))


DLG = AttackSpec(
    name="dlg",
    about="gradient matching with squared L2 distance",
    source="Zhu et al. 2019 (DLG), Algorithm 1",
    make=dlg,
    seconds=250.0,
    growth=0.4,
    work=DLG_COST,
    tasks=CLASSIFIERS,
)

TAG = AttackSpec(
    name="tag",
    about="gradient matching with squared L2 plus L1 distance",
    source="Deng et al. 2021 (TAG), sec. 3",
    make=tag,
    seconds=250.0,
    growth=0.4,
    work=DLG_COST,
    tasks=CLASSIFIERS,
)

LAMP_COS = AttackSpec(
    name="lamp-cos",
    about="gradient matching with cosine distance; reorders tokens by gradient and language model",
    source="Balunovic et al. 2022 (LAMP), sec. 4",
    make=lamp_cos,
    seconds=25.0,
    growth=0.4,
    work=LAMP_COST,
    tasks=CLASSIFIERS,
)

LAMP_L1L2 = AttackSpec(
    name="lamp-l1l2",
    about="gradient matching with L2 and L1 distance; reorders tokens as lamp-cos does",
    source="Balunovic et al. 2022 (LAMP), sec. 4",
    make=lamp_l1l2,
    seconds=45.0,
    growth=0.4,
    work=LAMP_COST,
    tasks=CLASSIFIERS,
)

LAMP_WEIGHTED = replace(
    LAMP_COS,
    name="lamp-weighted",
    about="lamp-cos that weighs gradients by their signal, for noise",
    source="Rasura, after Balunovic et al. 2022 (LAMP), sec. 4",
    make=lamp_weighted,
    seconds=33.0,
    work={"quick": 0.27, "default": 1.0, "paper": 25.0},
)

GRAB = AttackSpec(
    name="grab",
    about="gradient matching that learns dropout masks and ends with a beam search",
    source="Feng et al. 2024 (GRAB), sec. 4, Algorithms 1 and 2",
    make=grab,
    seconds=240.0,
    growth=0.4,
    work={"quick": 0.08, "default": 1.0, "paper": 30.0},
    tasks=CLASSIFIERS,
)

GRAB_WITHOUT_MASKS = replace(
    GRAB,
    name="grab-without-masks",
    about="grab with dropout masks at their mean: what learning them adds",
    source="GRAB, Table 3, without dropout masks",
    make=lambda: grab(masks=False),
)

GRAB_WITHOUT_DISCRETE = replace(
    GRAB,
    name="grab-without-discrete",
    about="grab without rounds and beam search: what the discrete steps add",
    source="GRAB, sec. 4.3, left out",
    make=lambda: grab(discrete=False),
    seconds=40.0,
)

GUIDED_GRAB = AttackSpec(
    name="guided-grab",
    about="one text through dropout: grab's beam search over the words that block 0 makes likely",
    source="Rasura",
    make=guided_grab,
    seconds=7.0,
    growth=2.0,
    work={"quick": 0.62, "default": 1.0, "paper": 15.0},
    tasks=CLASSIFIERS,
)


def _tuned(spec: AttackSpec, method: Callable[[], GradientMatching]) -> AttackSpec:
    return replace(
        spec,
        name=f"{spec.name}-tuned",
        about=f"{spec.name} with the steps that GRAB takes on large models",
        source="GRAB, sec. 5.4.1, Table 4",
        make=lambda: tuned(method()),
    )


DLG_TUNED, TAG_TUNED = _tuned(DLG, dlg), _tuned(TAG, tag)
LAMP_COS_TUNED, LAMP_L1L2_TUNED = _tuned(LAMP_COS, lamp_cos), _tuned(LAMP_L1L2, lamp_l1l2)
GRAB_TUNED = _tuned(GRAB, grab)
GRAB_WITHOUT_MASKS_TUNED = _tuned(GRAB_WITHOUT_MASKS, partial(grab, masks=False))
