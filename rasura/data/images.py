"""Private images from PNG and JPEG files: reading, batches, and display."""

from __future__ import annotations

import base64
import hashlib
import io
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rasura.core.batches import ImageBatch
from rasura.core.interfaces import InputError, MissingExtra
from rasura.data.columns import MAX_CLASSES

SUFFIXES = (".png", ".jpg", ".jpeg")


@dataclass(frozen=True)
class ImageExample:
    """One RGB image: ``pixels`` ``(3, height, width)`` in ``[0, 1]``, and its class."""

    name: str
    pixels: Tensor
    label: int


def _pillow() -> Any:
    try:
        from PIL import Image
    except ImportError:
        raise MissingExtra("images need Pillow; run: pip install 'rasura[images]'") from None
    return Image


def demo_images(size: int = 32) -> list[ImageExample]:
    """Four drawn images: a disc, stripes, a cross and a landscape of two halves."""
    y, x = torch.meshgrid(torch.linspace(-1, 1, size), torch.linspace(-1, 1, size), indexing="ij")
    disc, stripes = (x**2 + y**2 < 0.4).float(), (torch.sin(9 * (x + y)) > 0).float()
    cross, hills = ((x.abs() < 0.25) | (y.abs() < 0.25)).float(), (y > 0.3 * torch.sin(4 * x)).float()
    ramp = (x + 1) / 2
    drawn = {
        "disc": (0.2 + 0.7 * disc, 0.6 * ramp, 0.8 - 0.6 * disc),
        "stripes": (0.8 * stripes + 0.1, 0.3 + 0.4 * ramp, 0.2 + 0.2 * stripes),
        "cross": (0.9 - 0.5 * ramp, 0.2 + 0.6 * cross, 0.3 + 0.3 * cross),
        "landscape": (0.4 - 0.2 * hills, 0.6 - 0.2 * ramp * hills, 0.9 - 0.8 * hills),
    }
    return [ImageExample(name, torch.stack(colours), k) for k, (name, colours) in enumerate(drawn.items())]


def load_images(source: str | Path, *, limit: int | None = None) -> list[ImageExample]:
    """The images of a PNG or JPEG file, or of a folder in the order of file names. The label is the number at the end of the
    file's name.

    ``cat_3.png`` has label 3; a name without a number at its end has label 0. Raises ``InputError`` for a missing file, an
    empty folder, a file that is not an image, and an image with transparent pixels or more than 8 bits a channel, which RGB
    of 8 bits does not show; ``MissingExtra`` without Pillow.
    """
    path = Path(source)
    if path.is_dir():
        files = sorted(f for f in path.iterdir() if f.suffix.lower() in SUFFIXES)
        if not files:
            raise InputError(f"{path} holds no image; expected {', '.join(SUFFIXES)} files")
    elif path.is_file():
        files = [path]
    else:
        raise InputError(f"{path} does not exist; expected an image or a folder of images ({', '.join(SUFFIXES)})")
    return [_read(file) for file in files[:limit]]


def _read(file: Path) -> ImageExample:
    image = _pillow()
    try:
        with image.open(file) as opened:
            # Pillow calls colours of 16 bits RGB, and cuts them to 8: only the raw mode in the file tells.
            deep = opened.mode.startswith(("I", "F")) or any(";16" in str(tile[3]) for tile in opened.tile)
            clear = not deep and opened.convert("RGBA").getchannel("A").getextrema()[0] < 255
            pixels = np.asarray(opened.convert("RGB"), dtype=np.float32) / 255
    except Exception:  # the decoders of damaged files raise whatever comes
        raise InputError(f"{file} cannot be read as an image; expected a PNG or JPEG file") from None
    if deep or clear:
        what = "more than 8 bits a channel" if deep else "transparent pixels"
        raise InputError(f"{file} has {what}, and what a model sees of them is not known; convert it to RGB of 8 bits")
    number = re.search(r"(\d+)$", file.stem)
    label = int(number[1]) if number else 0
    if label >= MAX_CLASSES:
        raise InputError(
            f"{file}: the number at the end of its name is its label; expected at most {MAX_CLASSES - 1}. Rename the file"
        )
    return ImageExample(file.name, torch.from_numpy(pixels).permute(2, 0, 1).contiguous(), label)


def _fitted(example: ImageExample, size: int, scale: bool) -> Tensor:
    _, height, width = example.pixels.shape
    if (height, width) == (size, size):
        return example.pixels
    if not scale:
        raise InputError(
            f"{example.name} has {width}x{height} pixels, but the model takes {size}x{size}; pass --truncate to "
            "crop it to a "
            "square and scale it"
        )
    side = min(height, width)
    top, left = (height - side) // 2, (width - side) // 2
    square = example.pixels[:, top : top + side, left : left + side]
    scaled: Tensor = torch.nn.functional.interpolate(square[None], (size, size), mode="bilinear", antialias=True)[0]
    return scaled.clamp(0, 1)


def encode_images(examples: Sequence[ImageExample], *, size: int, num_labels: int, truncate: bool = False) -> ImageBatch:
    """``examples`` as one batch of ``size`` x ``size`` pixels.

    With ``truncate``, an image of another size is cropped to its middle square and scaled. Raises ``InputError`` for another
    size without it, and for a label outside ``0 .. num_labels - 1``.
    """
    for e in examples:
        if not 0 <= e.label < num_labels:
            raise InputError(
                f"{e.name} has label {e.label}, outside the head's 0 .. {num_labels - 1}; "
                f"pass --num-labels {e.label + 1} or more"
            )
    pixels = torch.stack([_fitted(e, size, truncate) for e in examples])
    return ImageBatch(pixels, torch.tensor([e.label for e in examples]), tuple(e.name for e in examples))


def images_hash(examples: Sequence[ImageExample]) -> str:
    """Sixteen hex digits that identify the data: pixels to 8 bits, and labels."""
    digest = hashlib.sha256()
    for e in examples:
        digest.update(f"{tuple(e.pixels.shape)} {e.label}".encode())
        digest.update((e.pixels * 255).round().to(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


def data_url(pixels: Tensor) -> str:
    """An image ``(3, height, width)`` in ``[0, 1]`` as a PNG in a ``data:`` URL, for a page."""
    shown = (pixels.detach().clamp(0, 1) * 255).round().to(torch.uint8).permute(1, 2, 0).numpy()
    file = io.BytesIO()
    _pillow().fromarray(shown).save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
