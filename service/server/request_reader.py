"""Reads requests from the input of a connection, and refuses malformed input."""

from typing import TYPE_CHECKING

import httptools

from preblock.service.server.incoming_request import HEAD_TOO_LONG, LINE_BYTES, MAX_HEAD_BYTES, IncomingRequest, Refusal
from preblock.service.server.read_scheduler import CHUNK_BYTES

if TYPE_CHECKING:
    from preblock.service.server.front import Front

MAX_INCOMPLETE_BYTES = 2 * MAX_HEAD_BYTES
"""Limit of raw input without a complete head or chunk. The limit of a head itself holds for any segments of input."""
MALFORMED = Refusal(400, "the request is not valid HTTP/1.1")
TOO_LONG = Refusal(431, HEAD_TOO_LONG)
MIN_BODY_BYTES_PER_SECOND = 500
"""A slower body is late, even without a long pause. Apache's `mod_reqtimeout` has the same default."""
MAX_ANSWERED_BODY_SECONDS = 5
"""Longest pause in the body of an answered request, whose client would miss the response after a close."""
TOO_LATE = Refusal(408, "the request did not arrive in time")
NO_REQUEST = IncomingRequest(0.0)
"""Stands between two requests, so that an idle connection keeps no headers."""


class RequestReader:
    """Parses the input of a connection, and passes requests, bodies and refusals to it.

    Args:
        connection: of the client.

    Attributes:
        between_requests: whether no byte of the next request has arrived.
        incomplete_bytes: bytes since the last complete head, body chunk or request.
        body_bytes: bytes received of an incomplete body.
        ended: whether no request follows: the input is malformed, or belongs to a WebSocket.

    """

    def __init__(self, connection: "Front") -> None:
        self._connection = connection
        self.between_requests = True
        self.incomplete_bytes = self.body_bytes = 0
        self.ended = False
        self._incoming = NO_REQUEST
        self._first_input = b""  # first bytes received for the incoming request, if at most CHUNK_BYTES
        self._parser = self._new_parser()

    def _new_parser(self) -> httptools.HttpRequestParser:
        parser = httptools.HttpRequestParser(self)
        parser.set_dangerous_leniencies(lenient_data_after_close=True)
        return parser

    def wait_for_head(self) -> None:
        """Set the deadline for the next head."""
        self._connection.deadline.set(self._connection.settings.header_timeout_seconds, self.refuse_late)

    def wait_for_body(self, received: int = 0) -> None:
        """Set the deadline for more of the body, after `received` bytes.

        A body may pause for `body_timeout_seconds`, and each byte adds its time at the minimum rate. So a short pause
        does no harm, and bytes at long intervals do not hold a connection.
        """
        deadline, seconds = self._connection.deadline, self._connection.settings.body_timeout_seconds
        if self._incoming.answered:
            seconds = min(seconds, MAX_ANSWERED_BODY_SECONDS)
        if deadline.is_set(self._check_body):
            deadline.extend(received / MIN_BODY_BYTES_PER_SECOND, seconds)
        else:
            deadline.set(seconds, self._check_body)

    def _check_body(self) -> None:
        """Refuse a late body, unless it waits for the server, or belongs to a stream with limits of its own."""
        incoming = self._incoming
        if self._connection.delays_input():
            self.wait_for_body()
        elif incoming.answered or not self._connection.answer_begun:  # only a stream answers before the end of the body
            self.refuse_late()

    def refuse_late(self) -> None:
        """Refuse the incomplete request."""
        self._refuse(TOO_LATE)

    def read(self, data: bytes) -> None:
        """Read the next segment of the input."""
        if self.between_requests:
            self._first_input = data if len(data) <= CHUNK_BYTES else b""
        size = len(data)
        self.incomplete_bytes += size
        while data:
            try:
                self._parser.feed_data(data)
                break
            except httptools.HttpParserUpgrade as upgrade:
                data = data[upgrade.args[0] :]
                if self._incoming.is_websocket:
                    self._incoming.rest, self.ended = data, True
                    self._connection.accept(self._incoming)
                    return
                if self._incoming.offers_other_protocol:
                    # The parser has skipped the body. A server may ignore the offer (RFC 9110, section 7.8).
                    self._parser, data = self._new_parser(), self._incoming.head_without_upgrade() + data
            except httptools.HttpParserCallbackError:
                if not self.ended:  # else the callback has refused the request
                    raise
                return
            except httptools.HttpParserError:
                self._refuse(MALFORMED)
                return
        if self.incomplete_bytes > MAX_INCOMPLETE_BYTES:
            self._refuse(TOO_LONG)
        elif self._connection.is_closing():
            return
        elif self._incoming.accepted and not self._incoming.complete:
            self.wait_for_body(size)
        elif self.incomplete_bytes and not self._connection.deadline.is_set(self.refuse_late):
            self.wait_for_head()

    def on_message_begin(self) -> None:
        """Begin a request."""
        self.between_requests = False
        is_repeated = self._incoming.offers_other_protocol  # the same head, without its offer
        began = self._incoming.began if is_repeated else self._connection.tensors.pop_start_time()
        self._incoming = IncomingRequest(began)

    def on_url(self, url: bytes) -> None:
        """Read a part of the URL."""
        self._incoming.url += url
        self._incoming.size += len(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Read a header; count and ignore a trailer."""
        incoming = self._incoming
        incoming.size += len(name) + len(value) + LINE_BYTES
        if not incoming.accepted:
            incoming.add_header(name, value)
        elif incoming.size > MAX_HEAD_BYTES:
            self._stop(TOO_LONG)

    def on_headers_complete(self) -> None:
        """Check the head, and pass the request to the connection.

        A WebSocket follows after its whole request. A head with another offer is read again, without the offer.
        """
        incoming = self._incoming
        self._connection.deadline.clear()
        self.incomplete_bytes = 0
        incoming.method = self._parser.get_method()
        incoming.version = self._parser.get_http_version()
        incoming.keep_alive = self._parser.should_keep_alive()
        incoming.upgrades = self._parser.should_upgrade()
        incoming.use_origin_form()
        refusal = incoming.check_head()
        if refusal is not None:
            self._stop(refusal)
        incoming.head_size, incoming.size = incoming.size, 0
        if not incoming.is_websocket and not incoming.offers_other_protocol:
            self._connection.accept(incoming)

    def on_body(self, body: bytes) -> None:
        """Read a chunk of the body."""
        self.incomplete_bytes = 0
        self.body_bytes += len(body)
        self._connection.receive_body(self._incoming, body)

    def on_message_complete(self) -> None:
        """Read the end of a request."""
        if self._incoming.offers_other_protocol:
            return
        self._connection.deadline.clear()
        self.incomplete_bytes = self.body_bytes = 0
        self.between_requests = True
        incoming = self._incoming
        if not incoming.upgrades:  # else the parser reports the upgrade next
            self._incoming = NO_REQUEST
        first_input, self._first_input = self._first_input, b""
        incoming.complete = True
        self._connection.complete(incoming, first_input)

    def _stop(self, refusal: Refusal) -> None:
        """Refuse the input from a callback of the parser."""
        self._refuse(refusal)
        raise httptools.HttpParserError(refusal.text)

    def _refuse(self, refusal: Refusal) -> None:
        """Read no more input, and pass a refusal to the connection."""
        if self.ended or self._connection.is_closing():
            return
        self.ended = True
        self._connection.deadline.clear()
        incoming = self._incoming
        if not incoming.accepted or incoming.complete:
            self._connection.accept(IncomingRequest(0.0, refusal=refusal))
        else:
            incoming.refusal = refusal
            self._connection.cut_body(incoming)
