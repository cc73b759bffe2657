"""Images, the attacks on them and how well they read."""

from __future__ import annotations

from rasura import registry
from rasura.core.batches import ImageBatch
from rasura.core.interfaces import Budget
from rasura.core.rng import generator
from rasura.core.threat import HONEST_SERVER, observe
from rasura.core.values import Reconstruction, Transcript
from rasura.data.images import demo_images, encode_images
from rasura.metrics.image import image_psnr

ATTACKS = ("inverting-gradients", "feature-matching")


SIZE = 16


QUICK = Budget("quick")


def image_batch(rows: int = 1, size: int = SIZE) -> ImageBatch:
    return encode_images(demo_images(size)[:rows], size=size, num_labels=4)


def read(name: str, truth: Transcript, *, seed: int = 0, budget: Budget = QUICK) -> Reconstruction:
    return registry.attack(name)(observe(truth, HONEST_SERVER), rng=generator(seed, "attack"), budget=budget)


def decibels(guess: Reconstruction, truth: Transcript) -> float:
    return min(image_psnr()(guess, truth))
