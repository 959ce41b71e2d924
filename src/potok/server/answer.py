"""One generation call over ASGI, from its first byte to its last: the same for every dialect that has a Reply.

What waits where, when a client reads slowly: uvicorn holds about 64 KiB and the kernel what its socket buffers allow,
then `send` waits, and so do we. The engine waits for nobody; its pieces wait in the Generation, at most one per token:
at most choices times max_model_len of them, whatever the client does.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from potok.errors import ClientError, DeadlineExceeded, PotokError, Unavailable
from potok.frontend import FrontEnd, Piece
from potok.obs.metrics import CallMeter
from potok.server.admission import Ticket
from potok.server.arrival import arrived_us, timeouts_of
from potok.server.body import Disconnected, read_json
from potok.server.caller import Caller
from potok.server.dialects.openai import Open
from potok.server.dialects.openai_errors import body_of, status_of
from potok.server.dialects.openai_reply import Events, Reply, Whole, event
from potok.server.keys import namespace_of
from potok.server.replies import Json, send_error
from potok.server.service import Service

_STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would hold tokens back
]


_Note = Callable[[Sequence[Piece]], None]


class Answer(Response):
    """Reads a call's body, starts it, and sends its answer. The client may leave at any moment: the call ends then."""

    def __init__(self, service: Service, open_call: Open) -> None:
        super().__init__()
        self._service = service
        self._open_call = open_call

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        namespace = namespace_of(scope)
        with self._service.call(), self._service.admission.ticket(namespace) as ticket:
            try:
                frontend = self._service.entrance()
                timeouts = timeouts_of(scope)
                ticket.knock()
                body = await read_json(scope, receive)
            except Disconnected:
                return
            except ClientError as error:
                self._service.metrics.rejected(status_of(error), error.code)
                await send_error(scope, receive, send, error)
                return
            exchange = _Exchange(scope, receive, send)
            caller = Caller(namespace, arrived_us(scope), timeouts, ticket)
            serving = asyncio.create_task(self._serve(exchange, frontend, body, caller, ticket))
            await self._watch(exchange, serving)

    async def _watch(self, exchange: _Exchange, serving: asyncio.Task[None]) -> None:
        """Returns when the answer is complete, or the client has left, or all calls are cut off."""
        leaving = asyncio.create_task(_left(exchange.receive))
        cut = self._service.cut
        try:
            await asyncio.wait((serving, leaving, cut), return_when=asyncio.FIRST_COMPLETED)
        finally:
            leaving.cancel()
            serving.cancel()  # does nothing when it has ended
            await asyncio.wait((serving, leaving))
        if not serving.cancelled():
            serving.result()  # raises what was a bug
        elif cut.done():
            await exchange.fail(Unavailable("the server is shutting down; try another one.", code="shutting_down"))

    async def _serve(
        self, exchange: _Exchange, frontend: FrontEnd, body: object, caller: Caller, ticket: Ticket
    ) -> None:
        metrics = self._service.metrics
        try:
            reply = await self._open_call(frontend, body, caller)
        except Exception as error:
            metrics.rejected(status_of(error), error.code if isinstance(error, ClientError) else None)
            await exchange.fail(error)
            return
        ticket.begin(reply.prompt_tokens)
        meter = metrics.accepted(caller.arrived_us / 1e6, reply.prompt_tokens)
        note = partial(_note, meter, ticket)
        try:
            await (_stream if reply.wishes.stream else _whole)(exchange, reply, note)
        except DeadlineExceeded as error:
            meter.timed_out()
            await exchange.fail(error)
        except ClientError as error:
            meter.refused()
            await exchange.fail(error)
        except asyncio.CancelledError:
            meter.aborted()
            raise
        except Exception as error:
            meter.failed()
            await exchange.fail(error)
        else:
            meter.finished()
        finally:
            reply.cancel()


class _Exchange:
    """Where one request's answer goes, and whether it has begun."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.scope = scope
        self.receive = receive
        self.send = send
        self.begun = False

    async def begin_stream(self) -> None:
        self.begun = True
        await self.send({"type": "http.response.start", "status": 200, "headers": _STREAM_HEADERS})

    async def more(self, body: bytes) -> None:
        await self.send({"type": "http.response.body", "body": body, "more_body": True})

    async def end(self, body: bytes) -> None:
        await self.send({"type": "http.response.body", "body": body, "more_body": False})

    async def fail(self, error: Exception) -> None:
        """Tells the client, in the stream when it has begun. A bug is raised again, so that it is logged."""
        if self.begun:
            await self.end(event(body_of(error)))
        else:
            await send_error(self.scope, self.receive, self.send, error)
        if not isinstance(error, PotokError):
            raise error


async def _stream(exchange: _Exchange, reply: Reply, note: _Note) -> None:
    """The status waits for the first piece: until then the engine may still refuse the call."""
    events = Events(reply)
    async for batch in reply.batches():
        note(batch)
        if not exchange.begun:
            await exchange.begin_stream()
        if reply.echoes_logprobs:  # a whole prompt with its alternatives: others go on meanwhile
            data = await asyncio.to_thread(events.take, batch)
        else:
            data = events.take(batch)
        if data:
            await exchange.more(data)
    await exchange.end(events.end())


async def _whole(exchange: _Exchange, reply: Reply, note: _Note) -> None:
    whole = Whole(reply)
    async for batch in reply.batches():
        note(batch)
        whole.take(batch)
    if reply.is_long_to_spell:  # up to twenty alternatives a token: other streams go on meanwhile
        answer = await asyncio.to_thread(_spell, whole)
    else:
        answer = _spell(whole)
    await answer(exchange.scope, exchange.receive, exchange.send)


def _spell(whole: Whole) -> Json:
    return Json(whole.message())


def _note(meter: CallMeter, ticket: Ticket, batch: Sequence[Piece]) -> None:
    for piece in batch:
        cut_short = piece.finish_reason == "length" and piece.stop_reason is not None  # by its deadline
        meter.piece(piece.index, len(piece.token_ids), "timeout" if cut_short else piece.finish_reason)
        ticket.gained(piece.index, len(piece.token_ids), ended=piece.finish_reason is not None)


async def _left(receive: Receive) -> None:
    """Returns when the client has closed the connection."""
    while (await receive())["type"] != "http.disconnect":
        pass
