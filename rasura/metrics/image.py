"""How much of an image was recovered: MSE, PSNR, SSIM, LPIPS. All per private image; pixel values are in ``[0, 1]``."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from rasura.core.interfaces import Unavailable
from rasura.core.specs import IMAGES, MetricSpec
from rasura.core.values import Reconstruction, Transcript
from rasura.metrics.matching import assign

MAX_PSNR = 100.0
"""In dB: the value for identical images, instead of infinity."""

WINDOW, DEVIATION = 11, 1.5
K1, K2 = 0.01, 0.03


def mse(image: Tensor, read: Tensor) -> float:
    """Mean squared error of the pixel values."""
    return float((image.double() - read.double()).square().mean())


def psnr(image: Tensor, read: Tensor) -> float:
    """Peak signal-to-noise ratio in dB, ``-10 log10(mse)``, at most 100; NaN where a pixel is."""
    error = mse(image, read)
    return math.nan if math.isnan(error) else min(MAX_PSNR, -10 * math.log10(max(error, 1e-10)))


def _window(channels: int) -> Tensor:
    at = torch.arange(WINDOW, dtype=torch.double) - (WINDOW - 1) / 2
    line = torch.exp(-at.square() / (2 * DEVIATION**2))
    line = line / line.sum()
    return torch.outer(line, line).expand(channels, 1, -1, -1)


def ssim(image: Tensor, read: Tensor) -> float:
    """Structural similarity (Wang et al. 2004) of images ``(channels, height, width)``, at most 1.

    Gaussian window of 11x11 pixels with deviation 1.5, K1 = 0.01, K2 = 0.03, no padding, weighted (biased) moments; mean
    over places and channels. The paper treats grey images; colours are averaged, as is usual. Raises ``ValueError`` for
    images smaller than the window.
    """
    if min(image.shape[-2:]) < WINDOW:
        raise ValueError(f"SSIM needs at least {WINDOW}x{WINDOW} pixels, found {tuple(image.shape[-2:])}")
    kernel = _window(len(image))

    def blur(x: Tensor) -> Tensor:
        return torch.nn.functional.conv2d(x[None], kernel, groups=len(x))[0]

    a, b = image.double(), read.double()
    mean_a, mean_b = blur(a), blur(b)
    var_a, var_b = blur(a * a) - mean_a**2, blur(b * b) - mean_b**2
    both = blur(a * b) - mean_a * mean_b
    c1, c2 = K1**2, K2**2
    score = (2 * mean_a * mean_b + c1) * (2 * both + c2) / ((mean_a**2 + mean_b**2 + c1) * (var_a + var_b + c2))
    return float(score.mean())


def paired_images(images: Tensor, read: Tensor | None) -> list[int]:
    """For each private image, the recovered image assigned to it, -1 for none: one to one, with the smallest sum of MSE."""
    if read is None:
        return [-1] * len(images)
    table = -np.array([[mse(a, b) for b in read] for a in images]).reshape(len(images), len(read))
    return assign(table, [image.cpu().numpy().tobytes() for image in images])


@dataclass(frozen=True)
class ImageMetric:
    """A score of (private image, recovered image); recovered images are assigned one to one by MSE.

    A private image without a recovered one is compared with grey. Recovered values outside [0, 1] count as the nearer end,
    as a screen shows them, so that an error of pixels has a range.
    """

    name: str
    score: Callable[[Tensor, Tensor], float]
    unit: str
    higher_is: Literal["worse", "better"] = "worse"
    bounds: tuple[float, float] | None = None

    def __call__(self, guess: Reconstruction, truth: Transcript) -> Sequence[float]:
        images = truth.image_batch.pixel_values
        read = None if guess.images is None else guess.images.clamp(0, 1)
        return [
            self.score(image, torch.full_like(image, 0.5) if place < 0 or read is None else read[place])
            for image, place in zip(images, paired_images(images, read))
        ]


def image_mse() -> ImageMetric:
    """Mean squared error, 0 for an exact copy."""
    return ImageMetric("mse", mse, "squared pixel value", "better", (0.0, 1.0))


def image_psnr() -> ImageMetric:
    """Peak signal-to-noise ratio in dB."""
    return ImageMetric("psnr", psnr, "dB", bounds=(0.0, MAX_PSNR))


def image_ssim() -> ImageMetric:
    """Structural similarity, 1 for an exact copy."""
    return ImageMetric("ssim", ssim, "share", bounds=(-1.0, 1.0))


BACKBONE = "alexnet-owt-7be5be79.pth"
"""The file of ImageNet weights that LPIPS uses."""


def lpips_weights() -> Path | None:
    """The path of AlexNet's weights in PyTorch's cache on this machine; None if they are missing."""
    path = Path(torch.hub.get_dir()) / "checkpoints" / BACKBONE
    return path if path.is_file() else None


@lru_cache(maxsize=1)
def _lpips() -> Any:
    remedy = f"run: pip install 'rasura[lpips]', and put {BACKBONE} into {Path(torch.hub.get_dir()) / 'checkpoints'}"
    if lpips_weights() is None:
        raise Unavailable(f"LPIPS needs AlexNet's weights on disk and never downloads them; {remedy}")
    try:
        import lpips
    except ImportError:
        raise Unavailable(f"LPIPS needs the package lpips; {remedy}") from None
    return lpips.LPIPS(net="alex", verbose=False).eval()


def _distance(image: Tensor, read: Tensor) -> float:
    with torch.no_grad():
        return float(_lpips()(image[None].float() * 2 - 1, read[None].float() * 2 - 1))


def image_lpips() -> ImageMetric:
    """Learned perceptual distance (Zhang et al. 2018, AlexNet, version 0.1), 0 for an exact copy.

    Raises ``Unavailable`` at the call if its weights are not on disk; nothing is downloaded.
    """
    return ImageMetric("lpips", _distance, "distance", "better")


MSE = MetricSpec(
    name="mse",
    about="mean squared error of pixels in [0, 1]; lower means more was recovered",
    source="Zhu et al. 2019 (DLG), sec. 4",
    make=image_mse,
    tasks=IMAGES,
)

PSNR = MetricSpec(
    name="psnr",
    about="peak signal-to-noise ratio, in dB",
    source="Geiping et al. 2020, sec. 5",
    make=image_psnr,
    tasks=IMAGES,
)

SSIM = MetricSpec(
    name="ssim",
    about="structural similarity",
    source="Wang et al. 2004, sec. III",
    make=image_ssim,
    tasks=IMAGES,
)

LPIPS = MetricSpec(
    name="lpips",
    about="learned perceptual distance; lower means more was recovered",
    source="Zhang et al. 2018, sec. 3",
    make=image_lpips,
    tasks=IMAGES,
)
