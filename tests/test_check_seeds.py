"""``rasura check-dp``: noise from a generator that a library seeds has no figure, whatever the function is called."""

from __future__ import annotations

from pathlib import Path

import pytest
from check_setting import loop, program, read

from rasura.accounting.configurations import Facts, Stated, checked_files

pytest.importorskip("dp_accounting")

MOD = """
from flwr.clientapp import ClientApp
from flwr.clientapp.mod import LocalDpMod
mod = LocalDpMod(1.0, 2.0, 0.5, 1e-5)
app = ClientApp(mods=[mod])
"""

SEEDED = {
    "transformers": ("import transformers", "transformers.enable_full_determinism(42)"),
    "transformers by name": ("from transformers import enable_full_determinism as fix", "fix(42)"),
    "monai": ("from monai.utils import set_determinism", "set_determinism(seed=0)"),
    "mmengine": ("import mmengine", "mmengine.runner.set_random_seed(0)"),
    "composer": ("from composer.utils.reproducibility import seed_all", "seed_all(0)"),
    "lightning": ("import lightning as L", "L.seed_everything(0)"),
    "a module that seeds": ("from mine.seeding import fix", "fix()"),
    "a module beside": ("from .utils import fix_seeds", "fix_seeds()"),
    "not at once": ("import mmengine", "list(map(mmengine.runner.set_random_seed, [0]))"),
    "by its name": ("import transformers", "getattr(transformers, 'enable_full_determinism')(0)"),
    "one of two": (
        "try:\n    from composer import seed_all\nexcept ImportError:\n    def seed_all(n):\n        pass", "seed_all(0)"
    ),
    "torch": ("", "torch.manual_seed(0)"),
    "torch's state": ("", "torch.set_rng_state(state)"),
    "torch's state elsewhere": ("", "torch.cuda.set_rng_state_all(state)"),
    "torch's generator": ("", "torch.default_generator.set_state(state)"),
    "a state that is told": ("", "torch.save(torch.get_rng_state(), 'state')"),
    "in a function": ("import monai\ndef fix():\n    monai.utils.set_determinism(0)", "fix()"),
    "a Trainer": ("from transformers import Trainer", "Trainer(model=other, args=arguments)"),
    "a Trainer for sequences": ("import transformers as t", "t.Seq2SeqTrainer(other, arguments)"),
    "a Trainer of one's own": ("from transformers import Trainer\nclass Mine(Trainer):\n    pass", "Mine(other)"),
    "a seed that is given": ("from mine import Runner", "Runner(seed=0)"),
    "a seed in settings": ("from mmengine.runner import Runner", "Runner(randomness=dict(seed=0))"),
    "a seed in a dictionary": ("from mmengine.runner import Runner", "Runner(randomness={'seed': 0})"),
    "an object": ("from mine import make", "world = make()\nworld.seed_all(0)"),
}  # fmt: skip


@pytest.mark.parametrize("name", SEEDED)
def test_noise_that_a_library_seeds_has_no_figure_without_secure_mode(tmp_path: Path, name: str) -> None:
    defs, line = SEEDED[name]
    text = program(loop(), defs, line)
    found = read(tmp_path, text)
    assert found.exit_code == 4 and "subtract the noise" in str(found.unknown), found
    secret = read(tmp_path, text.replace("PrivacyEngine()", "PrivacyEngine(secure_mode=True)"))
    assert "subtract the noise" not in str(secret.unknown)
    assert not any("without secure_mode" in note for one in secret.findings for note in one.notes)


OTHER = {
    "numpy": ("import numpy as np", "np.random.seed(0)"),
    "numpy by name": ("from numpy.random import SeedSequence, default_rng", "draws = default_rng(SeedSequence(0))"),
    "numpy's module": ("import numpy.random as r", "r.seed(0)"),
    "python": ("import random", "random.seed(0)"),
    "deterministic algorithms": ("", "torch.use_deterministic_algorithms(True)\ntorch.backends.cudnn.deterministic = True"),
    "a number": ("import argparse", "args = argparse.ArgumentParser().parse_args()\nprint(args.seed)"),
    "a constant": ("from settings import SEED\nimport numpy as np", "np.random.seed(SEED)"),
    "a function of the file": ("import random\ndef set_seed(seed):\n    random.seed(seed)", "set_seed(0)"),
    "rows of another order": ("from datasets import load_dataset", "o = load_dataset('a')\no = o.shuffle(seed=3)"),
    "a fold": ("from sklearn.model_selection import KFold", "folds = KFold(3, random_state=0)"),
}  # fmt: skip


@pytest.mark.parametrize("name", OTHER)
def test_other_generators_and_numbers_are_no_doubt(tmp_path: Path, name: str) -> None:
    found = read(tmp_path, program(loop(), *OTHER[name]))
    assert found.exit_code == 0, found


def test_the_generator_is_named_where_the_program_leaves_secure_mode_out(tmp_path: Path) -> None:
    text = program(loop())
    (plain,) = read(tmp_path, text).findings
    (secret,) = read(tmp_path, text.replace("PrivacyEngine()", "PrivacyEngine(secure_mode=True)")).findings
    (unread,) = read(tmp_path, text.replace("PrivacyEngine()", "PrivacyEngine(secure_mode=safe)")).findings
    assert any("without secure_mode" in one for one in plain.notes) and plain.bounds == secret.bounds
    assert not any("secure_mode" in one for one in secret.notes) and any("secure_mode" in one for one in unread.notes)


@pytest.mark.parametrize(
    ("line", "doubted"),
    [("import numpy as np\nnp.random.seed(0)", True), ("from numpy.random import set_state\nset_state(s)", True),
     ("from transformers import enable_full_determinism\nenable_full_determinism(0)", True),
     ("import monai\nmonai.utils.set_determinism(0)", True), ("import composer\ncomposer.utils.seed_all(0)", True),
     ("from transformers import Trainer\nTrainer(model, args)", True), ("import torch\ntorch.manual_seed(0)", False),
     ("import torch\ng = torch.Generator()\ng.manual_seed(0)", False), ("import random\nrandom.seed(0)", False),
     ("import numpy as np\nr = np.random.default_rng(np.random.SeedSequence(0))", False)],
)  # fmt: skip
def test_flowers_noise_is_that_of_numpys_generator(tmp_path: Path, line: str, doubted: bool) -> None:
    path = tmp_path / "client.py"
    path.write_text(line + MOD, encoding="utf-8")
    found = checked_files([path], Facts(rounds=1, clients=10_000, weights="equal"), Stated(30.0, 1e-5))
    assert (found.exit_code == 4) == doubted and ("subtract the noise" in str(found.unknown)) == doubted, found
