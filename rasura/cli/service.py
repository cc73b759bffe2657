"""``rasura serve`` and ``rasura client``: a model service that sees only token ids."""

from __future__ import annotations

import math
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from rasura.cli.shared import Device, app, err, say, say_json, training_device
from rasura.core.errors import InputError
from rasura.core.rounding import above, below

client = typer.Typer(
    no_args_is_help=True, help="Use a model service: texts and the key stay on this machine, and only token ids are sent."
)
app.add_typer(client, name="client")

Url = Annotated[str, typer.Option(help="address of the server", envvar="RASURA_URL")]
TokenFile = Annotated[
    Path | None, typer.Option(help="file with the token or with name:token, mode 0600; default: the variable RASURA_TOKEN")
]
AllowHttp = Annotated[bool, typer.Option("--allow-http", help="send the token to another machine without encryption")]
KeyFile = Annotated[Path, typer.Option(help="key file of the model; set RASURA_PASSPHRASE if it has a passphrase")]
AsJson = Annotated[bool, typer.Option("--json", help="print the answer as JSON")]
LOCAL = "http://127.0.0.1:8765"


@app.command()
def serve(
    store: Annotated[Path, typer.Option(help="folder for models and jobs")],
    token_file: Annotated[Path, typer.Option(help="file with one line name:token per tenant, mode 0600")],
    host: Annotated[str, typer.Option(help="address to listen on")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="port to listen on")] = 8765,
    max_model: Annotated[int, typer.Option(help="largest model in MiB")] = 2048,
    max_data: Annotated[int, typer.Option(help="largest data set in MiB")] = 256,
    quota: Annotated[int, typer.Option(help="largest total size of a tenant's models in MiB")] = 20480,
    max_memory: Annotated[int, typer.Option(help="memory limit for inference in MiB, in addition to the weights")] = 1024,
    max_training: Annotated[int, typer.Option(help="memory limit of a training job in MiB")] = 8192,
    rate: Annotated[float, typer.Option(help="requests per second and tenant; bursts may be twice as large")] = 50.0,
    device: Device = "auto",
) -> None:
    """Train and run obfuscated models for clients, on token ids. Ctrl-C stops the server; jobs continue at the next start.

    Example: rasura serve --store served --token-file tokens
    """
    from rasura.server.app import serve as run
    from rasura.server.limits import MIB, Limits

    limits = Limits(
        max_model * MIB, max_data * MIB, quota * MIB, rate=rate, burst=max(1, round(2 * rate)), memory=max_memory * MIB,
        training_memory=max_training * MIB,
    )  # fmt: skip
    if host not in ("127.0.0.1", "localhost", "::1"):
        err.print(
            f"{host} accepts connections from other machines, and tokens are sent unencrypted: put a TLS proxy in front"
        )
    told = f"serving on http://{host}:{port}, API documentation at http://{host}:{port}/docs"
    run(
        store, token_file, host=host, port=port, limits=limits, device=training_device(device),
        ready=lambda: say(told, to=err),
    )  # fmt: skip


def _client(url: str, token_file: Path | None, allow_http: bool, key: Path | None = None) -> Any:
    from rasura.server.client import Client
    from rasura.server.limits import private_text

    token = os.environ.get("RASURA_TOKEN", "") if token_file is None else private_text(token_file, "token file").strip()
    # A line of the server's own file does, too.
    token = token.rpartition(":")[2].strip()
    if not token or len(token.split()) != 1:
        raise InputError("no token was given; set RASURA_TOKEN, or pass --token-file with a file that holds one token")
    return Client(url, token, key=key, passphrase=os.environ.get("RASURA_PASSPHRASE"), allow_http=allow_http)


def _print(found: Any, as_json: bool, line: str) -> None:
    if as_json:
        say_json(found)
    else:
        say(line)


@client.command()
def upload(
    folder: Annotated[Path, typer.Argument(help="folder of an obfuscated model, made by rasura protect obfuslm")],
    name: Annotated[str, typer.Argument(help="name of the model on the server")],
    url: Url = LOCAL,
    token_file: TokenFile = None,
    allow_http: AllowHttp = False,
    as_json: AsJson = False,
) -> None:
    """Send an obfuscated model to the server.

    Example: rasura client upload served reviews --token-file token
    """
    with _client(url, token_file, allow_http) as known, err.status("uploading"):
        found = known.upload(folder, name)
    _print(found, as_json, f"{found['name']}: {found['kind']}, {found['vocabulary']} tokens, {found['bytes']} bytes")


@client.command()
def download(
    model: Annotated[str, typer.Argument(help="name of the model on the server")],
    folder: Annotated[Path, typer.Argument(help="new folder for the configuration and the weights")],
    url: Url = LOCAL,
    token_file: TokenFile = None,
    allow_http: AllowHttp = False,
) -> None:
    """Download a model from the server. Anyone with its key can run it.

    Example: rasura client download reviews-1 mine --token-file token
    """
    with _client(url, token_file, allow_http) as known, err.status("downloading"):
        found = known.download(model, folder)
    _print(None, False, f"{found}: run it with rasura.ObfuscatedTokenizer and the key of the model that was uploaded")


@client.command(name="train")
def train_remotely(
    model: Annotated[str, typer.Argument(help="name of the model on the server")],
    data: Annotated[str, typer.Argument(help="training texts: JSONL, CSV or Parquet file, or data set id")],
    output: Annotated[str, typer.Argument(help="name of the trained model")],
    key: KeyFile,
    method: Annotated[
        str,
        typer.Option(help="full, or lora: train the first two blocks and the last one in full, the others with adapters"),
    ] = "full",
    epochs: Annotated[int, typer.Option(help="largest number of epochs")] = 10,
    batch_size: Annotated[int | None, typer.Option(help="texts per step; default 32, for causal models 8")] = None,
    learning_rate: Annotated[
        float | None, typer.Option(help="learning rate of AdamW; default 2e-5, for causal models 1e-4")
    ] = None,
    rank: Annotated[
        int | None, typer.Option(help="rank of the adapters; default 256, or the model's width if smaller")
    ] = None,
    patience: Annotated[int, typer.Option(help="epochs without improvement before training stops")] = 5,
    seed: Annotated[int, typer.Option(help="seed for the order of texts")] = 0,
    truncate: Annotated[bool, typer.Option("--truncate", help="truncate texts that are too long")] = False,
    wait: Annotated[bool, typer.Option("--wait", help="wait until the job has ended")] = False,
    url: Url = LOCAL,
    token_file: TokenFile = None,
    allow_http: AllowHttp = False,
    as_json: AsJson = False,
) -> None:
    """Start a fine-tuning job on token ids.

    Example: rasura client train reviews train.jsonl reviews-1 --key my.key --token-file token --wait
    """
    with _client(url, token_file, allow_http, key) as known:
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
    state = f"{job['state']} {job['reason']}".rstrip()
    start = f"job {job['id']}: {job['model']} -> {job['output']}, {state}, epoch {job['epoch']} of at most {job['of']}"
    if job["state"] not in ("running", "done"):
        return start
    kept = job.get("kept") or {"epoch": None, "reason": "the server does not say which epoch it kept"}
    if kept["epoch"] is None:
        return f"{start}; not measured: {kept['reason']}"
    figures = {name: f"{name} {_figure(name, value)}" for name, value in kept["figures"].items()}
    of_training = figures.pop("train_loss")
    if (ends := kept["accuracy_interval"]) is not None:
        figures["accuracy"] += f" ({ends[0]:.2f} to {ends[1]:.2f})"
    best = "kept" if job["state"] == "done" else "best so far"
    why = f" ({kept['reason']})" if kept["reason"] else ""
    told = ", ".join([f"held-out texts: {kept['held_out']}", *figures.values()])
    return f"{start}; {best}: epoch {kept['epoch']}, {of_training}; {told}{why}"


def _figure(name: str, value: float | None) -> str:
    """A figure that is rounded to the side on which it does not look better."""
    if value is None:
        return "not measured"
    return above(value, 3) if name.endswith(("loss", "perplexity")) else below(value)


@client.command()
def status(
    job: Annotated[str | None, typer.Argument(help="id of a job; without it, all jobs and models")] = None,
    url: Url = LOCAL,
    token_file: TokenFile = None,
    allow_http: AllowHttp = False,
    as_json: AsJson = False,
) -> None:
    """Show the state of the jobs, and the models on the server.

    Example: rasura client status --token-file token
    """
    with _client(url, token_file, allow_http) as known:
        if job is not None:
            found = known.status(job)
            return _print(found, as_json, _told(found))
        models, jobs = known.models(), known.jobs()
    lines = [f"model {m['name']}: {m['kind']}, {m['bytes']} bytes" for m in models] + [_told(j) for j in jobs]
    return _print({"models": models, "jobs": jobs}, as_json, "\n".join(lines) or "there are no models and no jobs")


@client.command()
def classify(
    model: Annotated[str, typer.Argument(help="name of the model on the server")],
    texts: Annotated[list[str], typer.Argument(help="texts, or one file: JSONL, JSON, CSV, TSV or Parquet")],
    key: KeyFile,
    truncate: Annotated[bool, typer.Option("--truncate", help="truncate texts that are too long")] = False,
    url: Url = LOCAL,
    token_file: TokenFile = None,
    allow_http: AllowHttp = False,
    as_json: AsJson = False,
) -> None:
    """Classify texts. Each is printed behind its label and the label's probability, which is rounded down.

    Example: rasura client classify reviews-1 "a fine film" --key my.key --token-file token
    """
    from rasura.data.rows import names_file
    from rasura.data.text import load_examples

    pairs = None
    files = [text for text in texts if names_file(text)]
    if files and len(texts) > 1:
        raise InputError(f"{files[0]} names a file, and {len(texts)} arguments were given; pass texts, or one file alone")
    if files:
        examples = load_examples(texts[0])
        texts = [e.text for e in examples]
        pairs = [e.text_pair or "" for e in examples] if any(e.text_pair for e in examples) else None
    with _client(url, token_file, allow_http, key) as known:
        answers = known.classify(model, texts, pairs, truncate=truncate)
    found = [{"label": a.label, "probabilities": a.probabilities} for a in answers]
    # No text is certain: a probability of 1 is one that float64 cannot tell from it.
    likely = [below(min(a.probabilities[a.label], math.nextafter(1.0, 0.0))) for a in answers]
    _print(found, as_json, "\n".join(f"{a.label}  {p}  {text}" for a, p, text in zip(answers, likely, texts)))


@client.command()
def generate(
    model: Annotated[str, typer.Argument(help="name of the model on the server")],
    prompt: Annotated[str, typer.Argument(help="text to continue")],
    key: KeyFile,
    new_tokens: Annotated[int, typer.Option(help="largest number of new tokens")] = 64,
    temperature: Annotated[float, typer.Option(help="sampling temperature; 0 always takes the most probable token")] = 0.0,
    top_k: Annotated[int, typer.Option(help="number of most probable tokens to sample from; 0: all")] = 0,
    seed: Annotated[int | None, typer.Option(help="sampling seed")] = None,
    url: Url = LOCAL,
    token_file: TokenFile = None,
    allow_http: AllowHttp = False,
    as_json: AsJson = False,
) -> None:
    """Generate a continuation of a text.

    Example: rasura client generate stories-1 "Once upon a time" --key my.key --token-file token
    """
    with _client(url, token_file, allow_http, key) as known:
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
    model: Annotated[str, typer.Argument(help="name of the model on the server")],
    url: Url = LOCAL,
    token_file: TokenFile = None,
    allow_http: AllowHttp = False,
) -> None:
    """Delete a model from the server.

    Example: rasura client delete reviews --token-file token
    """
    with _client(url, token_file, allow_http) as known:
        known.delete(model)
