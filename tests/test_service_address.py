"""The client's token goes to this machine or over https, and elsewhere only where that is asked for by name."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from rasura.cli import app
from rasura.core.errors import InputError
from rasura.server.client import Client

pytest.importorskip("httpx")

HERE = ("http://127.0.0.1:8765", "http://localhost:8765", "HTTP://LOCALHOST", "http://[::1]:8765", "http://127.1.2.3")
SAFE = ("https://models.example", "https://10.0.0.7:8765")
ELSEWHERE = (
    "http://models.example", "http://10.0.0.7:8765", "HTTP://models.example", "http://localhost.example", "http://0.0.0.0:1",
    "http://127.0.0.1@models.example", "http://127.0.0.1.example", "http://[2001:db8::1]:8765",
)  # fmt: skip


@pytest.mark.parametrize("url", ELSEWHERE)
def test_a_token_is_not_sent_to_another_machine_without_encryption(url: str) -> None:
    with pytest.raises(InputError, match=r"could read the token; expected https://, or --allow-http"):
        Client(url, "secret-token")
    with Client(url, "secret-token", allow_http=True) as client:
        assert client.url == url


@pytest.mark.parametrize("url", [*HERE, *SAFE])
def test_this_machine_and_https_need_no_leave(url: str) -> None:
    with Client(url, "secret-token") as client:
        assert client.url == url


@pytest.mark.slow
def test_every_command_of_the_client_takes_the_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RASURA_TOKEN", "secret-token")
    asked = ["client", "status", "--url", "http://models.invalid:1"]
    refused = CliRunner().invoke(app, asked)
    assert refused.exit_code != 0 and "could read the token" in str(refused.exception or refused.output)
    allowed = CliRunner().invoke(app, [*asked, "--allow-http"])
    assert "no answer from http://models.invalid:1" in str(allowed.exception or allowed.output)
    for name in ("upload", "download", "train", "status", "classify", "generate", "delete"):
        shown = CliRunner().invoke(app, ["client", name, "--help"], env={"COLUMNS": "200", "TERM": "dumb"})
        assert "--allow-http" in shown.output, name
