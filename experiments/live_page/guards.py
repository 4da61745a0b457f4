"""Refuses requests before they are parsed: those from other hosts and origins, and bodies that are
too large, too deeply nested or not JSON.
"""

import json
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass
from typing import Any

from mistlab.core.values import reject

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

MOST_BODY = 1 << 19
MOST_DRAINED = 1 << 23
MOST_LEVELS = 60
HOSTS = ("127.0.0.1", "localhost", "[::1]")
HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-store",
}


@dataclass(frozen=True, slots=True)
class Guard:
    """Checks each request before it reaches the web application: only pages that this server has
    sent may ask questions.
    """

    app: App
    port: int

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on to the application, or refuse it."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = {
            key.decode("latin-1"): value.decode("latin-1") for key, value in scope["headers"]
        }

        async def with_headers(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                more = [(key.encode(), value.encode()) for key, value in HEADERS.items()]
                message["headers"] = [*message.get("headers", []), *more]
            await send(message)

        refused = self._refusal(headers, scope["method"])
        if refused is None:
            await self.app(scope, receive, with_headers)
            return
        status, why = refused
        await _drained(receive, headers)
        body = json.dumps({"error": why, "field": ""}).encode()
        start = [(b"content-type", b"application/json"), (b"connection", b"close")]
        await with_headers({"type": "http.response.start", "status": status, "headers": start})
        await with_headers({"type": "http.response.body", "body": body})

    def _refusal(self, headers: dict[str, str], method: str) -> tuple[int, str] | None:
        """The reason for refusing a request, and the HTTP status; None if the request is
        allowed.
        """
        known = [f"{host}:{self.port}" for host in HOSTS]
        host, origin = headers.get("host", ""), headers.get("origin")
        if host not in known:
            return 421, f"host {host[:60]!r} is not this server: open http://{known[0]}/"
        if origin is not None and origin not in [f"http://{one}" for one in known]:
            return 403, f"origin {origin[:60]!r} is another page: open http://{known[0]}/"
        if headers.get("sec-fetch-site", "none") not in ("same-origin", "none"):
            return 403, f"another site asks: open http://{known[0]}/"
        return _refused_body(headers) if method == "POST" else None


async def _drained(receive: Receive, headers: dict[str, str]) -> None:
    """Read the rest of a refused body, unless it is too large: a client that is still sending could
    not receive the refusal.
    """
    length = headers.get("content-length", "")
    if length.isdecimal() and int(length) <= MOST_DRAINED:
        while (await receive()).get("more_body"):
            pass


def _refused_body(headers: dict[str, str]) -> tuple[int, str] | None:
    """The HTTP status and the reason for refusing a request's body before it is read; None if it is
    not refused.
    """
    kind = headers.get("content-type", "").partition(";")[0].strip()
    if kind != "application/json":
        return 415, f"content type {kind[:60]!r} is not read: send application/json"
    length = headers.get("content-length", "")
    if length.isdecimal() and int(length) > MOST_BODY:
        return 413, too_large(int(length))
    return None


def too_large(size: int) -> str:
    """The message that a request's body is too large."""
    return f"the request's body has {size:,} bytes: send at most {MOST_BODY:,}"


def body_of(content: bytes) -> Any:
    """The JSON value in a request's body; refuses text that is malformed or too deeply nested."""
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        reject(f"the request's body is not UTF-8 (byte {error.start}): send JSON in UTF-8")
    if _levels(text) > MOST_LEVELS:
        reject(
            f"the request's JSON is nested more than {MOST_LEVELS} levels deep: send fewer levels"
        )
    try:
        body = json.loads(text, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        reject(f"the request's body is not JSON ({error}): send a JSON object")
    if not isinstance(body, dict):
        reject(
            f"the request's JSON is {text[:40]!r}, not an object: send an object such as "
            '{"problem": {...}}'
        )
    return body


def _no_constant(name: str) -> Any:
    message = f"{name} is not a number of JSON"
    raise ValueError(message)


def _levels(text: str) -> int:
    """How many levels deep a JSON text is nested; brackets inside strings do not count."""
    level = deepest = 0
    is_text = is_escaped = False
    for letter in text:
        if is_text:
            is_text = is_escaped or letter != '"'
            is_escaped = letter == "\\" and not is_escaped
        elif letter == '"':
            is_text = True
        elif letter in "[{":
            level += 1
            deepest = max(deepest, level)
        elif letter in "]}":
            level -= 1
    return deepest
