"""Prepared requests of gRPC calls: clients usually repeat a call with other ids."""

import asyncio
from collections.abc import Sequence
from time import perf_counter

import numpy as np

from preblock.service.api.prepared import KnownRequest, Layout, PreparedRequests, prepare_ids
from preblock.service.codecs.chunks import Part
from preblock.service.codecs.v2.protobuf import RequestMessage, compute_message, read_request
from preblock.service.core.errors import Malformed
from preblock.service.core.types import TokenRequest
from preblock.service.engine.engine import Engine
from preblock.service.engine.fast_path import FastRun
from preblock.service.runtime.model import TokenModel

MESSAGE_COPIES = 2
"""The vectors of a response, and its message."""
MAX_HEAD_BYTES = 2048
"""Maximum bytes before the ids in a message that is kept."""


class PreparedCalls:
    """Answers calls like an earlier one.

    Args:
        engine: answers all other calls.

    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._known: PreparedRequests[KnownRequest] = PreparedRequests(engine.repository)

    async def answer(self, protocol: str, message: bytes) -> bytes | None:
        """Answer a message like an earlier one; None for another message, or if the general path must answer it."""
        began, known = perf_counter(), self._known.find((protocol, len(message)))
        run = None if known is None else known.start(message, began)
        if known is None or run is None:
            return None
        try:
            if run.batched:
                await _wait_for_batch(run)
            size, buffers = known.prepared.respond(run)
            response = await compute_message(size, buffers) if run.streamed else b"".join(buffers)
        except BaseException as error:
            run.end(error)
            raise
        run.end()
        return response

    def keep(
        self,
        protocol: str,
        message: bytes,
        parsed: RequestMessage,
        request: TokenRequest,
        model: TokenModel,
        content: Sequence[Part],
    ) -> None:
        """Keep the request of an answered message, if only the ids in it can vary.

        Args:
            protocol: of the message.
            message: bytes of the message.
            parsed: the same message, parsed.
            request: the same request for the engine.
            model: model of the response.
            content: of the response.

        """
        ids, raw = request.input_ids.values, parsed.raw_contents
        head = message[: -ids.nbytes]
        # An id of the client differs in each message.
        if parsed.fields.id or len(head) > MAX_HEAD_BYTES:
            return
        if len(raw) != 1 or len(raw[0]) != ids.nbytes:  # INT32
            return
        if not message.endswith(raw[0]) or not _ends_with_ids(head, np.invert(ids).tobytes()):
            return
        layout = Layout(head, len(head))
        prepared = prepare_ids(self._engine, model, protocol, request, layout, content, MESSAGE_COPIES)
        if prepared is not None:
            known = KnownRequest(prepared, parsed.fields.model_name, parsed.fields.model_version)
            self._known.keep((protocol, len(message)), known)


def _ends_with_ids(head: bytes, ids: bytes) -> bool:
    """Return whether the bytes after `head` are the ids of a message, and nothing else; `ids` are different ids."""
    try:
        return list(read_request(head + ids).raw_contents) == [ids]
    except Malformed:
        return False


async def _wait_for_batch(run: FastRun) -> None:
    """Wait for the calls of this event-loop iteration."""
    try:
        await asyncio.sleep(0)
    except asyncio.CancelledError:
        run.leave()
        raise
