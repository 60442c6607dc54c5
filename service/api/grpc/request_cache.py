"""Repeated calls: a client sends the same call again and again, with other ids.

Their constant parts are read and written once, as in `service/api/request_cache.py` for HTTP.

Letters: B batch, L length.
"""

import asyncio
from time import perf_counter

import numpy as np

from preblock.service.api.request_cache import RequestTemplate, TemplateCache
from preblock.service.codecs.chunks import raw_bytes
from preblock.service.codecs.v2 import open_inference_pb2 as pb
from preblock.service.codecs.v2.protobuf import compute, read, write_parts
from preblock.service.core.errors import Malformed
from preblock.service.core.results import ChunkedTensor
from preblock.service.core.types import TokenRequest
from preblock.service.engine.engine import Engine
from preblock.service.engine.fast_path import FastRun, fast_path_of, is_simple
from preblock.service.observability.context import CURRENT_REQUEST
from preblock.service.runtime.model import TokenModel

LONGEST_KEPT = 2048
"""Most bytes before the ids in the message of a template."""


class CallTemplates:
    """Answers calls by templates.

    Args:
        engine: answers the other calls.
        templates: of all protocols.

    """

    def __init__(self, engine: Engine, templates: TemplateCache) -> None:
        self._engine, self._templates = engine, templates

    async def answer(self, protocol: str, message: bytes) -> bytes | None:
        """Answer a message like one before; None where there was none, or where it is to be refused: others say why."""
        began, template = perf_counter(), self._templates.find((protocol, len(message)))
        if template is None or not message.startswith(template.head):
            return None
        ids, offset = template.read_binary(message)
        if not template.fast_path.accepts(ids, offset):
            return None
        run = template.fast_path.start(protocol, ids, offset, CURRENT_REQUEST.get(), began)
        if run is None:
            return None
        try:
            written = await _written(template, run)
        except BaseException as error:
            run.end(error)
            raise
        run.end()
        return written

    def keep(
        self,
        protocol: str,
        message: bytes,
        sent: pb.ModelInferRequest,
        request: TokenRequest,
        model: TokenModel,
        written: bytes,
    ) -> None:
        """Keep the template of an answered message, if it holds nothing but ids.

        Args:
            protocol: of the messages.
            message: the answered one.
            sent: the parsed message.
            request: of the message.
            model: of the answer.
            written: the answer.

        """
        rows, offset, limits = request.input_ids, request.offset, self._engine.limits
        head, raw = message[: -rows.values.nbytes], list(sent.raw_input_contents)
        if sent.id or not is_simple(request) or rows.length is None or len(head) > LONGEST_KEPT or len(raw) != 1:
            return  # an id is another in each
        fast_path = fast_path_of(self._engine, model, request.outputs, request.dtype)
        if fast_path is None or not limits.takes_whole(len(rows.values) * fast_path.width):
            return
        if not message.endswith(raw[0]) or not _ends_with_ids(head, np.invert(rows.values).tobytes()):
            return
        shape, vectors = (len(rows.lengths), rows.length), 4 * len(rows.values) * fast_path.width
        template = RequestTemplate(
            protocol,
            fast_path,
            head,
            shape,
            len(head),
            np.zeros(1, np.int64) if offset is None else offset,
            offset_at=None,
            headers=b"",
            prefix=written[:-vectors],
            size=len(written),
            name=sent.model_name,
            version=sent.model_version,
        )
        self._templates.keep((protocol, len(message)), template)


def _ends_with_ids(head: bytes, other: bytes) -> bool:
    """Return whether other bytes behind a head are other ids, and nothing else of a message."""
    try:
        return list(read(pb.ModelInferRequest, head + other).raw_input_contents) == [other]
    except Malformed:
        return False


async def _written(template: RequestTemplate, run: FastRun) -> bytes:
    """Return the answer of a run."""
    if run.streamed:
        vectors = ChunkedTensor((run.nbytes // 4,), "float32", run.chunks())
        return await compute(write_parts([template.prefix, vectors]))
    if run.batched:
        try:
            await asyncio.sleep(0)
        except asyncio.CancelledError:
            run.leave()
            raise
    return b"".join((template.prefix, raw_bytes(run.finish())))
