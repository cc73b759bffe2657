"""The law that every metric keeps: the truth scores best."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import nn

from rasura.core.interfaces import Metric
from rasura.core.rng import generator
from rasura.core.specs import MetricSpec
from rasura.core.values import NO_TEXT, Message, Reconstruction, Transcript
from rasura.data.images import demo_images, encode_images
from rasura.testing.tiny import CLS, SEP, VOCABULARY, batch_of, tiny

ROUNDING = 1e-6
"""How far a value may lie outside its bounds."""

PRIVATE = "Ms Ingrid Berg, 12 May 2019"
"""A text with words of the language, a name and a date, so that every metric has something to judge."""


def check_metric(spec: MetricSpec, metric: Metric[Reconstruction] | None = None) -> None:
    """Hold ``spec`` to the law. ``metric``: one that was built already, where the spec needs an encoder.

    Raises ``AssertionError`` where it breaks the law, ``Unavailable`` where this machine cannot compute it.
    """
    made = spec.make() if metric is None else metric
    assert made.name == spec.name and made.higher_is in ("worse", "better")
    tells_the_truth_from_another(spec, made)


def tells_the_truth_from_another(spec: MetricSpec, metric: Metric[Reconstruction]) -> None:
    """One finite value for each example within ``bounds``, and a better one for the private example than for another."""
    truth, right, wrong = _images() if "vision" in spec.tasks else _texts()
    (best,), (worst,) = metric(right, truth), metric(wrong, truth)
    for value in (best, worst):
        assert not math.isnan(value)
        if metric.bounds is not None:
            assert metric.bounds[0] - ROUNDING <= value <= metric.bounds[1] + ROUNDING
    assert best > worst if metric.higher_is == "worse" else best < worst


def _texts() -> tuple[Transcript, Reconstruction, Reconstruction]:
    text, other = (CLS, 11, 3, 40, SEP), (CLS, 250, 251, 252, SEP)
    words = {11: PRIVATE, 250: "lorem ipsum", 3: "", 40: "", 251: "", 252: ""}
    batch = replace(batch_of([list(text)], "classification"), texts=(PRIVATE,), seen=(PRIVATE,))
    vocabulary = replace(VOCABULARY, decode=lambda ids: " ".join(words[i] for i in ids if words.get(i)))
    truth = Transcript(batch, tiny("bert", "classification"), Message({}), (), 0.0, "classification", vocabulary)
    return truth, Reconstruction((text,)), Reconstruction((other,))


def _images() -> tuple[Transcript, Reconstruction, Reconstruction]:
    batch = encode_images(demo_images(32)[:1], size=32, num_labels=4)
    truth = Transcript(batch, nn.Identity(), Message({}), (), 0.0, "vision", NO_TEXT)
    drawn = torch.rand(batch.pixel_values.shape, generator=generator(0))
    return truth, Reconstruction((), images=batch.pixel_values), Reconstruction((), images=drawn)
