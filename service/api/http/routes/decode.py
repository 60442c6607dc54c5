"""Decode streams at `/models/{name}/decode`: WebSocket, NDJSON and events. Messages: `docs/decode.md`."""

import asyncio
from contextlib import ExitStack, suppress
from contextvars import ContextVar
from functools import partial
from typing import Protocol

import orjson
from fastapi import APIRouter, WebSocket, WebSocketDisconnect
from fastapi.responses import Response

from preblock.service.api.http.negotiation import EVENTS, JSON, NDJSON, answer_type, body_type
from preblock.service.api.http.request import RawRequest, read_body, single_values
from preblock.service.api.http.routes.model_routes import add_model_routes
from preblock.service.api.http.schemas import native_api as schemas
from preblock.service.api.http.streaming import (
    CLOSE_TIMEOUT_SECONDS,
    DecodeSession,
    answer_events,
    answer_lines,
)
from preblock.service.api.streams import StreamEnd, StreamLifetime, StreamRegistry
from preblock.service.codecs import decode_frames, decode_json
from preblock.service.codecs.native_json import read_query
from preblock.service.core.auth import caller
from preblock.service.core.errors import NotAcceptable, UnsupportedFormat
from preblock.service.engine.engine import Engine

TOO_BIG = 1009
"""Close code for a message too large to process (RFC 6455, section 7.4.1)."""
CLOSE_CODES = {"close": 1000, "shutdown": 1012, "idle": 1008, "time": 1008, "key": 1008}
MAX_CLOSE_REASON_BYTES = 123
"""Maximum size of the reason in a close frame (RFC 6455, section 5.5)."""


def router(engine: Engine, streams: StreamRegistry) -> APIRouter:
    """Return the router of decode streams."""
    routes = APIRouter(tags=["decode"])

    @routes.websocket("/models/{name}/decode")
    @routes.websocket("/models/{name}/versions/{version}/decode")
    async def socket(socket: WebSocket, name: str, version: str | None = None) -> None:
        with ExitStack() as stack:
            with engine.admission.request("decode-open") as record:
                fields = read_query(single_values(socket.scope["query_string"]))
                model = engine.repository.get(name, version, caller=caller())
                record.model = model.name
                session = DecodeSession(engine, model, fields)
                lifetime = stack.enter_context(streams.open())
            await socket.accept()
            with suppress(WebSocketDisconnect):  # the client disconnected during an answer
                await answer_messages(socket, session, lifetime)

    async def decode(request: RawRequest, name: str, version: str | None) -> Response:
        """Stream an answer for each line of steps, or events for a known list of ids."""
        with engine.admission.request("decode-open") as record:
            find = partial(engine.repository.get, name, version, caller=caller())
            record.model = find().name
            accept = request.list_header(b"accept")
            media = answer_type(accept, (NDJSON, EVENTS))
            fields = read_query(single_values(request.query))
            kind = body_type(request.header(b"content-type"), (JSON, NDJSON) if media == EVENTS else (NDJSON, JSON))
            if kind == JSON and media != EVENTS and EVENTS not in accept.lower():
                expected = f"{EVENTS} for a JSON body; a body of lines needs Content-Type: {NDJSON}"
                raise NotAcceptable("Accept", accept or "no header", expected)
            if answer_type(accept, (EVENTS if kind == JSON else NDJSON,)) == EVENTS:
                body = await read_body(request, engine, record)
                return await answer_events(streams, engine, find(), body, fields)
            encoding = request.list_header(b"content-encoding")
            if encoding and encoding.lower() != "identity":
                raise UnsupportedFormat("Content-Encoding", encoding, "identity, because lines are read as they arrive")
            return answer_lines(streams, DecodeSession(engine, find(), fields))

    add_model_routes(routes, "POST", "/decode", decode, **schemas.DECODE)
    return routes


class Connection(Protocol):
    """A connection with a fast path for simple steps, without ASGI messages."""

    def listen(self, session: DecodeSession | None, lifetime: StreamLifetime) -> None:
        """Answer simple steps of the session; None turns the fast path off."""

    async def drain(self) -> None:
        """Wait until the client has read the answers."""


STEP_CONNECTION: ContextVar[Connection | None] = ContextVar("step_connection", default=None)
"""The connection of Preblock's own server. Other ASGI servers have none, and pass every message to the application."""


async def answer_messages(socket: WebSocket, session: DecodeSession, lifetime: StreamLifetime) -> None:
    """Answer every message until either side ends the stream."""
    connection = STEP_CONNECTION.get()
    try:
        while True:
            if connection is not None:
                connection.listen(session, lifetime)
            try:
                message = await lifetime.wait(socket.receive)
            finally:
                if connection is not None:
                    connection.listen(None, lifetime)
            if message["type"] == "websocket.disconnect":
                return
            frame = message.get("bytes")
            content: bytes = message["text"].encode() if frame is None else frame
            if len(content) > session.engine.limits.max_body_bytes:  # Preblock's own server checks it earlier
                await socket.close(TOO_BIG)
                return
            if frame is not None:
                session.message_format = "frame"
                answer = await session.answer_frame(frame)
                await lifetime.wait(partial(socket.send_bytes, answer))
            else:
                session.message_format = "text"
                answer = await session.answer_text(content)
                await lifetime.wait(partial(socket.send_text, answer.decode()))
            size = len(answer)
            del answer
            session.sent = session.stream.running
            if session.context is not None and session.context.held:
                session.context.keep(size)
                if connection is not None:
                    await lifetime.wait(connection.drain)
                session.context.release()
            # Lets other tasks run: neither reading nor writing yields while messages wait.
            await asyncio.sleep(0)
    except StreamEnd as closing:
        await send_close_message(socket, session, closing)


async def send_close_message(socket: WebSocket, session: DecodeSession, closing: StreamEnd) -> None:
    """Send the offsets after the last answer, in the format of the client's last message, and close."""
    sent = session.sent
    reason = orjson.dumps({"closing": closing.reason, "next_offset": sent.offset.tolist()}).decode()
    if len(reason) > MAX_CLOSE_REASON_BYTES:
        reason = closing.reason
    with suppress(TimeoutError):
        async with asyncio.timeout(CLOSE_TIMEOUT_SECONDS):
            if session.message_format == "text":
                await socket.send_text(decode_json.write_state(sent, closing=closing.reason).decode())
            elif session.message_format == "frame":
                await socket.send_bytes(decode_frames.write_closing(sent, closing.reason))
            await socket.close(CLOSE_CODES[closing.reason], reason)
