"""The memory of a request is counted before it runs: what is too much is refused or split, and others are served."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from service_setting import ALICE, BOB, Server, Setting, ask, container, make_models, token_file

from rasura.server import memory
from rasura.server.container import CONTENT_TYPE
from rasura.server.limits import MIB, Limits, Refused
from rasura.server.models import checked, opened
from rasura.testing.tiny import tiny

BERT = {
    "kind": "classification", "hidden": 768, "blocks": 12, "heads": 12, "inner": 3072, "vocabulary": 30522, "labels": 2,
    "parameters": 110_000_000,
}  # fmt: skip
LLAMA = {**BERT, "kind": "causal", "labels": 0, "vocabulary": 32000, "heads": 32, "hidden": 2048}
abouts = st.sampled_from([BERT, LLAMA, {**BERT, "heads": 1, "hidden": 8, "inner": 16, "blocks": 1}])
limits = st.integers(1, 4096).map(lambda n: n * MIB)


def test_usual_requests_fit_a_laptop_and_squares_of_long_ones_do_not() -> None:
    usual = Limits()
    memory.check_text(BERT, 0, 512, usual.memory)
    memory.check_job(BERT, 32, 128, usual.training_memory)
    memory.check_text(LLAMA, 0, 1024, usual.memory, 256)
    with pytest.raises(Refused, match=r"^text 3 of 9000 tokens needs \d+ MiB, but this server allows 1024; send") as found:
        memory.check_text(LLAMA, 3, 9000, usual.memory)
    assert found.value.status == 413
    with pytest.raises(Refused, match=r"text 0 of 10 tokens and 100000 new ones needs"):
        memory.check_text(LLAMA, 0, 10, usual.memory, 100_000)
    with pytest.raises(Refused, match=r"^training on 512 texts per step, of up to 512 tokens, needs \d+ MiB, but this"):
        memory.check_job(BERT, 512, 512, usual.training_memory)


@given(abouts, st.lists(st.integers(1, 9000), max_size=300), limits)
def test_batches_hold_each_text_once_and_stay_below_the_limit(about: dict[str, Any], lengths: list[int], most: int) -> None:
    found = memory.groups(about, lengths, most)
    assert sorted(k for some in found for k in some) == list(range(len(lengths)))
    for some in found:
        assert 1 <= len(some) <= memory.TEXTS
        assert len(some) == 1 or memory.running(about, len(some), max(lengths[k] for k in some)) <= most


@given(abouts, st.lists(st.tuples(st.integers(1, 9000), st.integers(1, 1024)), max_size=60), limits)
def test_prompts_side_by_side_stay_below_the_limit(about: dict[str, Any], prompts: list[tuple[int, int]], most: int) -> None:
    count = memory.together(about, prompts, most)
    assert min(1, len(prompts)) <= count <= min(memory.PROMPTS, len(prompts))
    if count > 1:
        longest, more = max(p[0] for p in prompts[:count]), max(p[1] for p in prompts[:count])
        assert memory.running(about, count, longest, more) <= most


@given(abouts, st.integers(1, 64), st.integers(1, 9000), st.integers(0, 1024))
def test_more_never_takes_less_and_a_square_is_counted(about: dict[str, Any], batch: int, length: int, more: int) -> None:
    here = memory.running(about, batch, length, more)
    assert here <= memory.running(about, batch + 1, length, more)
    assert here < memory.running(about, batch, length + 1, more) and here <= memory.running(about, batch, length, more + 1)
    assert here >= 4 * batch * about["heads"] * length**2
    assert memory.training(about, batch, length) >= here - memory.running(about, batch, 1, more) * length
    assert memory.training(about, batch, length) >= 4 * (4 * about["parameters"] + about["blocks"] * batch * length**2)


@given(abouts, st.integers(1, 9000), limits)
def test_what_is_let_through_fits(about: dict[str, Any], length: int, most: int) -> None:
    try:
        memory.check_text(about, 0, length, most)
    except Refused as refused:
        assert memory.running(about, 1, length) > most and refused.status == 413
    else:
        assert memory.running(about, 1, length) <= most


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Setting]:
    """A server of little memory: 1 MiB to answer, 8 MiB to train."""
    folder = tmp_path_factory.mktemp("memory")
    make_models(folder)
    config = json.loads((folder / "llama" / "config.json").read_text())
    (folder / "llama" / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 1 << 14}))
    options = ("--rate", "500", "--max-model", "2", "--max-memory", "1", "--max-training", "8")
    server = Server(folder / "store", token_file(folder / "tokens"), folder / "log", options)
    server.start()
    made = Setting(server, folder)
    with made.client() as alice, made.client(BOB) as bob:
        alice.upload(folder / "llama", "stories")
        alice.upload(folder / "bert", "notes")
        bob.upload(folder / "bert", "notes")
    yield made
    server.end()


@pytest.mark.slow
def test_a_request_beyond_the_memory_is_refused_and_others_are_served(small: Setting) -> None:
    long = {"input": [5] * 9000, "new_tokens": 1}
    for path, body in (("stories/generate", long), ("stories/generate", {"input": [5], "new_tokens": 1024})):
        answer = ask(small, "POST", f"/v1/models/{path}", ALICE, json=body)
        assert answer.status_code == 413 and "this server allows 1; send a shorter text" in answer.json()["detail"]
        assert ask(small, "POST", "/v1/models/notes/classify", BOB, json={"inputs": [[1, 5, 2]]}).status_code == 200
    short = ask(small, "POST", "/v1/models/stories/generate", ALICE, json={"input": [5] * 40, "new_tokens": 2})
    assert short.status_code == 200 and len(short.text.splitlines()) == 3
    assert "Traceback" not in small.server.log.read_text()


def test_many_texts_go_in_batches_that_fit_and_each_gets_its_own_answer(small: Setting) -> None:
    about = checked(small.folder / "bert")
    texts = [[1, *(5 + (7 * k + j) % 200 for j in range(3 + (11 * k) % 60)), 2] for k in range(60)]
    lengths = [len(t) for t in texts]
    assert len(memory.groups(about, lengths, MIB)) > 5 and memory.running(about, 1, 64) < MIB
    every = ask(small, "POST", "/v1/models/notes/classify", json={"inputs": texts}).json()["logits"]
    alone = [ask(small, "POST", "/v1/models/notes/classify", json={"inputs": [t]}).json()["logits"][0] for t in texts[:8]]
    assert torch.allclose(torch.tensor(every[:8]), torch.tensor(alone), atol=1e-5) and len(every) == 60


def test_a_job_beyond_the_memory_is_refused_and_leaves_nothing(small: Setting) -> None:
    from safetensors.torch import save

    def job(texts: int, length: int, **settings: Any) -> tuple[int, str]:
        data = {
            "ids": torch.full((texts * length,), 5, dtype=torch.int32),
            "lengths": torch.full((texts,), length, dtype=torch.int32),
            "labels": torch.zeros(texts, dtype=torch.int32),
        }
        body = container({"output": "new", "settings": {"epochs": 1, **settings}}, {"data.safetensors": save(data)})
        answer = ask(small, "POST", "/v1/models/notes/jobs", content=body, headers={"Content-Type": CONTENT_TYPE})
        return answer.status_code, answer.text

    before = small.server.files()
    status, why = job(64, 64, batch_size=64)
    assert status == 413 and "use a smaller batch_size or shorter texts" in why and small.server.files() == before
    assert job(4, 8, batch_size=2)[0] == 202


def test_one_tenant_cannot_fill_the_queue() -> None:
    from rasura.server.inference import Engine

    engine = Engine(None, "cpu", Limits(waiting=3, tenant_waiting=2))  # type: ignore[arg-type]  # nothing is computed
    with engine._counted("alice"), engine._counted("alice"):
        with pytest.raises(Refused, match="2 of your requests are waiting") as found:
            engine.check_room("alice")
        assert found.value.status == 429
        engine.check_room("bob")
        with engine._counted("bob"), pytest.raises(Refused, match="too many requests are waiting"):
            engine.check_room("carol")
    engine.check_room("alice")
    engine.close()


@pytest.mark.parametrize("family", ["bert", "roberta", "distilbert", "gpt2", "llama"])
def test_no_config_makes_a_model_keep_more_than_is_counted(family: str, tmp_path: Path) -> None:
    model: Any = tiny(family, "classification", blocks=2, hidden=32)
    model.save_pretrained(tmp_path)
    ids = {"input_ids": torch.tensor([[1, 5, 9, 2]]), "attention_mask": torch.ones(1, 4, dtype=torch.long)}
    with torch.no_grad():
        expected = model.eval()(**ids).logits
    told, config = checked(tmp_path), json.loads((tmp_path / "config.json").read_text())
    keeping = {
        "output_attentions": True, "output_hidden_states": True, "output_cross_attentions": True, "use_cache": True,
        "return_dict": False, "chunk_size_feed_forward": 3, "attn_implementation": "eager", "problem_type": "regression",
    }  # fmt: skip
    names = {"intermediate_size", "hidden_dim", "n_inner"} - set(config)
    (tmp_path / "config.json").write_text(json.dumps({**config, **keeping, **dict.fromkeys(names, 1)}))
    # Of what is told, the bytes of the new file alone differ.
    assert {**checked(tmp_path), "trained": told["trained"]} == told
    with torch.no_grad():
        found = opened(tmp_path, "classification", "cpu")(**ids)
    assert set(found) == {"logits"} and torch.allclose(found.logits, expected, atol=1e-6)


def test_heads_that_are_wider_than_the_model_count(tmp_path: Path) -> None:
    config = transformers.LlamaConfig(
        vocab_size=100, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8, head_dim=4096,
        num_key_value_heads=2, max_position_embeddings=512, pad_token_id=0,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path)
    about = checked(tmp_path)
    assert about["across"] == 8192 and about["hidden"] == 8
    # Queries, keys and values of all tokens, at least.
    assert memory.running(about, 1, 500) > 4 * 3 * 500 * 8192


MEASURE = """
import json, sys
import torch, transformers
from rasura.runs.attempt import peak_mb
from rasura.server.models import checked, opened
from rasura.server.inference import Decoding, Prompt
from rasura.server import memory
from pathlib import Path

folder, batch, length, kind = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
torch.set_num_threads(1)
about = checked(folder)
model = opened(folder, about["kind"], "cpu")
ids = torch.full((batch, length), 5)

def run(ids):
    if kind == "train":
        model.train()
        steps = torch.optim.AdamW(model.parameters())
        labels = ids if about["kind"] == "causal" else torch.zeros(len(ids), dtype=torch.long)
        for _ in range(2):
            model(input_ids=ids, attention_mask=torch.ones_like(ids), labels=labels).loss.backward()
            steps.step()
            steps.zero_grad()
    elif about["kind"] == "causal":
        decoding = Decoding(model, [Prompt(row.tolist(), 3) for row in ids], 0)
        for _ in range(3):
            decoding.step()
    else:
        with torch.no_grad():
            model(input_ids=ids, attention_mask=torch.ones_like(ids))

if kind != "train":
    run(ids[:1, :8])
before = peak_mb()
run(ids)
took = (peak_mb() - before) * 2**20
told = memory.training(about, batch, length) if kind == "train" else memory.running(about, batch, length, 3)
print(json.dumps([took, told]))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "kind", "batch", "length"),
    [
        ("bert", "run", 1, 1500), ("bert", "run", 32, 200), ("llama", "run", 1, 1500), ("gpt2", "run", 2, 1000),
        ("bert", "train", 2, 700), ("bert", "train", 32, 100), ("llama", "train", 2, 500),
    ],
)  # fmt: skip
def test_the_count_is_above_what_a_process_takes_and_not_far(
    tmp_path: Path, family: str, kind: str, batch: int, length: int
) -> None:
    made: Any = {
        "bert": lambda: transformers.BertForSequenceClassification(
            transformers.BertConfig(
                hidden_size=128, num_hidden_layers=3, num_attention_heads=8, intermediate_size=512, vocab_size=3000,
                max_position_embeddings=2048,
            )
        ),
        "llama": lambda: transformers.LlamaForCausalLM(
            transformers.LlamaConfig(
                hidden_size=128, num_hidden_layers=3, num_attention_heads=8, intermediate_size=512, vocab_size=3000,
                max_position_embeddings=2048,
            )
        ),
        "gpt2": lambda: transformers.GPT2LMHeadModel(
            transformers.GPT2Config(n_embd=128, n_layer=3, n_head=8, vocab_size=3000, n_positions=2048)
        ),
    }[family]()  # fmt: skip
    made.save_pretrained(tmp_path)
    assert load_file(str(tmp_path / "model.safetensors"))
    command = [sys.executable, "-c", MEASURE, str(tmp_path), str(batch), str(length), kind]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    took, told = json.loads(done.stdout)
    assert told / 4 < took < told, (took, told)
