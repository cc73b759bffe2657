"""``rasura serve`` and ``rasura client``: a model service that sees token ids alone."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from rasura.cli.shared import app, device_named, err, out
from rasura.errors import InputError

client = typer.Typer(no_args_is_help=True, help="Use a model service: texts and the key stay here, token ids go out.")
app.add_typer(client, name="client")

Url = Annotated[str, typer.Option(help="the server", envvar="RASURA_URL")]
TokenFile = Annotated[
    Path | None, typer.Option(help="file that holds the token alone, or name:token; 0600; else RASURA_TOKEN is taken")
]
KeyFile = Annotated[Path, typer.Option(help="the model's key; with a passphrase, set RASURA_PASSPHRASE")]
AsJson = Annotated[bool, typer.Option("--json", help="print the answer as JSON")]
LOCAL = "http://127.0.0.1:8000"


@app.command()
def serve(
    store: Annotated[Path, typer.Option(help="folder of models and jobs")],
    token_file: Annotated[Path, typer.Option(help="lines name:token, one a tenant; 0600")],
    host: Annotated[str, typer.Option(help="address to listen on")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="port to listen on")] = 8000,
    max_model: Annotated[int, typer.Option(help="MiB of a model, at most")] = 2048,
    max_data: Annotated[int, typer.Option(help="MiB of a data set, at most")] = 256,
    quota: Annotated[int, typer.Option(help="MiB of a tenant's models together")] = 20480,
    max_memory: Annotated[int, typer.Option(help="MiB that answering takes beside the weights, at most")] = 1024,
    max_training: Annotated[int, typer.Option(help="MiB that a training job takes, at most")] = 8192,
    rate: Annotated[float, typer.Option(help="requests a second of a tenant; twice as many at once")] = 50.0,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or mps")] = "auto",
) -> None:
    """Train and run obfuscated models for others, on token ids. Ctrl-C ends it; jobs go on at the next start.

    Example: rasura serve --store served --token-file tokens
    """
    from rasura.service.limits import MIB, Limits
    from rasura.service.server import serve as run

    limits = Limits(
        max_model * MIB, max_data * MIB, quota * MIB, rate=rate, burst=max(1, round(2 * rate)), memory=max_memory * MIB,
        training_memory=max_training * MIB,
    )  # fmt: skip
    if host not in ("127.0.0.1", "localhost", "::1"):
        err.print(f"{host} is open to others, and tokens are sent as they are: put a TLS proxy in front")
    told = f"serving on http://{host}:{port}, described at http://{host}:{port}/docs"
    run(
        store, token_file, host=host, port=port, limits=limits, device=device_named(device),
        ready=lambda: err.print(told, markup=False, highlight=False, soft_wrap=True),
    )  # fmt: skip


def _client(url: str, token_file: Path | None, key: Path | None = None) -> Any:
    from rasura.service.client import Client
    from rasura.service.limits import private_text

    token = os.environ.get("RASURA_TOKEN", "") if token_file is None else private_text(token_file, "token file").strip()
    # A line of the server's own file does, too.
    token = token.rpartition(":")[2].strip()
    if not token or len(token.split()) != 1:
        raise InputError("no token: set RASURA_TOKEN, or pass --token-file, a file that holds one token")
    return Client(url, token, key=key, passphrase=os.environ.get("RASURA_PASSPHRASE"))


def _print(found: Any, as_json: bool, line: str) -> None:
    if as_json:
        sys.stdout.write(json.dumps(found) + "\n")
    else:
        out.print(line, markup=False, highlight=False, soft_wrap=True)


@client.command()
def upload(
    folder: Annotated[Path, typer.Argument(help="obfuscated model, made by rasura protect obfuslm")],
    name: Annotated[str, typer.Argument(help="what the server shall call it")],
    url: Url = LOCAL,
    token_file: TokenFile = None,
    as_json: AsJson = False,
) -> None:
    """Send an obfuscated model to the server.

    Example: rasura client upload served reviews --token-file token
    """
    with _client(url, token_file) as known, err.status("uploading"):
        found = known.upload(folder, name)
    _print(found, as_json, f"{found['name']}: {found['kind']}, {found['vocabulary']} tokens, {found['bytes']} bytes")


@client.command()
def download(
    model: Annotated[str, typer.Argument(help="the server's name of the model")],
    folder: Annotated[Path, typer.Argument(help="new folder for its config and weights")],
    url: Url = LOCAL,
    token_file: TokenFile = None,
) -> None:
    """Fetch a model, trained or not, from the server; with its key it runs anywhere.

    Example: rasura client download reviews-1 mine --token-file token
    """
    with _client(url, token_file) as known, err.status("downloading"):
        found = known.download(model, folder)
    _print(None, False, f"{found}: run it with rasura.ObfuscatedTokenizer and the key of the model that was uploaded")


@client.command(name="train")
def train_remotely(
    model: Annotated[str, typer.Argument(help="the server's name of the model")],
    data: Annotated[str, typer.Argument(help="training texts: JSONL, CSV, Parquet or data set id")],
    output: Annotated[str, typer.Argument(help="name of the trained model")],
    key: KeyFile,
    method: Annotated[
        str, typer.Option(help="full, or lora: the first two blocks and the last whole, the rest by adapters")
    ] = "full",
    epochs: Annotated[int, typer.Option(help="at most")] = 10,
    batch_size: Annotated[int | None, typer.Option(help="texts a step; 32, causal 8")] = None,
    learning_rate: Annotated[float | None, typer.Option(help="of AdamW; 2e-5, causal 1e-4")] = None,
    rank: Annotated[int | None, typer.Option(help="of the adapters; 256, or the model's width")] = None,
    patience: Annotated[int, typer.Option(help="epochs without improvement until it ends")] = 5,
    seed: Annotated[int, typer.Option(help="of the order of texts")] = 0,
    truncate: Annotated[bool, typer.Option("--truncate", help="cut texts that are too long")] = False,
    wait: Annotated[bool, typer.Option("--wait", help="until the job is at its end")] = False,
    url: Url = LOCAL,
    token_file: TokenFile = None,
    as_json: AsJson = False,
) -> None:
    """Start a fine-tuning job on token ids.

    Example: rasura client train reviews train.jsonl reviews-1 --key my.key --token-file token --wait
    """
    with _client(url, token_file, key) as known:
        with err.status("encoding and sending the texts"):
            found = known.train(
                model, data, output, truncate=truncate, method=method, epochs=epochs, batch_size=batch_size,
                learning_rate=learning_rate, rank=rank, patience=patience, seed=seed,
            )  # fmt: skip
        if wait:
            with err.status(f"training, job {found['id']}"):
                found = known.wait(found["id"])
    _print(found, as_json, _told(found))


def _told(job: dict[str, Any]) -> str:
    last = " ".join(f"{k} {v:.3f}" for k, v in (job["epochs"] or [{}])[-1].items() if v is not None)
    state = f"{job['state']} {job['reason']}".rstrip()
    return f"job {job['id']}: {job['model']} -> {job['output']}, {state}, epoch {job['epoch']} {last}".rstrip()


@client.command()
def status(
    job: Annotated[str | None, typer.Argument(help="a job; all jobs and models if none")] = None,
    url: Url = LOCAL,
    token_file: TokenFile = None,
    as_json: AsJson = False,
) -> None:
    """Where jobs stand, and which models there are.

    Example: rasura client status --token-file token
    """
    with _client(url, token_file) as known:
        if job is not None:
            found = known.status(job)
            return _print(found, as_json, _told(found))
        models, jobs = known.models(), known.jobs()
    lines = [f"model {m['name']}: {m['kind']}, {m['bytes']} bytes" for m in models] + [_told(j) for j in jobs]
    return _print({"models": models, "jobs": jobs}, as_json, "\n".join(lines) or "no models and no jobs")


@client.command()
def classify(
    model: Annotated[str, typer.Argument(help="the server's name of the model")],
    texts: Annotated[list[str], typer.Argument(help="texts, or one file: JSONL, CSV or Parquet")],
    key: KeyFile,
    truncate: Annotated[bool, typer.Option("--truncate", help="cut texts that are too long")] = False,
    url: Url = LOCAL,
    token_file: TokenFile = None,
    as_json: AsJson = False,
) -> None:
    """Label texts.

    Example: rasura client classify reviews-1 "a fine film" --key my.key --token-file token
    """
    from rasura.data.text import load_examples

    pairs = None
    if len(texts) == 1 and Path(texts[0]).suffix in (".jsonl", ".csv", ".parquet"):
        examples = load_examples(texts[0])
        texts = [e.text for e in examples]
        pairs = [e.text_pair or "" for e in examples] if any(e.text_pair for e in examples) else None
    with _client(url, token_file, key) as known:
        answers = known.classify(model, texts, pairs, truncate=truncate)
    found = [{"label": a.label, "probabilities": a.probabilities} for a in answers]
    _print(
        found, as_json, "\n".join(f"{a.label}  {a.probabilities[a.label]:.3f}  {text}" for a, text in zip(answers, texts))
    )


@client.command()
def generate(
    model: Annotated[str, typer.Argument(help="the server's name of the model")],
    prompt: Annotated[str, typer.Argument(help="the text to continue")],
    key: KeyFile,
    new_tokens: Annotated[int, typer.Option(help="at most")] = 64,
    temperature: Annotated[float, typer.Option(help="0: the likeliest token each time")] = 0.0,
    top_k: Annotated[int, typer.Option(help="tokens to draw from; 0: all")] = 0,
    seed: Annotated[int | None, typer.Option(help="of the draws")] = None,
    url: Url = LOCAL,
    token_file: TokenFile = None,
    as_json: AsJson = False,
) -> None:
    """Continue a text.

    Example: rasura client generate stories-1 "Once upon a time" --key my.key --token-file token
    """
    with _client(url, token_file, key) as known:
        pieces = known.generate(model, prompt, new_tokens=new_tokens, temperature=temperature, top_k=top_k, seed=seed)
        if as_json:
            return _print({"text": "".join(pieces)}, True, "")
        for piece in pieces:
            sys.stdout.write(piece)
            sys.stdout.flush()
    sys.stdout.write("\n")
    return None


@client.command()
def delete(
    model: Annotated[str, typer.Argument(help="the server's name of the model")],
    url: Url = LOCAL,
    token_file: TokenFile = None,
) -> None:
    """Delete a model from the server.

    Example: rasura client delete reviews --token-file token
    """
    with _client(url, token_file) as known:
        known.delete(model)
