"""What a guarantee says, word for word and figure by figure: of a plan, of what took place, and of what voids it."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rasura.accounting import Draw, Guarantee, Ledger, Release, Run, directional_epsilon, epsilon, guarantee
from rasura.accounting.guarantees import assumes_poisson, carries, formal, stated
from rasura.accounting.releases import UNPROVEN, Counted
from rasura.core.errors import InputError
from rasura.core.rounding import above, below
from rasura.core.values import Mechanism
from rasura.registry import parse_defense

pytest.importorskip("dp_accounting")

RUN = Run(100, 10, 2, 1e-5)
"""20 releases at rate .1."""

SHUFFLED = replace(RUN, sampling="shuffled")

SEEDED = "the noise is seeded: nothing is guaranteed against anyone who knows or guesses the seed"
LOADER = "the loader shuffles, but the accountant assumes Poisson sampling: epsilon is not proven for this run"
OVERLAP = "batches overlap within an epoch, so every step counts; with a loader that shuffles, only epochs count"


def mechanisms(text: str) -> list[Mechanism]:
    return [p.mechanism for p in parse_defense(text)]


def figures(sigma: float = 2.0, rate: float = 0.1, steps: int = 20, delta: float = 1e-5) -> tuple[float, float]:
    return epsilon(sigma, rate, steps, delta), epsilon(sigma, rate, steps, delta, by="rdp")


DP_SGD = Release("dp-sgd", "gaussian", 2.0, 1.0, "poisson", 0.1, None, (10,))
DIRECTION = Release("directional", "von-mises-fisher", 5.0, 1.0, "disjoint", None, 1, (10,))


def after(*runs: Counted, run: Run = RUN, carrier: str | None = "dp-sgd") -> Guarantee:
    return stated(runs, run, carrier=carrier, planned=False)


def test_a_plan_and_what_was_counted() -> None:
    spent, other = figures()
    kind = f"({above(spent)}, 1e-05)-differential privacy for each text"
    plan = Guarantee(
        f"{kind}; planned, for 2 epochs (20 releases)", spent, 1e-5, None, None, other, "one text is there or not", 20, 0.1,
        "poisson", None, (),
    )  # fmt: skip
    assert guarantee(mechanisms("dp-sgd:2.0"), RUN) == plan
    assert Ledger(mechanisms("dp-sgd:2.0"), RUN).planned == plan
    made = Ledger(mechanisms("dp-sgd:2.0"), RUN)
    for _ in range(20):
        made.made(Draw("poisson", 0.1), [10], secret=True)
    assert made.spent() == replace(plan, statement=f"{kind}; counted, after 20 releases")
    assert plan.to_dict() == {
        "statement": plan.statement, "epsilon": spent, "delta": 1e-5, "cross_check": other, "steps": 20, "rate": 0.1,
        "neighbours": "one text is there or not", "sampling": "poisson",
    }  # fmt: skip
    short = after((DP_SGD, 3), run=replace(RUN, delta=0.00012345))
    assert short.statement.startswith(f"({above(short.epsilon or 0)}, 0.000124)-differential") and short.steps == 3


def test_releases_of_several_rates_have_no_rate_in_common() -> None:
    told = after((DP_SGD, 3), (replace(DP_SGD, rate=0.05), 4))
    assert told.rate is None and told.steps == 7 and told.sampling == "poisson"


def test_a_seed_and_a_loader_that_shuffles_void_it() -> None:
    spent, _ = figures()
    kind = f"({above(spent)}, 1e-05)-differential privacy for each text; planned, for 2 epochs (20 releases)"
    for run, secure, voids, sampling in (
        (RUN, False, (SEEDED,), "poisson"),
        (SHUFFLED, True, (LOADER,), "shuffled"),
        (SHUFFLED, False, (SEEDED, LOADER), "shuffled"),
    ):
        assert guarantee(mechanisms("dp-sgd:2.0"), run, secure=secure) == Guarantee(
            f"no formal guarantee for this run: {'; '.join(voids)}. Otherwise it would be {kind}",
            steps=20, sampling=sampling, otherwise=(spent, 1e-5), warnings=voids,
        )  # fmt: skip
    one_seeded = after((DP_SGD, 3), (replace(DP_SGD, secret=False), 1))
    assert one_seeded.epsilon is None and one_seeded.warnings == (SEEDED,) and one_seeded.steps == 4
    unknown = after((DP_SGD, 3), (replace(DP_SGD, sampling="unknown"), 2))
    assert unknown.warnings == (LOADER,) and unknown.otherwise == (figures(steps=5)[0], 1e-5)
    assert unknown.to_dict()["otherwise"] == list(unknown.otherwise) and unknown.to_dict()["warnings"] == [LOADER]


def test_a_delta_of_one_text_in_full_is_told() -> None:
    note = "delta 0.01 is not below 1 / 100 texts: publishing one random text in full would satisfy this guarantee"
    at = guarantee(mechanisms("dp-sgd:2.0"), replace(RUN, delta=0.01))
    assert at.warnings == (note,) and at.epsilon is not None
    assert guarantee(mechanisms("dp-sgd:2.0"), replace(RUN, delta=0.00999)).warnings == ()
    seeded = guarantee(mechanisms("dp-sgd:2.0"), replace(RUN, delta=0.01), secure=False)
    assert seeded.warnings == (SEEDED, note) and seeded.statement.startswith(f"no formal guarantee for this run: {SEEDED}. ")


def test_too_little_noise_is_told() -> None:
    told = after((DP_SGD, 1), (replace(DP_SGD, multiplier=0.0009), 1), run=replace(RUN, delta=0.5))
    assert told.statement == "no formal guarantee: sigma 0.0009 is too small for a guarantee"
    assert told.epsilon is None and told.warnings[0].startswith("delta 0.5 is not below") and len(told.warnings) == 1
    weak = guarantee(mechanisms("normalised:0.000123456"), RUN, secure=False)
    assert weak == Guarantee("no formal guarantee: sigma 0.000123 is too small for a guarantee", warnings=(SEEDED,))
    laplace = after((replace(DP_SGD, noise="laplace", multiplier=1e-3), 1))  # enough to be asked for
    assert laplace.epsilon == laplace.pure == pytest.approx(1000 + math.log(0.1))
    least = after((replace(DIRECTION, multiplier=1e-4), 1), carrier="directional").epsilon
    assert least is not None and 0 < least < 2e-4, "little is told of a direction where kappa is small"


def test_without_a_proof_nothing_is_said_but_why() -> None:
    nothing = "nothing is proven for gaussian"
    assert guarantee(mechanisms("gaussian:0.1"), RUN) == Guarantee(
        f"no formal guarantee: {nothing}; only an audit can show what it stops"
    )
    assert Ledger(mechanisms("gaussian:0.1"), RUN).spent().statement == guarantee(mechanisms("gaussian:0.1"), RUN).statement
    unproven = "no formal guarantee: its releases were made without a proof; only an audit can show what it stops"
    assert after((DP_SGD, 1), (Release(UNPROVEN), 1)) == Guarantee(unproven) == after(carrier=None)


def test_directions_of_a_loader_that_shuffles_count_by_passes() -> None:
    known = mechanisms("directional:1234.567")
    spent = directional_epsilon(1234.567, [10_000], 2, 1e-5)
    kind = (
        f"({above(spent)}, 1e-05)-differential privacy for each text; pure 4939; the directions of two texts at distance "
        "x on the sphere are told apart by at most 2470 x"
    )
    told = guarantee(known, SHUFFLED, sizes=[9_000, 1_000])
    assert told == Guarantee(
        f"{kind}; planned, for 2 epochs (2 passes over the texts)", spent, 1e-5, 4 * 1234.567, 2 * 1234.567, None,
        "one text is replaced", 2, None, "shuffled", None, (),
    )  # fmt: skip
    assert spent < 4000, "the figure is that of delta, not the pure one"
    made = Ledger(known, SHUFFLED)
    for number in (1, 1, 2):
        made.made(Draw("disjoint", number=number), [9_000, 1_000], secret=True)
    assert made.spent() == replace(told, statement=f"{kind}; counted, after 2 passes over the texts")
    unsized = guarantee(known, SHUFFLED)
    assert unsized.statement.startswith("(4939, 0)-differential privacy for each text; pure 4939;")
    assert unsized == replace(told, statement=unsized.statement, epsilon=4 * 1234.567, delta=0.0)


def test_directions_of_batches_that_overlap_count_by_steps() -> None:
    known = mechanisms("directional:5")
    told = guarantee(known, RUN, sizes=[10])
    assert told.epsilon == directional_epsilon(5.0, [10], 20, 1e-5) and (told.pure, told.metric) == (200, 100)
    assert told.warnings == (OVERLAP,) and told.statement.endswith("100 x; planned, for 2 epochs (20 releases)")
    assert (told.steps, told.rate, told.sampling, told.neighbours) == (20, None, "poisson", "one text is replaced")
    seeded = guarantee(known, RUN, sizes=[10], secure=False)
    assert seeded.warnings == (SEEDED, OVERLAP) and seeded.otherwise == (told.epsilon, 1e-5) and seeded.epsilon is None
    poisson = replace(DIRECTION, sampling="poisson", rate=0.1, number=None)
    mixed = after((DIRECTION, 2), (poisson, 3), carrier="directional")
    assert mixed.steps == 5 and mixed.metric == 20 and mixed.sampling == "poisson" and mixed.warnings == (OVERLAP,)
    unknown = after((DIRECTION, 1), (replace(DIRECTION, sampling="unknown"), 1), carrier="directional")
    assert unknown == Guarantee("no formal guarantee: it is not known how its batches were drawn")
    also = after(
        (replace(DIRECTION, sampling="unknown", secret=False), 1), run=replace(RUN, delta=0.5), carrier="directional"
    )
    assert also.warnings[0] == SEEDED and also.warnings[1].startswith("delta 0.5") and len(also.warnings) == 2


def test_before_any_release_nothing_is_spent() -> None:
    first = after()
    assert first == Guarantee(
        "(0, 1e-05)-differential privacy for each text; counted, after 0 releases", 0.0, 1e-5, 0.0, None, None,
        "one text is there or not", 0, None, "poisson", None, (),
    )  # fmt: skip
    none = after(carrier="directional")
    assert none.warnings == () and none.statement.endswith("at most 0 x; counted, after 0 passes over the texts")
    assert (none.epsilon, none.pure, none.metric, none.steps) == (0.0, 0.0, 0.0, 0)
    assert stated((), RUN, carrier="directional", planned=True, sized=False).epsilon == 0.0


def test_what_would_be_nothing_stays_nothing_in_words() -> None:
    little = after((replace(DP_SGD, multiplier=100.0, secret=False), 1), run=replace(RUN, delta=0.5))
    assert little.otherwise == (0.0, 0.5) and "Otherwise it would be (0, 0.5)-differential" in little.statement
    unsized = guarantee(mechanisms("directional:5"), SHUFFLED, secure=False)
    assert unsized.otherwise == (20.0, 0.0) and unsized.steps == 2 and unsized.sampling == "shuffled"


def test_the_figures_of_a_run() -> None:
    run = Run(101, 10, 3)
    assert (run.steps_an_epoch, run.steps, run.rate, run.fails) == (11, 33, 10 / 101, 0.1 / 101)
    assert Run(5, 10, 1).rate == 1.0 and Run(5, 10, 1).steps == 1 and Run(1, 1, 1).fails == 0.1
    for name in ("examples", "batch_size", "epochs"):
        for wrong in (0, math.inf, math.nan):
            with pytest.raises(InputError, match=f"accounting: {name} is {wrong}; expected at least 1"):
                Run(**{"examples": 10, "batch_size": 10, "epochs": 1, name: wrong})  # type: ignore[arg-type]
    assert repr(Run(10.0, 5.0, 2.0, max_steps=3.0)) == repr(Run(10, 5, 2, max_steps=3))  # type: ignore[arg-type]
    for name in ("examples", "batch_size", "epochs", "max_steps"):
        with pytest.raises(InputError, match=f"accounting: {name} is 2.5; expected a whole number"):
            Run(**{"examples": 10, "batch_size": 10, "epochs": 1, name: 2.5})  # type: ignore[arg-type]
    for delta in (0.0, 1.0):
        with pytest.raises(InputError, match=f"delta is {delta}; expected above 0 and below 1"):
            Run(10, 1, 1, delta)


@pytest.mark.parametrize(
    ("text", "poisson", "carried", "proven"),
    [
        ("dp-sgd:1.0+fp16", True, True, "dp-sgd"), ("frozen-embeddings+normalised:1.0", True, True, "normalised"),
        ("directional:5", False, True, "directional"), ("dp-sgd:1.0+accumulate:16", True, True, None),
        ("gaussian:0.1", False, False, None),
    ],
)  # fmt: skip
def test_what_carries_a_guarantee(text: str, poisson: bool, carried: bool, proven: str | None) -> None:
    known = mechanisms(text)
    found = formal(known)
    assert assumes_poisson(known) is poisson and carries(known) is carried
    assert (found and found.name) == proven and not carries([]) and not assumes_poisson([])


def test_the_metric_guarantee_of_several_tensors_is_about_the_one_that_differs_most() -> None:
    # Whole directions 2e-6 apart, whose second tensors are opposite: each has a part of kappa, whatever its length.
    several = "are told apart by at most 400 x, x being that of the tensor that differs most; planned"
    for sizes in ([100, 100], []):
        told = guarantee(mechanisms("directional:200/blocks=parameters"), SHUFFLED, sizes=sizes)
        assert several in told.statement and told.metric == 400.0
    assert (
        "told apart by at most 400 x; planned" in guarantee(mechanisms("directional:200"), SHUFFLED, sizes=[1, 1]).statement
    )


@given(st.floats(1e-12, 1e12), st.integers(1, 6))
def test_figures_are_rounded_to_the_side_on_which_they_stay_true(value: float, digits: int) -> None:
    over, under = above(value, digits), below(value, digits)
    assert float(under) <= value <= float(over) <= float(under) * (1 + 10 ** (1 - digits) * 1.0001)
    assert above(float(over), digits) == over == f"{float(over):.{digits}g}" and below(float(under), digits) == under
    assert (above(0.0), above(1e-5), above(0.1 / 7000, 3), below(3.4799)) == ("0", "1e-05", "1.43e-05", "3.47")
