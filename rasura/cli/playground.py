"""``rasura playground``: type a text and watch it come back."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from rasura.cli.shared import TextTask, app, err, say, split
from rasura.core.errors import InputError

Models = Annotated[
    str, typer.Option("--model", help="models to choose from, separated by commas: minilm, smollm2 or folders")
]
Port = Annotated[int, typer.Option(help="port on this machine; 0 for any that is free", min=0, max=65535)]
Browser = Annotated[bool, typer.Option("--open", help="open the page in the browser")]


@app.command()
def playground(model: Models = "minilm", task: TextTask = None, port: Port = 8600, browser: Browser = False) -> None:
    """Open a page on this machine where a text is read back from one training step, under the protection that you choose.

    Nothing leaves this machine. --task is that of folders. Ctrl-C ends it.

    Example: rasura playground --model minilm,smollm2
    """
    from rasura.core.options import known as option
    from rasura.data.text import demo_examples
    from rasura.report.template import filled
    from rasura.runs.playground import ADVERSARIES, FIRST, PROTECTIONS, Playground
    from rasura.server.loopback import Loopback

    names = split(model)
    if not names:
        raise InputError("no model was given; pass --model minilm")
    kind: Any = None if task is None else option("task", task, ("classification", "causal"))
    with err.status("loading the models"):
        known = Playground(names, kind)
    page = filled(
        "playground.html", models=known.names, protections=PROTECTIONS, adversaries=ADVERSARIES, first=FIRST,
        texts=[e.text for e in demo_examples()],
    )  # fmt: skip
    with Loopback(page, known.answers, port) as server:
        say(f"playground: {server.url}")
        if browser:
            typer.launch(server.url)
        server.serve_forever()
