"""Images: the two classifiers, files, metrics, and the attacks on a tiny model."""

from __future__ import annotations

import math
import struct
import sys
import types
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from image_setting import ATTACKS, QUICK, SIZE, decibels, image_batch, read
from safetensors.torch import save_file
from torch import Tensor

from rasura import registry
from rasura.attacks.images.layers import ImageGradients, layer_input
from rasura.attacks.images.search import total_variation
from rasura.core.batches import Batch, ImageBatch
from rasura.core.interfaces import AttackFailed, InputError, MissingExtra, NotApplicable, Unavailable
from rasura.core.records import CUT
from rasura.core.rng import generator
from rasura.core.threat import HONEST_SERVER, adversary_copy, observe
from rasura.core.values import NO_TEXT, Grant, Message, NotGranted, Observation, Reconstruction, Transcript
from rasura.data.images import ImageExample, encode_images, images_hash, load_images
from rasura.data.sizes import image_sizes
from rasura.metrics.image import BACKBONE, image_lpips, image_mse, image_psnr, image_ssim, mse, paired_images, psnr, ssim
from rasura.report.cut import cut_off
from rasura.runs.plans import Plan
from rasura.runs.scoring import score
from rasura.victims.step import step
from rasura.victims.vision import ImageClassifier, build, cnn, lenet


def sent(model: ImageClassifier | None = None, defense: str = "none", rows: int = 1) -> Transcript:
    model = lenet(4, image_size=SIZE) if model is None else model
    batch = image_batch(rows, model.config.image_size)
    return step(model, batch, registry.parse_defense(defense), task="vision", vocabulary=NO_TEXT, rng=generator(0, "step"))


def test_every_attack_of_images_has_a_row() -> None:
    assert {"blind", *ATTACKS} == set(registry.for_task(registry.ATTACKS, "vision")) <= set(registry.ATTACKS)


# --- the classifiers


def test_the_classifiers_have_the_papers_sizes() -> None:
    for make, count in ((lenet, 88_648), (cnn, 2_202_660)):
        assert sum(p.numel() for p in make(100).parameters()) == count


def test_weights_come_from_the_seed_or_from_a_file(tmp_path: Path) -> None:
    state = torch.get_rng_state()
    one, same, other = (lenet(5, seed=s).head.weight for s in (0, 0, 1))
    assert torch.equal(one, same) and not torch.equal(one, other) and torch.equal(torch.get_rng_state(), state)
    for make in (lenet, cnn):
        save_file(make(7, seed=3).state_dict(), tmp_path / "weights.safetensors")
        found = build(tmp_path / "weights.safetensors", 2)
        assert found.config.model_type == make.__name__ and found.config.num_labels == 7
        assert torch.equal(found.head.weight, make(7, seed=3).head.weight)
    save_file({"head.weight": torch.zeros(3, 4)}, tmp_path / "other.safetensors")
    (tmp_path / "text.safetensors").write_text("x")
    bad = (("lenett", "neither"), ("other.safetensors", "neither lenet nor cnn"), ("text.safetensors", "is no"))
    for name, message in bad:
        with pytest.raises(InputError, match=message):
            build(tmp_path / name, 2)


@pytest.mark.parametrize("make", [lenet, cnn])
def test_a_step_without_protection_equals_autograd(make: Any) -> None:
    model = make(4, image_size=SIZE)
    batch = image_batch(3)
    loss = torch.nn.functional.cross_entropy(model(batch.pixel_values).logits, batch.labels)
    expected = torch.autograd.grad(loss, list(model.parameters()))
    truth = sent(model, rows=3)
    assert truth.loss == pytest.approx(float(loss.detach()), rel=1e-6)
    for gradient, wanted in zip(truth.message.gradients.values(), expected):
        assert torch.allclose(gradient, wanted, atol=1e-6)


@pytest.mark.parametrize("defense", ["gaussian:0.001", "laplace:0.001", "pruning:0.7", "random-pruning:0.7"])
def test_defenses_of_the_message_work_on_images(defense: str) -> None:
    plain, truth = sent(), sent(defense=defense)
    assert set(truth.message.gradients) == set(plain.message.gradients)
    assert truth.mechanism and any(
        not torch.equal(g, plain.message.gradients[n]) for n, g in truth.message.gradients.items()
    )


@pytest.mark.parametrize("defense", ["frozen-embeddings", "frozen-blocks:1", "dropout:0.1"])
def test_defenses_of_language_models_are_refused(defense: str) -> None:
    with pytest.raises(InputError):
        sent(defense=defense)
    with pytest.raises(InputError, match="is for texts"):
        Plan(task="vision", defenses=(defense,)).checked()


# --- files and batches


def test_files_and_folders_become_examples(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    for name, colour in (("b_07.png", (255, 0, 0)), ("a_3.png", (0, 255, 0)), ("plain.png", (0, 0, 51))):
        image.new("RGB", (32, 32), colour).save(tmp_path / name)
    (tmp_path / "notes.txt").write_text("not an image")
    found = load_images(tmp_path)
    assert [(e.name, e.label) for e in found] == [("a_3.png", 3), ("b_07.png", 7), ("plain.png", 0)]
    assert found[2].pixels[:, 0, 0].tolist() == pytest.approx([0, 0, 0.2])
    assert load_images(tmp_path / "a_3.png")[0].label == 3 and len(load_images(tmp_path, limit=2)) == 2
    assert images_hash(found) != images_hash(found[::-1])
    image.new("L", (60, 40), 128).save(tmp_path / "wide_1.jpg")
    wide = load_images(tmp_path / "wide_1.jpg")
    with pytest.raises(InputError, match="60x40 pixels, but the model takes 32x32; pass --truncate"):
        encode_images(wide, size=32, num_labels=2)
    assert encode_images(wide, size=32, num_labels=2, truncate=True).pixel_values.shape == (1, 3, 32, 32)
    pixels = [torch.zeros(3, *size) for size in ((32, 32), (32, 60), (8, 32))]
    assert image_sizes([ImageExample("x", p, 0) for p in pixels], 32) == [(32, 32), (32, 60), (32, 8)]
    said = cut_off([{"examples": [0, 1, 2], "details": {CUT: [[32, 32], [32, 60], [32, 8]]}}], images=True)
    assert said == "2 of 3 images were cropped or scaled to 32 pixels a side before they were sent"


def test_bad_files_are_named_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match="does not exist"):
        load_images(tmp_path / "none.png")
    with pytest.raises(InputError, match="holds no image"):
        load_images(tmp_path)
    with pytest.raises(InputError, match=r"label 9, outside the head's 0 .. 3; pass --num-labels 10"):
        encode_images([ImageExample("x_9.png", torch.zeros(3, 8, 8), 9)], size=8, num_labels=4)
    (tmp_path / "bad.png").write_text("no image")
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(MissingExtra, match=r"rasura\[images\]"):
        load_images(tmp_path / "bad.png")
    monkeypatch.undo()
    pytest.importorskip("PIL")
    with pytest.raises(InputError, match="cannot be read as an image"):
        load_images(tmp_path / "bad.png")


def test_batches_are_checked_and_the_two_kinds_are_not_confused() -> None:
    with pytest.raises(ValueError, match="pixel_values"):
        ImageBatch(torch.zeros(2, 3, 4, 4), torch.zeros(1), ("a", "b"))
    truth = sent()
    assert truth.image_batch is truth.batch and not isinstance(truth.batch, Batch)
    with pytest.raises(TypeError, match="not texts"):
        _ = truth.text_batch


# --- metrics


def reference_ssim(a: Tensor, b: Tensor) -> float:
    """Wang et al. 2004, equations 6 and 14 to 16, place after place."""
    weight = [[math.exp(-((i - 5) ** 2 + (j - 5) ** 2) / (2 * 1.5**2)) for j in range(11)] for i in range(11)]
    total = sum(map(sum, weight))
    scores = []
    for channel in range(len(a)):
        for top in range(a.shape[1] - 10):
            for left in range(a.shape[2] - 10):
                pairs = [
                    (weight[i][j] / total, float(a[channel, top + i, left + j]), float(b[channel, top + i, left + j]))
                    for i in range(11) for j in range(11)
                ]  # fmt: skip
                ma, mb = sum(w * x for w, x, _ in pairs), sum(w * y for w, _, y in pairs)
                va, vb = sum(w * (x - ma) ** 2 for w, x, _ in pairs), sum(w * (y - mb) ** 2 for w, _, y in pairs)
                both = sum(w * (x - ma) * (y - mb) for w, x, y in pairs)
                c1, c2 = 0.01**2, 0.03**2
                scores.append((2 * ma * mb + c1) * (2 * both + c2) / ((ma**2 + mb**2 + c1) * (va + vb + c2)))
    return sum(scores) / len(scores)


def test_ssim_equals_the_slow_reference() -> None:
    rng = generator(0, "ssim")
    for height, width in ((11, 11), (13, 15)):
        a, b = (torch.rand(2, height, width, generator=rng, dtype=torch.double) for _ in range(2))
        for other in (b, 0.7 * a + 0.3 * b, 1 - a):
            assert ssim(a, other) == pytest.approx(reference_ssim(a, other), abs=1e-12)
            assert ssim(a, other) == pytest.approx(ssim(other, a), abs=1e-12)
        assert ssim(a, a) == pytest.approx(1.0, abs=1e-12)
    with pytest.raises(ValueError, match="at least 11x11"):
        ssim(torch.zeros(3, 8, 8), torch.zeros(3, 8, 8))


def test_mse_and_psnr_are_what_they_say() -> None:
    a = torch.full((3, 4, 4), 0.25)
    assert mse(a, a + 0.1) == pytest.approx(0.01, abs=1e-8) and psnr(a, a + 0.1) == pytest.approx(20, abs=1e-5)
    assert mse(a, a) == 0 and psnr(a, a) == 100
    assert math.isnan(psnr(a, a * math.nan)), "and not the 100 dB of an exact copy"


def test_the_error_of_pixels_has_a_range_and_so_an_interval() -> None:
    truth = sent(rows=1)
    image = truth.image_batch.pixel_values
    wild = Reconstruction((), images=image + 100 * torch.randn(image.shape, generator=torch.Generator().manual_seed(0)))
    found = score(image_mse(), wild, truth)
    assert 0 <= found["low"] <= found["mean"] <= found["high"] <= 1 and found["mean"] > 0.1
    assert image_mse()(wild, truth) == image_mse()(replace(wild, images=wild.images.clamp(0, 1)), truth)  # type: ignore[union-attr]
    found = score(image_psnr(), wild, truth)
    assert 0 <= found["low"] <= found["mean"] <= found["high"] <= 100


def test_images_of_a_batch_are_paired_one_to_one() -> None:
    truth = sent(rows=3)
    pixels = truth.image_batch.pixel_values
    swapped = Reconstruction((), images=pixels[[2, 0, 1]])
    assert image_mse()(swapped, truth) == [0, 0, 0] and image_ssim()(swapped, truth) == pytest.approx([1, 1, 1])
    twice = image_mse()(Reconstruction((), images=pixels[[0, 0, 0]]), truth)
    assert twice[0] == 0 and min(twice[1:]) > 0, "one recovered image answers one private image"
    grey = [mse(p, torch.full_like(p, 0.5)) for p in pixels]
    assert image_mse()(Reconstruction(()), truth) == pytest.approx(grey)


def test_an_image_that_a_batch_holds_twice_is_read_by_one_guess() -> None:
    images = torch.stack([torch.zeros(3, 8, 8), torch.zeros(3, 8, 8), torch.ones(3, 8, 8)])
    assert paired_images(images, images[1:]) == [0, 0, 1] and paired_images(images, images[:1]) == [0, 0, -1]


def test_lpips_never_downloads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from rasura.metrics import image

    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path))
    image._lpips.cache_clear()
    truth = sent()
    guess = Reconstruction((), images=truth.image_batch.pixel_values)
    with pytest.raises(Unavailable, match=BACKBONE):
        image_lpips()(guess, truth)
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / BACKBONE).write_bytes(b"")
    monkeypatch.setitem(sys.modules, "lpips", None)
    with pytest.raises(Unavailable, match=r"rasura\[lpips\]"):
        image_lpips()(guess, truth)
    fake = types.ModuleType("lpips")
    fake.LPIPS = lambda net, verbose: types.SimpleNamespace(eval=lambda: lambda a, b: (a - b).abs().max())  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "lpips", fake)
    assert image_lpips()(guess, truth) == [0.0]
    image._lpips.cache_clear()


# --- the attacks


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("make", [lenet, cnn])
def test_candidates_gradients_equal_autograd(make: Any, rows: int) -> None:
    model = make(4, image_size=SIZE).double()
    x = torch.rand(2, rows, 3, SIZE, SIZE, generator=generator(0, "x"), dtype=torch.double)
    labels = torch.arange(rows)
    names = [n for n, _ in model.named_parameters()]
    compute = ImageGradients(model, dict(model.named_parameters()))
    assert compute.names == names

    def loss(logits: Tensor) -> Tensor:
        return torch.stack([torch.nn.functional.cross_entropy(one, labels) for one in logits])

    factors, inputs = compute(x.requires_grad_(True), loss)
    for k in range(2):
        expected = torch.autograd.grad(model(pixel_values=x[k].detach(), labels=labels).loss, list(model.parameters()))
        for name, wanted in zip(names, expected):
            assert torch.allclose(factors[name].explicit()[k].reshape(wanted.shape), wanted, atol=1e-12)
            assert float(factors[name].square()[k].detach()) == pytest.approx(float(wanted.square().sum()), rel=1e-9)
    assert inputs["head"].shape[:2] == (2, rows)


def test_a_linear_layer_gives_its_input_away_whatever_is_hidden() -> None:
    rng = generator(0, "layer")
    x, delta = torch.rand(40, generator=rng), torch.randn(10, generator=rng)
    weight = torch.outer(delta, x)
    for visible in (torch.ones(10, 40, dtype=torch.bool), torch.rand(10, 40, generator=rng) < 0.5):
        found = layer_input(weight * visible, delta, (visible, torch.ones(10, dtype=torch.bool)))
        assert found is not None and found.scaled and bool(found.known.all())
        assert torch.allclose(found.value, x, atol=1e-4)
        found = layer_input(weight * visible, 0 * delta, (visible, torch.zeros(10, dtype=torch.bool)))
        assert found is not None and not found.scaled
        assert torch.allclose(found.value * x.max(), x, atol=1e-4)
    two = weight + torch.outer(torch.randn(10, generator=rng), torch.rand(40, generator=rng))
    assert layer_input(two, delta, (torch.ones(10, 40).bool(), torch.ones(10).bool())) is None
    # Sealing the largest entries may leave only inputs that a ReLU has set to zero, and an error relative to zero is none.
    dead = torch.arange(40) < 20
    weight = torch.outer(delta, x.masked_fill(dead, 0.0))
    for biases in (torch.ones(10).bool(), torch.zeros(10).bool()):
        assert layer_input(weight * dead, delta * biases, (dead.expand(10, 40), biases)) is None


def test_total_variation_is_of_neighbours() -> None:
    flat = torch.full((2, 1, 3, 8, 8), 0.3)
    steps = flat.clone()
    steps[1, ..., ::2] = 0.8
    assert float(total_variation(steps)[0]) == pytest.approx(2e-3)
    assert float(total_variation(steps)[1]) == pytest.approx(0.5, abs=2e-3)


@pytest.mark.parametrize("name", ATTACKS)
def test_an_attack_beats_blind_and_repeats_with_its_seed(name: str) -> None:
    truth = sent()
    state = torch.get_rng_state()
    first, second = read(name, truth), read(name, truth)
    assert first.images is not None and second.images is not None and torch.equal(first.images, second.images)
    assert torch.equal(torch.get_rng_state(), state)
    assert first.images.shape == (1, 3, SIZE, SIZE) and float(first.images.min()) >= 0 and float(first.images.max()) <= 1
    assert first.labels == (0,) and first.confidence == "matched" and not first.images.requires_grad
    better = {"inverting-gradients": 2, "feature-matching": 8}[name]
    assert decibels(first, truth) > decibels(read("blind", truth), truth) + better


@pytest.mark.slow
def test_the_cnn_is_read_too() -> None:
    truth = sent(cnn(4, image_size=SIZE))
    for name in ATTACKS:
        assert decibels(read(name, truth), truth) > decibels(read("blind", truth), truth) + 5


@pytest.mark.slow
def test_a_batch_of_two_is_read_by_the_gradient_alone() -> None:
    truth = sent(rows=2)
    guess = read("feature-matching", truth)
    assert guess.images is not None and len(guess.images) == 2 and guess.details["layer_inputs"] == 0


def hidden(truth: Transcript, share: float) -> Observation:
    """With the largest ``share`` of the entries hidden."""
    cut = torch.cat([g.abs().flatten() for g in truth.message.gradients.values()]).quantile(1 - share)
    visible = {n: g.abs() <= cut for n, g in truth.message.gradients.items()}
    message = Message({n: g * visible[n] for n, g in truth.message.gradients.items()}, visible)
    return Observation(message, "vision", observe(truth, HONEST_SERVER).granted)


@pytest.mark.parametrize("name", ATTACKS)
def test_hidden_entries_are_left_out_of_both_sides(name: str) -> None:
    """What stands in a hidden place changes nothing, and the rest is still worth something."""
    truth = sent()
    seen = hidden(truth, 0.1)
    guess = registry.attack(name)(seen, rng=generator(0, "attack"), budget=QUICK)
    ciphertext = {n: torch.where(seen.visible[n], g, 1e3) for n, g in seen.gradients.items()}
    seen = Observation(Message(ciphertext, seen.visible), "vision", seen.granted)
    again = registry.attack(name)(seen, rng=generator(0, "attack"), budget=QUICK)
    assert guess.images is not None and again.images is not None
    assert again.labels == guess.labels and torch.equal(guess.images, again.images)
    if name == "feature-matching":
        assert decibels(guess, truth) > decibels(read("blind", truth), truth) + 3


@pytest.mark.parametrize("name", ("blind", *ATTACKS))
def test_an_attack_reads_only_what_it_declares(name: str) -> None:
    attack, truth = registry.attack(name), sent()
    everything = {
        Grant.MODEL: adversary_copy(truth.model), Grant.BASE_MODEL: NO_TEXT, Grant.LABELS: truth.batch.labels,
        Grant.BATCH_SIZE: 1,
    }  # fmt: skip
    for grants in (attack.needs, attack.needs | attack.uses):
        seen = Observation(truth.message, "vision", {g: v for g, v in everything.items() if g in grants})
        try:
            assert attack(seen, rng=generator(0, "a"), budget=QUICK).images is not None
        except NotApplicable as reason:
            assert name == "blind" and "not granted" in str(reason)
    with pytest.raises(NotApplicable if name == "blind" else NotGranted, match=r"not granted|does not grant"):
        registry.attack(name)(Observation(truth.message, "vision", {}), rng=generator(0, "a"), budget=QUICK)


@pytest.mark.parametrize("name", ATTACKS)
def test_what_cannot_be_read_is_said(name: str) -> None:
    attack, truth = registry.attack(name), sent()
    granted = observe(truth, HONEST_SERVER).granted

    def attempt(gradients: dict[str, Tensor], task: Any = "vision") -> Reconstruction:
        return attack(Observation(Message(gradients), task, granted), rng=generator(0, "a"), budget=QUICK)

    whole = dict(truth.message.gradients)
    with pytest.raises(NotApplicable, match="reads images"):
        attempt(whole, "classification")
    with pytest.raises(NotApplicable, match="no gradient"):
        attempt({})
    with pytest.raises(AttackFailed, match="not finite"):
        attempt({**whole, "body.0.weight": whole["body.0.weight"] * math.nan})
    with pytest.raises(AttackFailed, match="differs from zero"):
        attempt({n: 0 * g for n, g in whole.items()})


@pytest.mark.slow
def test_pure_noise_gives_nothing() -> None:
    truth = sent()
    rng = generator(0, "noise")
    noise = Message({n: torch.randn(g.shape, generator=rng) for n, g in truth.message.gradients.items()})
    seen = Observation(noise, "vision", observe(truth, HONEST_SERVER).granted)
    floor = decibels(read("blind", truth), truth)
    for name in ATTACKS:
        try:
            guess = registry.attack(name)(seen, rng=generator(0, "a"), budget=QUICK)
        except AttackFailed:
            continue
        assert guess.confidence == "matched" and decibels(guess, truth) < floor + 1


def png_of_16_bits(colours: int, count: int) -> bytes:
    """A PNG of 4x4 opaque pixels with 16 bits a channel, which Pillow does not write in colour."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    rows = (b"\0" + b"\xff\xff" * count * 4) * 4
    head = struct.pack(">IIBBBBB", 4, 4, 16, colours, 0, 0, 0)
    parts = (chunk(b"IHDR", head), chunk(b"IDAT", zlib.compress(rows)), chunk(b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def test_an_image_that_rgb_of_8_bits_does_not_show_is_refused(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    ramp = torch.linspace(300, 65_535, SIZE * SIZE).to(torch.int32).reshape(SIZE, SIZE).numpy()
    clear = image.new("RGBA", (SIZE, SIZE), (0, 0, 0, 0))
    clear.paste((0, 0, 0, 255), (4, 4, 20, 20))
    palette = image.new("P", (SIZE, SIZE), 0)
    palette.info["transparency"] = 0
    for name, one, words in (
        ("deep_1.png", image.fromarray(ramp.astype("uint16")), "more than 8 bits"),
        ("clear_1.png", clear, "transparent pixels"),
        ("palette_1.png", palette, "transparent pixels"),
    ):
        one.save(tmp_path / name)
        with pytest.raises(InputError, match=words):
            load_images(tmp_path / name)
    for colours, count in ((0, 1), (2, 3), (4, 2), (6, 4)):  # grey, RGB, and both with transparency
        (tmp_path / "wide_1.png").write_bytes(png_of_16_bits(colours, count))
        with pytest.raises(InputError, match="more than 8 bits"):
            load_images(tmp_path / "wide_1.png")
    for kind in ("RGBA", "L", "P"):
        image.new("RGB", (SIZE, SIZE), (51, 51, 51)).convert(kind).save(tmp_path / f"{kind}_1.png")
        (read_back,) = load_images(tmp_path / f"{kind}_1.png")
        assert torch.allclose(read_back.pixels, torch.full((3, SIZE, SIZE), 0.2), atol=0.02)
