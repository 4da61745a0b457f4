"""The server of the live page: it sends static files, answers as JSON, and the progress of searches
as lines of a stream.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from importlib.resources import files
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from experiments.live_page.guards import MOST_BODY, App, Guard, body_of, too_large
from experiments.live_page.processes import BusyError, EndedError, Event, Lane
from mistlab.core.values import InputError

Answer = TypeVar("Answer")
# The static files of the live page, each with its content type.
FILES = files("experiments.live_page") / "files"
KINDS = {"html": "text/html", "css": "text/css", "js": "text/javascript"}
# The kinds of questions (requests of the live page) that are answered by a stream of events:
# progress, and at last the answer.
STREAMED = ("search", "pareto")
# For each kind of question (request of the live page), the group of worker processes that answers
# it. There are several groups, so that a moved slider does not wait for searches or traces.
LANE_OF: Mapping[str, str] = {
    **dict.fromkeys(("names", "predict", "compare", "paste", "plan_file", "serving"), "quick"),
    **dict.fromkeys(("choices", "timeline", "trace", "gains", "serving_played"), "slow"),
    **dict.fromkeys(("export",), "slow"),
    **dict.fromkeys(STREAMED, "search"),
}


@dataclass(frozen=True, slots=True)
class Asker:
    """Routes of the live page's server for questions (requests of the page), each of which is
    answered by one of several groups of worker processes.
    """

    lanes: Mapping[str, Lane]

    async def ask(self, request: Request) -> Response:
        """Answer a question, which the live page has posted as JSON."""
        question = request.path_params["question"]
        if question not in LANE_OF:
            return _refused(404, f"question {question[:40]!r} is unknown")
        try:
            body = body_of(await _content(request))
        except InputError as error:
            return _refused(400, str(error))
        except ClientDisconnect:
            return Response(status_code=400)
        ask = partial(self.lanes[LANE_OF[question]].ask, question, body)
        return Streamed(ask) if question in STREAMED else Single(ask)


class Single(Response):
    """The HTTP response with the answer to one question of the live page. It is abandoned when the
    client disconnects, since a moving slider sends questions faster than they can be answered.
    """

    def __init__(self, ask: Callable[..., Awaitable[Event]]) -> None:
        super().__init__()
        self._ask = ask

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the answer, or the reason why there is none."""
        response = await unless_gone(self._answered(), receive)
        if response is not None:
            await response(scope, receive, send)

    async def _answered(self) -> Response:
        try:
            last = await self._ask()
        except BusyError as error:
            return _refused(503, str(error))
        except EndedError as error:
            return _refused(504, str(error))
        if "error" in last:
            return JSONResponse({"error": last["error"], "field": last.get("field", "")}, 400)
        return JSONResponse(last["answer"])


class Streamed(Response):
    """The HTTP response to a long question of the live page, as lines of JSON: events while it is
    worked on, and at last the answer or the error.
    """

    def __init__(self, ask: Callable[..., Awaitable[Event]]) -> None:
        super().__init__(media_type="application/x-ndjson")
        self._ask = ask

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send each event as it occurs, as long as the client is connected."""
        del scope
        headers = [(b"content-type", b"application/x-ndjson")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})

        async def heard(event: Event) -> None:
            body = f"{json.dumps(event)}\n".encode()
            await send({"type": "http.response.body", "body": body, "more_body": True})

        async def answered() -> None:
            try:
                await heard(await self._ask(heard))
            except (BusyError, EndedError) as error:
                await heard({"error": str(error), "field": ""})
            await send({"type": "http.response.body", "body": b""})

        await unless_gone(answered(), receive)


async def unless_gone(work: Coroutine[Any, Any, Answer], receive: Receive) -> Answer | None:
    """The result of some work; None if the client disconnects before it is done, which cancels the
    work.
    """

    async def gone() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    working, left = asyncio.create_task(work), asyncio.create_task(gone())
    try:
        await asyncio.wait({working, left}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        left.cancel()
        is_done = working.done()
        working.cancel()
    return working.result() if is_done else None


async def _content(request: Request) -> bytes:
    """The body of a request; a body that is larger than allowed is refused."""
    content = b""
    async for part in request.stream():
        content += part
        if len(content) > MOST_BODY:
            raise InputError(too_large(len(content)))
    return content


def _refused(status: int, why: str) -> Response:
    return JSONResponse({"error": why, "field": ""}, status)


async def _file(request: Request) -> Response:
    """Serve a static file of the page."""
    name = request.path_params.get("name", "page.html")
    if name not in {file.name for file in FILES.iterdir()}:
        return _refused(404, f"there is no {name[:40]!r} here: open /")
    kind = KINDS[name.rpartition(".")[2]]
    return Response((FILES / name).read_text(encoding="utf-8"), media_type=kind)


async def _icon(request: Request) -> Response:
    del request
    return Response(status_code=204)


def page_app(port: int, seconds: float, most_waiting: int = 100) -> App:
    """The web application of the live page, for a server on a port; ``seconds`` limits a search."""
    lanes = {
        "quick": Lane(name="quick", seconds=20.0, most_waiting=most_waiting),
        "slow": Lane(name="slow", seconds=60.0, most_waiting=most_waiting),
        "search": Lane(name="search", seconds=seconds + 60.0, most_waiting=8),
    }

    @asynccontextmanager
    async def life(app: Starlette) -> AsyncIterator[None]:
        del app
        warming = asyncio.create_task(_warmed(lanes))
        try:
            yield
        finally:
            warming.cancel()
            for lane in lanes.values():
                await lane.end()

    routes = [
        Route("/", _file),
        Route("/favicon.ico", _icon),
        Route("/{name}", _file),
        Route("/api/{question}", Asker(lanes).ask, methods=["POST"]),
    ]
    return Guard(Starlette(routes=routes, lifespan=life), port)


async def _warmed(lanes: Mapping[str, Lane]) -> None:
    """Start all worker processes, first those for questions that are answered quickly."""
    for lane in lanes.values():
        try:
            await lane.warm()
        except EndedError:
            continue
