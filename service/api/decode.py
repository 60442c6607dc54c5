"""The streaming door: WebSocket `/models/{name}/decode`. See `docs/decode.md` for its messages."""

import orjson
from fastapi import APIRouter, WebSocket, WebSocketDisconnect

from incipit.service.api import problems
from incipit.service.api.query import single_values
from incipit.service.decode import DecodeStream
from incipit.service.engine import Engine
from incipit.service.errors import IncipitError, Invalid
from incipit.service.messages import Rows
from incipit.service.wire import frames
from incipit.service.wire.native import ENCODINGS, answer_json, read_json, read_query, write_json
from incipit.service.wire.rows import refuse_unknown, rows_of_json

OPTIONS = ("offset", "dtype", "encoding")
FIELDS = ("input_ids", "token_type_ids")


def router(engine: Engine) -> APIRouter:
    """Return the routes of this door."""
    routes = APIRouter()

    @routes.websocket("/models/{name}/decode")
    @routes.websocket("/models/{name}/versions/{version}/decode")
    async def decode(socket: WebSocket, name: str, version: str | None = None) -> None:
        try:
            with engine.metrics.request("decode-open"):
                stream, encoding = open_stream(engine, name, version, single_values(socket.query_params))
        except IncipitError as error:
            await socket.send_denial_response(problems.respond(error, socket.url.path))
            return
        await socket.accept()
        with engine.metrics.stream():
            try:
                while True:
                    message = await socket.receive()
                    if message["type"] == "websocket.disconnect":
                        return
                    if message.get("bytes") is not None:
                        await socket.send_bytes(await answer_frame(engine, stream, message["bytes"]))
                    else:
                        await socket.send_text(await answer_text(engine, stream, message["text"], encoding))
            except WebSocketDisconnect:  # the client left while it was answered
                return

    return routes


def open_stream(engine: Engine, name: str, version: str | None, query: dict[str, str]) -> tuple[DecodeStream, str]:
    """Open a stream by its query, and return it with the encoding of its JSON answers."""
    model = engine.repository.get(name, version)
    options = read_query(query)
    refuse_unknown(options, OPTIONS)
    offset, encoding = options.get("offset", 0), options.get("encoding", ENCODINGS[0])
    if type(offset) is not int:
        raise Invalid("offset", offset, "an integer")
    if encoding not in ENCODINGS:
        raise Invalid("encoding", encoding, ", ".join(ENCODINGS))
    return DecodeStream(engine, model, offset, options.get("dtype", "float32")), encoding


async def answer_frame(engine: Engine, stream: DecodeStream, frame: bytes) -> bytes:
    """Answer a binary step; an error changes nothing and is a frame too."""
    try:
        with engine.metrics.request("decode") as observation, stream.attempt():
            observation.model = stream.model.name
            step = await engine.scheduler.run(len(frame), lambda: frames.read_step(frame))
            answer = await stream.step(step.input_ids)
            return await engine.scheduler.run(answer.size, lambda: frames.write_vectors(answer, step.number))
    except IncipitError as error:
        return frames.write_error(problems.problem(error), frames.step_number(frame))


async def answer_text(engine: Engine, stream: DecodeStream, text: str, encoding: str) -> str:
    """Answer a JSON step; an error changes nothing and is a JSON object with the key `error`."""
    try:
        with engine.metrics.request("decode") as observation, stream.attempt():
            observation.model = stream.model.name
            rows, segments = await engine.scheduler.run(len(text), lambda: read_text(text), text=True)
            answer = await stream.step(rows, segments)
            return await engine.scheduler.run(
                answer.size,
                lambda: write_json(answer_json(answer, encoding)).decode(),
                text=encoding == "float",
            )
    except IncipitError as error:
        return orjson.dumps({"error": orjson.Fragment(problems.problem(error))}).decode()


def read_text(text: str) -> tuple[Rows, Rows | None]:
    """Read a JSON step: its ids, and their segments if they are given."""
    document = read_json(text.encode())
    refuse_unknown(document, FIELDS)
    segments = document.get("token_type_ids")
    return (
        rows_of_json("input_ids", document.get("input_ids")),
        None if segments is None else rows_of_json("token_type_ids", segments),
    )
