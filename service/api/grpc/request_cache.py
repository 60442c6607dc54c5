"""Request templates of gRPC calls: clients usually repeat a call with different ids.

A template holds the parsed start of a message and of its response, as in `service/api/request_cache.py`.

Letters: B batch, L length.
"""

import asyncio
from time import perf_counter

import numpy as np

from preblock.service.api.request_cache import RequestTemplate, TemplateCache
from preblock.service.codecs.chunks import raw_bytes
from preblock.service.codecs.v2.protobuf import compute_message
from preblock.service.codecs.v2.request_message import RequestMessage, read_request
from preblock.service.core.errors import Malformed
from preblock.service.core.results import ChunkedTensor
from preblock.service.core.types import TokenRequest
from preblock.service.engine.engine import Engine
from preblock.service.engine.fast_path import FastRun, fast_path_of, has_fast_form
from preblock.service.observability.context import CURRENT_REQUEST
from preblock.service.runtime.model import TokenModel

MESSAGE_COPIES = 2
"""The vectors of a response, and its message."""
MAX_HEAD_BYTES = 2048
"""Maximum bytes before the ids in the message of a template."""


class CallTemplates:
    """Answers calls with a known template.

    Args:
        engine: answers all other calls.
        templates: of all protocols.

    """

    def __init__(self, engine: Engine, templates: TemplateCache) -> None:
        self._engine, self._templates = engine, templates

    async def answer(self, protocol: str, message: bytes) -> bytes | None:
        """Answer a message from its template.

        Return None without a template, or if a check fails. The general path then answers, or produces the error.
        """
        began, template = perf_counter(), self._templates.find((protocol, len(message)))
        if not isinstance(template, RequestTemplate) or not message.startswith(template.head):
            return None
        call = template.read_binary(message)
        run = template.fast_path.start(protocol, call, CURRENT_REQUEST.get(), began, copies=MESSAGE_COPIES)
        if run is None:
            return None
        try:
            response = await _write(template, run)
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
        response: bytes,
    ) -> None:
        """Keep the template of an answered message, if only the ids in it can vary.

        Args:
            protocol: of the message.
            message: bytes of the message.
            parsed: the same message, parsed.
            request: the same request for the engine.
            model: model of the response.
            response: bytes of the response.

        """
        rows, raw = request.input_ids, parsed.raw_contents
        head = message[: -rows.values.nbytes]
        # An id of the client differs in each message.
        if (
            parsed.fields.id
            or not has_fast_form(request, model.manifest)
            or rows.length is None
            or len(head) > MAX_HEAD_BYTES
        ):
            return
        if len(raw) != 1 or len(raw[0]) != rows.values.nbytes:  # INT32
            return
        if not message.endswith(raw[0]) or not _ends_with_ids(head, np.invert(rows.values).tobytes()):
            return
        fast_path = fast_path_of(self._engine, model, request.outputs, request.dtype)
        if fast_path is None:
            return
        template = RequestTemplate(
            protocol,
            fast_path,
            head,
            shape=(len(rows.lengths), rows.length),
            ids_at=len(head),
            offset=np.zeros(1, np.int64) if request.offset is None else request.offset,
            offset_at=None,
            headers=b"",
            prefix=response[: -4 * len(rows.values) * fast_path.width],
            size=len(response),
            name=parsed.fields.model_name,
            version=parsed.fields.model_version,
        )
        self._templates.keep((protocol, len(message)), template)


def _ends_with_ids(head: bytes, ids: bytes) -> bool:
    """Return whether the bytes after `head` are the ids of a message, and nothing else; `ids` are different ids."""
    try:
        return list(read_request(head + ids).raw_contents) == [ids]
    except Malformed:
        return False


async def _write(template: RequestTemplate, run: FastRun) -> bytes:
    """Return the response of a run."""
    if run.streamed:
        vectors = ChunkedTensor((run.nbytes // 4,), "float32", run.chunks())
        return await compute_message([template.prefix, vectors])
    if run.batched:
        try:
            await asyncio.sleep(0)
        except asyncio.CancelledError:
            run.leave()
            raise
    return b"".join((template.prefix, *map(raw_bytes, run.finish())))
