"""The streaming protocols: WebSocket and HTTP `/models/{name}/decode`. See `docs/decode.md` for the messages."""

import asyncio
from contextlib import ExitStack, suppress
from functools import partial
from typing import Protocol

import orjson
from fastapi import APIRouter, Request, WebSocket, WebSocketDisconnect
from fastapi.responses import Response

from preblock.service.api.http import errors
from preblock.service.api.http.negotiation import EVENTS, JSON, NDJSON, answer_type, body_type
from preblock.service.api.http.request import single_values
from preblock.service.api.http.schemas import native as schemas
from preblock.service.api.http.streaming.ndjson import FAREWELL_SECONDS, NdjsonStream
from preblock.service.api.http.streaming.session import DecodeSession
from preblock.service.api.http.streaming.sse import open_events
from preblock.service.api.streams import StreamEnd, StreamLifetime, StreamRegistry
from preblock.service.codecs import decode_frames, decode_json
from preblock.service.codecs.native_json import read_query
from preblock.service.core.auth import caller
from preblock.service.core.errors import PreblockError, UnsupportedFormat
from preblock.service.engine.engine import Engine

CODES = {"close": 1000, "shutdown": 1012, "idle": 1008, "time": 1008, "key": 1008}
CONNECTION = "preblock.connection"
"""Key in the state of a WebSocket: the connection of our own server; it answers simple steps itself."""
LONGEST_REASON = 123
"""Bytes, of a close frame (RFC 6455, section 5.5)."""


def router(engine: Engine, streams: StreamRegistry, max_body_bytes: int) -> APIRouter:
    """Return the routes of these protocols."""
    routes = APIRouter(tags=["decode"])

    @routes.websocket("/models/{name}/decode")
    @routes.websocket("/models/{name}/versions/{version}/decode")
    async def socket(socket: WebSocket, name: str, version: str | None = None) -> None:
        with ExitStack() as stack:
            try:
                with engine.admission.request("decode-open") as record:
                    fields = read_query(single_values(socket.scope["query_string"]))
                    model = engine.repository.get(name, version, caller=caller())
                    record.model = model.name
                    session = DecodeSession(engine, model, fields)
                    lifetime = stack.enter_context(streams.open())
            except PreblockError as error:
                await socket.send_denial_response(errors.respond(error, socket.url.path))
                return
            await socket.accept()
            with suppress(WebSocketDisconnect):  # the client left while it was answered
                await converse(socket, session, lifetime)

    async def decode(request: Request, name: str, version: str | None = None) -> Response:
        with engine.admission.request("decode-open") as record:
            model = engine.repository.get(name, version, caller=caller())
            record.model = model.name
            media = answer_type(", ".join(request.headers.getlist("accept")), (NDJSON, EVENTS))
            fields = read_query(single_values(request.scope["query_string"]))
            if media == EVENTS:
                body_type(request.headers.get("content-type"), (JSON,))
                return await open_events(engine, streams, model, request, fields, max_body_bytes)
            body_type(request.headers.get("content-type"), (NDJSON,))
            coding = request.headers.get("content-encoding", "identity")
            if coding.lower() != "identity":
                raise UnsupportedFormat("Content-Encoding", coding, "identity, for lines that are read as they come")
            return NdjsonStream(streams, DecodeSession(engine, model, fields), max_body_bytes)

    @routes.post("/models/{name}/decode", **schemas.DECODE)
    async def decode_newest(request: Request, name: str) -> Response:
        """Answer lines of steps as they come, or a known list of ids as events, from the model's highest version."""
        return await decode(request, name)

    @routes.post("/models/{name}/versions/{version}/decode", **schemas.DECODE)
    async def decode_version(request: Request, name: str, version: str) -> Response:
        """Answer lines of steps as they come, or a known list of ids as events, from one version of the model."""
        return await decode(request, name, version)

    return routes


class Connection(Protocol):
    """A connection with its own answers to simple steps, without an ASGI message for each."""

    def listen(self, session: DecodeSession | None, lifetime: StreamLifetime) -> None:
        """Answer simple steps of the session; with None, leave them to the application again."""


async def converse(socket: WebSocket, session: DecodeSession, lifetime: StreamLifetime) -> None:
    """Answer message after message, until either side ends the stream."""
    # Only our own server has such a connection; others hand every message over.
    connection: Connection | None = socket.scope.get("state", {}).get(CONNECTION)
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
            if frame is not None:
                session.spoken = decode_frames.read_header(frame)[0]
                await lifetime.wait(partial(socket.send_bytes, await session.answer_frame(frame)))
            else:
                session.spoken = "text"
                answer = await session.answer_text(message["text"].encode())
                await lifetime.wait(partial(socket.send_text, answer.decode()))
            session.told = session.stream.offset
            # Neither receiving nor sending lets others run while messages wait.
            await asyncio.sleep(0)
    except StreamEnd as closing:
        await say_goodbye(socket, session, closing)


async def say_goodbye(socket: WebSocket, session: DecodeSession, closing: StreamEnd) -> None:
    """Send the client the offsets that it knows, in the form of its last message, and close."""
    offset = session.told
    reason = orjson.dumps({"closing": closing.reason, "next_offset": offset.tolist()}).decode()
    if len(reason) > LONGEST_REASON:
        reason = closing.reason
    try:
        async with asyncio.timeout(FAREWELL_SECONDS):
            if session.spoken == "text":
                await socket.send_text(decode_json.write_state(offset, closing=closing.reason).decode())
            elif session.spoken == 2:
                await socket.send_bytes(decode_frames.write_closing(offset, closing.reason))
            await socket.close(CODES[closing.reason], reason)
    except TimeoutError:  # it does not read
        return
