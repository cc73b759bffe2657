"""Which figures the pictures of the explanation pages show."""

from __future__ import annotations

from dataclasses import dataclass

RESULTS = "studies/RESULTS.md"
BENCHMARKS = "benchmarks/README.md"


@dataclass(frozen=True)
class Bar:
    """A cell of the row that holds the cells ``row``, or ``column=cell``; ``column``: if it is not the picture's.

    ``guess``: a baseline.
    """

    label: str
    row: tuple[str, ...]
    column: str = ""
    guess: bool = False


@dataclass(frozen=True)
class Picture:
    """Bars from the tables of one section of a file. ``axis``: ``{n}`` stands for the rows' numbers of texts."""

    name: str
    title: str
    file: str
    section: str
    column: str
    axis: str
    bars: tuple[Bar, ...]
    most: float = 0


def _sealed(mask: str, *attacks: tuple[str, str]) -> tuple[Bar, ...]:
    ratio = f"{100 * float(mask.partition('=')[2]):.0f} %"
    return tuple(Bar(f"{ratio} sealed: {said}", (attack, f"frozen-embeddings+sealing:{mask}")) for attack, said in attacks)


def _shadow(*noises: tuple[str, str]) -> tuple[Bar, ...]:
    trained = "frozen-embeddings+frozen-blocks:6"
    return tuple(Bar(f"{said}: {attack}", (trained + noise, attack)) for noise, said in noises for attack in ("mia", "rmia"))


WHOLE = (("lamp-cos", "LAMP"), ("span", "span"), ("span-matching", "span matching"))
THREE = (("lamp-cos", "LAMP"), ("dager", "DAGER"), ("span", "span"))

PICTURES = (
    Picture(
        "selective-encryption", "What is read while the largest entries are sealed", RESULTS,
        "selective-encryption/table4: Sealing ratio against LAMP, DAGER and the adaptive span attack, an encoder", "R-1",
        "ROUGE-1 in percent, MiniLM, {n} CoLA sentences, 95 % intervals",
        (
            Bar("guessing", ("lamp-cos", "frozen-embeddings+sealing:grad=0.1"), "blind R-1", guess=True),
            *_sealed("grad=0.1", *THREE), *_sealed("grad=0.3", *THREE), *_sealed("grad=0.6", *THREE),
        ), 100,
    ),
    Picture(
        "grab", "What is read under dropout of 0.1", RESULTS,
        "grab/figure3: Practical settings: dropout 0.1, frozen embeddings", "R-1",
        "ROUGE-1 in percent, MiniLM, {n} CoLA sentences, 95 % intervals",
        (
            Bar("guessing", ("lamp-cos", "batch=1"), "blind R-1", guess=True),
            *(Bar(said, (attack, "batch=1")) for attack, said in (("lamp-cos", "LAMP"), ("grab", "GRAB"), ("span", "span"))),
            *(Bar(f"{said}, batch of 2", (attack, "batch=2")) for attack, said in (
                ("lamp-cos", "LAMP"), ("grab", "GRAB"), ("span", "span"),
            )),
        ), 100,
    ),
    Picture(
        "calibration", "Who was trained on, by noise multiplier", RESULTS,
        "calibration/table1-cola: Membership inference, CoLA", "AUC",
        "AUC in percent (guessing: 50), MiniLM, 1,000 CoLA sentences, 95 % intervals",
        (
            Bar("guessing", ("frozen-embeddings+frozen-blocks:6", "blind"), guess=True),
            *_shadow(
                ("", "no noise"), ("+dp-sgd:0.014", "0.014, epsilon 96,900"), ("+dp-sgd:0.278", "0.278, epsilon 144"),
                ("+dp-sgd:1.91", "1.91, epsilon 1.48"),
            ),
        ), 100,
    ),
    Picture(
        "ghost", "Tokens named behind GHOST, as published", "docs/ghost.md", "What it does not protect", "published: tokens",
        "tokens named at their place in percent, MiniLM, 64 sentences of SST-2, 95 % intervals",
        (
            Bar("guessing", ("blind: the usual words",), guess=True),
            Bar("stops at the substitutes", ("stops at the substitutes",)),
            Bar("paper: sampling", ("`ghost-sampling` (paper)",)), Bar("paper: maximum", ("`ghost-maximum` (paper)",)),
            Bar("learned among preimages", ("`ghost-generation`, which learned from 128 training sentences",)),
            Bar("lattice with trigrams", ("the same with their trigrams (`--reference`)",)),
        ), 100,
    ),
    Picture(
        "obfuslm", "Ids named behind ObfusLM (k = 10, epsilon = 0.1)", RESULTS,
        "obfuslm/invbert: InvBert at epsilon 0.1", "top-1",
        "tokens named in percent, MiniLM, 64 sentences of SST-2, ten keys, 95 % intervals",
        (
            Bar("guessing", ("obfuslm:k=10/epsilon=0.1", "blind"), guess=True),
            *(Bar(said, ("obfuslm:k=10/epsilon=0.1", attack)) for attack, said in (
                ("knn", "nearest rows"), ("invbert", "InvBert"), ("decipherment", "decipherment"),
            )),
            Bar("no protection: nearest rows", ("none", "knn")),
        ), 100,
    ),
    Picture(
        "dropout-spans", "What span reads under dropout of 0.1, frozen embeddings", BENCHMARKS, "The ladder", "`span`",
        "ROUGE-1 in percent, texts of 16 tokens unless said otherwise, 95 % intervals",
        (
            Bar("MiniLM: guessing", ("batch", "minilm", "16", "1", "frozen, dropout"), "blind", guess=True),
            Bar("MiniLM", ("batch", "minilm", "en", "16", "1", "frozen, dropout")),
            Bar("MiniLM, batch of 4", ("batch", "minilm", "en", "4", "frozen, dropout")),
            Bar("MiniLM, 128 tokens", ("length", "minilm", "128", "frozen, dropout")),
            Bar("MPNet", ("model", "mpnet", "1", "frozen, dropout")),
            Bar("DistilBERT, batch of 4", ("model", "distilbert", "4", "frozen, dropout")),
            Bar("SmolLM2 (decoder)", ("batch", "smollm2", "1", "frozen, dropout")),
            Bar("SmolLM2, batch of 4", ("batch", "smollm2", "en", "4", "frozen, dropout")),
        ), 100,
    ),
    Picture(
        "hidden-entries", "Six tenths of all entries sealed, by four significances", RESULTS,
        "selective-encryption/table4: Sealing ratio against LAMP, DAGER and the adaptive span attack, an encoder", "R-1",
        "ROUGE-1 in percent, MiniLM, {n} CoLA sentences, 95 % intervals",
        (
            Bar("guessing", ("dager", "frozen-embeddings+sealing:grad=0.6"), "blind R-1", guess=True),
            *(
                Bar(f"{mask}: {said}", (attack, f"frozen-embeddings+sealing:{mask}=0.6"))
                for mask in ("grad", "sens", "prodsig", "param")
                for attack, said in (("dager", "hidden as zero"), ("span", "completed"))
            ),
        ), 100,
    ),
    Picture(
        "any-block", "A fifth of the layers sealed: what the others tell", RESULTS,
        "selective-encryption/table3: Attn and OneFifth: whole layers sealed", "R-1",
        "ROUGE-1 in percent, MiniLM, {n} CoLA sentences, 95 % intervals",
        (
            Bar("guessing", ("lamp-cos", "frozen-embeddings+sealing:onefifth-1"), "blind R-1", guess=True),
            *(
                Bar(f"{place} fifth: {said}", (attack, f"frozen-embeddings+sealing:onefifth-{number}"))
                for number, place in ((1, "first"), (3, "third"), (5, "last"))
                for attack, said in WHOLE
                if (number, attack) != (1, "span")
            ),
            Bar("attention sealed: LAMP", ("lamp-cos", "frozen-embeddings+sealing:attn")),
        ), 100,
    ),
    Picture(
        "ghost-lattice", "The lattice over GHOST's preimages, by what the adversary knows of the language", "docs/ghost.md",
        "What it does not protect", "published: tokens",
        "tokens named at their place in percent, MiniLM, 64 sentences of SST-2, 95 % intervals",
        (
            Bar("guessing", ("blind: the usual words",), guess=True),
            Bar("chances of preimages alone", ("`ghost-lattice`, the chance of each preimage alone",)),
            Bar("English word frequencies", ("the same with English word frequencies",)),
            Bar("frequencies of its kind", ("the same with word frequencies of 20,000 training sentences",)),
            Bar("trigrams of its kind", ("the same with their trigrams (`--reference`)",)),
            Bar("trigrams, groups of 8", ("the same with their trigrams (`--reference`)",), "`group=8`: tokens"),
            Bar("trigrams, groups of 16", ("the same with their trigrams (`--reference`)",), "`group=16`: tokens"),
        ), 100,
    ),
    Picture(
        "noise-bits", "The price of randomness without a seed", BENCHMARKS, "Secret randomness", "secret",
        "CPU seconds: numbers for all 22.7 million weights of MiniLM, and whole steps on 8 texts",
        tuple(
            Bar(f"{said}: {how}", (row,), how, guess=how == "seeded, PyTorch")
            for row, said in (
                ("normals, float32", "normals"), ("masks of dropout", "masks"), ("step, `dropout:0.1`", "step, dropout"),
                ("step, `gaussian:0.001`", "step, noise"),
            )
            for how in ("seeded, PyTorch", "secret")
        ),
    ),
)  # fmt: skip
