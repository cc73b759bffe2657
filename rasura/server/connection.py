"""A connection to a model service: requests, files, and streamed lines. Only this file uses the HTTP library."""

from __future__ import annotations

import ipaddress
import json
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rasura.core.errors import InputError, MissingExtra
from rasura.server.container import CHUNK, CONFIG, CONTENT_TYPE, WEIGHTS, Incoming, header_bytes, tensor_shapes
from rasura.server.limits import Refused


class Connection:
    """Sends requests to the server at ``url``. Every method raises ``InputError``: with the server's reason if it refuses,
    or if it cannot be reached.

    The token is sent with every request. So ``InputError`` for an address of another machine that is not https://, unless
    ``allow_http``: who is on the way could read the token.
    """

    def __init__(self, url: str, token: str, timeout: float, *, allow_http: bool = False) -> None:
        try:
            import httpx
        except ImportError:
            raise MissingExtra("the client needs httpx; run: pip install 'rasura[service]'") from None
        self.url = url
        self._failed: type[Exception] = httpx.HTTPError
        headers = {"Authorization": f"Bearer {token}"}
        try:
            # Proxies of the environment would see the token.
            self._http = httpx.Client(base_url=url, headers=headers, timeout=timeout, trust_env=False)
        except (httpx.InvalidURL, UnicodeEncodeError):
            raise InputError(f"the address {url} or the token is invalid; expected http://HOST:PORT") from None
        if self._http.base_url.scheme == "http" and not allow_http and not _here(self._http.base_url.host):
            self.close()
            raise InputError(
                f"{url} is another machine without encryption, and who is on the way could read the token; expected "
                "https://, or --allow-http (in Python allow_http=True)"
            )

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def send(self, path: str, about: Mapping[str, Any], place: Path, names: Sequence[str]) -> dict[str, Any]:
        """Post ``about`` and the files ``names`` of ``place``, chunk by chunk. Returns the server's answer."""
        sizes = {name: (place / name).stat().st_size for name in names}
        head = header_bytes(about, sizes)

        def parts() -> Iterator[bytes]:
            yield head
            for name in names:
                with (place / name).open("rb") as file:
                    while chunk := file.read(CHUNK):
                        yield chunk

        headers = {"Content-Type": CONTENT_TYPE, "Content-Length": str(len(head) + sum(sizes.values()))}
        found: dict[str, Any] = self.ask("POST", path, content=parts(), headers=headers)
        return found

    def receive(self, path: str, place: Path) -> None:
        """Fetch a model's files into ``place``. Raises ``InputError`` if the answer is not a model."""
        limits = {CONFIG: 16 * CHUNK, WEIGHTS: 1 << 50}

        async def taken(answer: Any) -> None:
            async def chunks() -> AsyncIterator[bytes]:
                for chunk in answer.iter_raw(CHUNK):
                    yield chunk

            body = Incoming(chunks(), int(answer.headers.get("content-length", 0)))
            head = await body.header(frozenset(limits), limits)
            await body.save(head["files"], place)
            tensor_shapes(place / WEIGHTS)

        try:
            with self._http.stream("GET", path, headers={"Accept-Encoding": "identity"}) as answer:
                if answer.status_code >= 400:
                    raise InputError(_reason(answer.status_code, answer.read()))
                try:
                    # Nothing in it waits: no event loop is needed, and there may be one already, as in a notebook.
                    taken(answer).send(None)
                except StopIteration:
                    return
        except self._failed as error:
            raise InputError(f"no answer from {self.url} ({type(error).__name__})") from None
        except Refused as error:
            raise InputError(f"{self.url} did not send a model: {error}") from None

    def ask(self, method: str, path: str, body: Any = None, **options: Any) -> Any:
        """The server's JSON answer to one request; None if the answer is empty."""
        try:
            answer = self._http.request(method, path, json=body, **options)
        except self._failed as error:
            raise InputError(f"no answer from {self.url} ({type(error).__name__})") from None
        if answer.status_code >= 400:
            raise InputError(_reason(answer.status_code, answer.content))
        try:
            return answer.json() if answer.content else None
        except (ValueError, RecursionError):
            raise InputError(f"the answer of {self.url} is not JSON; is it a server of rasura serve?") from None

    def stream(self, path: str, body: Any) -> Iterator[int]:
        """The streamed ids of the server, one per line. Raises ``InputError`` if the end is missing, or with the reason
        that the server gives in place of it."""
        try:
            with self._http.stream("POST", path, json=body) as answer:
                if answer.status_code >= 400:
                    raise InputError(_reason(answer.status_code, answer.read()))
                for line in answer.iter_lines():
                    try:
                        found = json.loads(line)
                        error = found.get("error")
                        token = None if error is not None or found.get("end") else int(found["id"])
                    except (ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError):
                        raise InputError(f"the answer of {self.url} is not a line with an id") from None
                    if error is not None:
                        raise InputError(f"the server ended the text early: {error}")
                    if token is None:
                        return
                    yield token
        except self._failed as error:
            raise InputError(f"no answer from {self.url} ({type(error).__name__})") from None
        raise InputError("the server ended the text early; try again")


def _here(host: str) -> bool:
    """Whether ``host`` is this machine: nothing that is sent there leaves it."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _reason(status: int, content: bytes) -> str:
    try:
        detail = str(json.loads(content)["detail"])
    except (ValueError, KeyError, TypeError):
        detail = "no reason given"
    return f"the server refused ({status}): {detail}"
