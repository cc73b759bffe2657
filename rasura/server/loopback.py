"""A page for one person on this machine: it listens on the loopback address and answers no other page. Standard library
only."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from rasura.core.errors import InputError
from rasura.core.strict_json import strict_json

LONGEST = 100_000
"""Bytes of a question."""

POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; base-uri 'none'"
"""What the page may load: nothing from elsewhere."""

Answers = Callable[[Mapping[str, Any]], Iterator[Mapping[str, Any]]]


class Loopback(ThreadingHTTPServer):
    """Serves ``page``, and the values of ``answers`` to each question that the page sends, one JSON value a line.

    ``port``: 0 for any that is free. Raises ``InputError`` if the port is taken.
    """

    daemon_threads = True

    def __init__(self, page: str, answers: Answers, port: int = 0) -> None:
        self.page, self.answers = page.encode(), answers
        try:
            super().__init__(("127.0.0.1", port), _Handler)
        except OSError as error:
            raise InputError(f"port {port} cannot be used ({error}); pass another --port") from None

    @property
    def url(self) -> str:
        """Where the page is."""
        return f"http://127.0.0.1:{self.server_port}"

    @property
    def hosts(self) -> set[str]:
        """The names by which the page may be called; others belong to pages that had a name resolve to this machine."""
        return {f"127.0.0.1:{self.server_port}", f"localhost:{self.server_port}"}


class _Handler(BaseHTTPRequestHandler):
    server: Loopback

    def do_GET(self) -> None:
        """The page."""
        if self.headers.get("Host") not in self.server.hosts:
            return self.send_error(HTTPStatus.FORBIDDEN)
        if self.path.partition("?")[0] != "/":
            return self.send_error(HTTPStatus.NOT_FOUND)
        self._begin("text/html; charset=utf-8")
        self.wfile.write(self.server.page)
        return None

    def do_POST(self) -> None:
        """The answers to a question."""
        hosts = self.server.hosts
        ours = self.headers.get("Origin") in {f"http://{host}" for host in hosts} and self.headers.get("Host") in hosts
        if not ours or self.headers.get("Content-Type") != "application/json":
            return self.send_error(HTTPStatus.FORBIDDEN)
        length = self.headers.get("Content-Length", "")
        if not length.isdecimal() or int(length) > LONGEST:
            return self.send_error(HTTPStatus.REQUEST_ENTITY_TOO_LARGE)
        body = self.rfile.read(int(length))
        self._begin("application/x-ndjson")
        try:
            asked = json.loads(body)
            if not isinstance(asked, dict):
                raise InputError("a question is a JSON object")
            for answer in self.server.answers(asked):
                self._tell(answer)
        except (InputError, ValueError) as error:
            self._tell({"kind": "error", "says": str(error)})
        except OSError:
            pass  # the page was closed
        except Exception as error:  # named to the person, who sees an error and no result
            self._tell({"kind": "error", "says": f"the attack could not be run ({type(error).__name__})"})
        return None

    def _begin(self, kind: str) -> None:
        self.send_response(HTTPStatus.OK)
        headers = {"Content-Type": kind, "Content-Security-Policy": POLICY, "X-Content-Type-Options": "nosniff"}
        for name, value in {**headers, "Referrer-Policy": "no-referrer", "Cache-Control": "no-store"}.items():
            self.send_header(name, value)
        self.end_headers()

    def _tell(self, answer: Mapping[str, Any]) -> None:
        self.wfile.write(strict_json(answer).encode() + b"\n")
        self.wfile.flush()

    def log_message(self, format: str, *args: Any) -> None:
        """No request is written down: a text is private."""
