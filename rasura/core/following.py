"""A clip that follows a quantile of the norms: how its noise is divided between the sum and the count of small norms."""

from __future__ import annotations


def of_count(sigma: float, texts: float) -> float:
    """The deviation of the noise on how many norms are below the clip, for batches of ``texts`` on average: a twentieth of
    them (Andrew et al. 2021, section 3.1), and at least twice ``sigma``, so that the sum gets at most 1.033 times the noise.
    """
    return max(texts / 20, 2 * sigma)


def of_sum(sigma: float, texts: float) -> float:
    """The deviation of the noise on the sum, over the clip, where sum and count together cost what one release with the
    multiplier ``sigma`` costs (Andrew et al. 2021, theorem 1).

    A text changes the sum by at most the clip, and the count less one half of the texts by one half.

    >>> round(of_sum(1.0, 8), 3), round(of_sum(1.0, 1000), 4)
    (1.033, 1.0001)
    """
    return float((sigma**-2 - (2 * of_count(sigma, texts)) ** -2) ** -0.5)
