"""How often intervals hold the true figure: simulated over laws and numbers of values, in Markdown.

    python benchmarks/coverage.py

Means by betting beside a percentile bootstrap; areas under a ROC curve by the tail of a binomial law beside DeLong's.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import numpy as np

from rasura.metrics.intervals import mean_intervals, pairs_interval

Draw = Callable[[np.random.Generator, tuple[int, int]], np.ndarray]


def chance(p: float, low: float = 0.0, high: float = 1.0) -> Draw:
    """``high`` with the chance ``p``, else ``low``."""
    return lambda rng, size: np.where(rng.random(size) < p, high, low)


def beta(a: float, b: float) -> Draw:
    """The beta law."""
    return lambda rng, size: rng.beta(a, b, size)


def mixed(share: float, point: float, a: float, b: float) -> Draw:
    """``point`` with the chance ``share``, else the beta law."""
    return lambda rng, size: np.where(rng.random(size) < share, point, rng.beta(a, b, size))


LAWS: dict[str, tuple[Draw, float]] = {
    "all .3": (chance(1.0, high=0.3), 0.3),
    "0 or 1, p = .01": (chance(0.01), 0.01),
    "0 or 1, p = .5": (chance(0.5), 0.5),
    "0 or 1, p = .99": (chance(0.99), 0.99),
    "beta(.5, .5)": (beta(0.5, 0.5), 0.5),
    "beta(2, 5)": (beta(2, 5), 2 / 7),
    "70 % 0, else beta(2, 5)": (mixed(0.7, 0, 2, 5), 0.3 * 2 / 7),
    "97 % 1, else beta(5, 2)": (mixed(0.97, 1, 5, 2), 0.97 + 0.03 * 5 / 7),
    ".4 or .6": (chance(0.5, 0.4, 0.6), 0.5),
}
SIZES = (2, 3, 5, 10, 20, 50, 100)


def bootstrapped(rows: np.ndarray, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """What was printed before: quantiles of the means of 500 resamples."""
    lows, highs = np.zeros(len(rows)), np.zeros(len(rows))
    for k, row in enumerate(rows):
        means = row[rng.integers(0, len(row), (500, len(row)))].mean(1)
        lows[k], highs[k] = np.quantile(means, [0.025, 0.975])
    return lows, highs


def held(lows: np.ndarray, highs: np.ndarray, truth: float) -> str:
    """The share of intervals that hold ``truth``, and their mean width."""
    inside = (lows <= truth + 1e-12) & (highs >= truth - 1e-12)
    return f"{inside.mean():.3f} ({(highs - lows).mean():.2f})"


def means(samples: int, by: str) -> None:
    """A row a law, a column a number of values."""
    print(f"| law | {' | '.join(f'n = {n}' for n in SIZES)} |\n|---{'|---' * len(SIZES)}|")
    for name, (draw, truth) in LAWS.items():
        cells = []
        for n in SIZES:
            rng = np.random.default_rng(n)
            rows = draw(rng, (samples, n))
            lows, highs = mean_intervals(rows) if by == "betting" else bootstrapped(rows, rng)
            cells.append(held(lows, highs, truth))
        print(f"| {name} | {' | '.join(cells)} |", flush=True)


def area(inside: np.ndarray, outside: np.ndarray) -> tuple[float, float, float]:
    """The area, and DeLong's interval."""
    wins = (inside[:, None] > outside) + 0.5 * (inside[:, None] == outside)
    mean, parts = float(wins.mean()), (wins.mean(1), wins.mean(0))
    half = 1.959964 * float(np.sqrt(sum(p.var(ddof=1) / len(p) for p in parts)))
    return mean, max(0.0, mean - half), min(1.0, mean + half)


AREAS: dict[str, tuple[float, float, float]] = {
    "apart, 1": (1.0, 1.0, 0.0),
    "normal, .5": (0.5, 0.0, 1.0),
    "normal, .76": (0.76025, 1.0, 1.0),
    "normal, .98": (0.98305, 3.0, 1.0),
}
"""Name -> the area, the members' mean, and the deviation of all scores."""


def areas(samples: int) -> None:
    """A row a law, a column a number of texts."""
    sizes = ((3, 3), (10, 10), (10, 40), (100, 100))
    print(f"| scores, AUC | {' | '.join(f'{a} + {b}' for a, b in sizes)} |\n|---{'|---' * len(sizes)}|")
    for name, (truth, shift, wide) in AREAS.items():
        cells = []
        for n, m in sizes:
            rng = np.random.default_rng(n)
            found = [area(shift + wide * rng.normal(size=n), wide * rng.normal(size=m)) for _ in range(samples)]
            known = {mean: pairs_interval(mean, n, m) for mean, *_ in found}
            ours = np.array([known[mean] for mean, *_ in found])
            theirs = np.array([ends for _, *ends in found])
            cells.append(f"{held(ours[:, 0], ours[:, 1], truth)}; DeLong {held(theirs[:, 0], theirs[:, 1], truth)}")
        print(f"| {name} | {' | '.join(cells)} |", flush=True)


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, default=2000)
    options = parser.parse_args()
    start = time.process_time()
    print("Means by betting, coverage (mean width):\n")
    means(options.samples, "betting")
    print("\nMeans by a percentile bootstrap:\n")
    means(min(options.samples, 1000), "bootstrap")
    print("\nAreas under a ROC curve:\n")
    areas(min(options.samples, 1000))
    print(f"\n{time.process_time() - start:.0f} s CPU")


if __name__ == "__main__":
    main()
