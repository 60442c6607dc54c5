"""Templates of requests with short texts: clients usually repeat a request with different texts."""

import re
from collections.abc import Callable
from dataclasses import dataclass

import orjson

from preblock.service.api.http.negotiation import JSON
from preblock.service.api.http.response import ChunkedResponse, lines_of
from preblock.service.codecs.chunks import Buffer, Part
from preblock.service.codecs.native_json import read_text
from preblock.service.core.errors import Invalid
from preblock.service.core.results import EmbedResult
from preblock.service.engine.fast_path import FastRun
from preblock.service.engine.text_path import TextPath, TextRun
from preblock.service.observability.context import RequestContext

STRING = rb'"(?:[^"\\]|\\.)*"'
TEXTS = rb'"%b"\s*:\s*(' + STRING + rb"|\[(?:[^]\"]|" + STRING + rb")*\])"
"""A field, `%b`, and its text or list of texts in the JSON body of a valid request without further objects.

The pattern cannot match inside a string, because quotes are escaped there.
"""


@dataclass(eq=False, slots=True)
class TextTemplate:
    """The constant parts of requests with the same URL, headers and options, and of their responses.

    Args:
        protocol: protocol of the requests.
        fast_path: runs the requests.
        write_answer: writes the body of a response.
        head: request body before the texts.
        tail: request body after the texts.
        path: path of the URL.
        name: model name in the requests.
        version: model version in the requests; None for the highest version.

    """

    protocol: str
    fast_path: TextPath
    write_answer: Callable[[EmbedResult], list[Part]]
    head: bytes
    tail: bytes
    name: str
    version: str | None
    path: str = ""

    def start(self, body: bytes, context: RequestContext) -> TextRun | None:
        """Start the request with this body; None if it has other options, or fails a check."""
        begin, end = len(self.head), len(body) - len(self.tail)
        if end < begin or not body.startswith(self.head) or not body.endswith(self.tail):
            return None
        fast_path, size = self.fast_path, len(body)
        if not fast_path.scheduler.is_inline(size, text=True) or size > fast_path.limits.max_body_bytes:
            return None
        try:
            # The whole body is valid, with each field once, because these bytes are one value of JSON.
            texts = read_text("input", orjson.loads(body[begin:end]))
        except (orjson.JSONDecodeError, Invalid):
            return None
        return fast_path.start(self.protocol, texts, context, context.began + context.read)

    def write(self, run: FastRun) -> tuple[bytes, list[Buffer]]:
        """Finish a run, and return header lines and body of its response."""
        assert isinstance(run, TextRun)
        response = ChunkedResponse(self.write_answer(run.result()), JSON)
        return lines_of(response.raw_headers), list(response.content())


def split_body(body: bytes, field: str) -> tuple[bytes, bytes] | None:
    """Return the bytes before and after the texts in the body of a valid request; None if `field` is escaped."""
    found = re.search(TEXTS % re.escape(field.encode()), body)
    return None if found is None else (body[: found.start(1)], body[found.end(1) :])
