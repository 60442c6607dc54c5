"""Decoding over plain HTTP: lines up and down at once, and events. Oracle: one call of the native API."""

import base64
import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx

from tests.support.connections import dial
from tests.support.protocols import Clients, native_bytes

NDJSON = {"Content-Type": "application/x-ndjson"}
JSON = {"Content-Type": "application/json"}
EVENTS = {"Accept": "text/event-stream"}


@contextmanager
def lines_of(clients: Clients, path: str) -> Iterator[tuple[socket.socket, Any]]:
    """Begin a request by hand, and read the head of its answer before anything of its body is sent."""
    url = httpx.URL(clients.http.base_url)
    assert url.port is not None
    with dial(url) as connection, connection.makefile("rb") as answer:
        head = f"POST /models/{path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/x-ndjson\r\n"
        connection.sendall(f"{head}Transfer-Encoding: chunked\r\n\r\n".encode())
        assert answer.readline() == b"HTTP/1.1 200 OK\r\n"
        headers = dict(line.decode().lower().rstrip().split(": ", 1) for line in iter(answer.readline, b"\r\n"))
        assert headers["content-type"] == "application/x-ndjson"
        assert headers["x-accel-buffering"] == "no"
        assert headers["cache-control"] == "no-store"
        yield connection, answer


def send(connection: socket.socket, text: str) -> None:
    connection.sendall(b"%x\r\n%b\r\n" % (len(text), text.encode()))


def receive(answer: Any) -> Any:
    """Read one chunk of one line."""
    content = answer.read(int(answer.readline(), 16))
    assert answer.read(2) == b"\r\n"
    assert content.count(b"\n") == (1 if content else 0)
    return json.loads(content) if content else None


def vectors_of(document: Any) -> bytes:
    return base64.b64decode(document["embeddings"])


def test_each_line_is_answered_before_next_line(tiny_clients: Clients) -> None:
    with lines_of(tiny_clients, "bert/decode?offset=[1,0]") as (connection, answer):
        send(connection, '{"input_ids": [[1, 2], [3]]}\n')
        first = receive(answer)
        assert first["next_offset"] == [3, 1]
        send(connection, '{"reorder": [1, 0], "step": 4}\n')
        assert receive(answer) == {"next_offset": [1, 3], "step": 4}
        send(connection, '{"input_ids": [[4]')  # a line in parts, and two in one
        send(connection, ', [5]]}\n\n{"input_ids": [[11], [1]]}\n{"pi')
        second = receive(answer)
        assert receive(answer)["error"]["title"] == "Invalid"
        send(connection, 'ng": true}')
        connection.sendall(b"0\r\n\r\n")
        assert receive(answer) == {"next_offset": [2, 4]}
        assert receive(answer) is None
    for document, fields in (
        (first, {"input_ids": [[1, 2], [3]], "offset": [1, 0]}),
        (second, {"input_ids": [[4], [5]], "offset": [1, 3]}),
    ):
        assert vectors_of(document) == native_bytes(tiny_clients, "bert", fields).tobytes()


def test_overlong_line_ends_the_response(tiny_http: httpx.Client) -> None:
    content = b'{"ping": true}\n' + b" " * (16 * 2**20 + 1)
    answer = tiny_http.post("/models/gpt/decode", content=content, headers=NDJSON)
    state, error = map(json.loads, answer.text.splitlines())
    assert state == {"next_offset": [0]}
    assert (error["error"]["status"], error["error"]["field"]) == (413, "line")


def test_bad_stream_request_is_rejected_with_status(tiny_http: httpx.Client) -> None:
    ones = b'{"input_ids": [1]}'
    requests = [
        ("gpt/decode", {"Content-Type": "text/plain"}, b"", 415, "Content-Type: got text/plain"),
        ("gpt/decode", NDJSON | {"Content-Encoding": "gzip"}, b"", 415, "Content-Encoding: got gzip"),
        ("gpt/decode", {"Accept": "application/json"}, b"", 406, "Accept: got application/json"),
        ("gpt/decode", JSON | {"Accept": "*/*, text/event-stream;q=0"}, b"", 406, "Accept: got */*, text/event-stream"),
        ("gpt/decode", EVENTS | NDJSON, b"", 406, "Accept: got text/event-stream"),
        ("gpt/decode", EVENTS, b"", 400, "body: not valid JSON"),
        ("gpt/decode?chunk=0", EVENTS, ones, 422, "chunk: got 0"),
        ("gpt/decode?offset=6", EVENTS, ones, 422, "offset[0] + tokens: got 6 + 1 = 7"),
        ("gpt/decode?input_ids=[1]", EVENTS, ones, 422, "input_ids is both in the query and in the body"),
    ]
    for path, headers, body, status, detail in requests:
        answer = tiny_http.post(f"/models/{path}", content=body, headers=headers)
        assert (answer.status_code, answer.headers["Content-Type"]) == (status, "application/problem+json"), detail
        assert answer.json()["detail"].startswith(detail)


def events_of(http: httpx.Client, model: str, **fields: Any) -> list[tuple[str, str, Any]]:
    """Return name, id and data of every event (WHATWG HTML, section 9.2)."""
    answer = http.post(f"/models/{model}/decode", json=fields, headers=EVENTS)
    assert answer.status_code == 200, answer.text
    assert answer.headers["Content-Type"].startswith("text/event-stream")
    assert answer.headers["X-Accel-Buffering"] == "no"
    *blocks, end = answer.text.split("\n\n")
    assert end == ""
    found = []
    for block in blocks:
        parts = dict(line.split(": ", 1) for line in block.split("\n"))
        found.append((parts.get("event", "message"), parts.get("id", ""), json.loads(parts["data"])))
    return found


def test_ids_are_answered_as_events_of_chunk_size(tiny_clients: Clients) -> None:
    fields: dict[str, Any] = {"input_ids": [1, 2, 3, 4, 5], "offset": 1}
    whole = native_bytes(tiny_clients, "gpt", fields)
    for chunk, ids in ((1, ["1", "2", "3", "4", "5"]), (2, ["2", "4", "5"]), (9, ["5"])):
        *events, end = events_of(tiny_clients.http, "gpt", chunk=chunk, **fields)
        assert [(name, number) for name, number, _ in events] == [("message", number) for number in ids]
        assert b"".join(vectors_of(data) for _, _, data in events) == whole.tobytes()
        assert [data["next_offset"] for _, _, data in events] == [[1 + int(number)] for number in ids]
        assert not any("step" in data for _, _, data in events)  # the client sent no numbered steps
        assert end == ("end", "", {"next_offset": [6]})
    by_query = tiny_clients.http.post("/models/gpt/decode?chunk=9&input_ids=[1,2,3,4,5]&offset=1", headers=EVENTS)
    assert json.loads(by_query.text.partition("data: ")[2].partition("\n")[0]) == events[0][2]


def test_body_decides_between_accepted_types(tiny_http: httpx.Client) -> None:
    lines, events = "application/x-ndjson", "text/event-stream"
    for accept in (f"{events}, */*", f"{lines}, Text/Event-Stream;q=0.9", f"{events}, {lines};q=0.9"):
        for headers, body, media in ((JSON, b'{"input_ids": [1]}', events), (NDJSON, b"", lines)):
            answer = tiny_http.post("/models/gpt/decode", content=body, headers=headers | {"Accept": accept})
            assert (answer.status_code, answer.headers["Content-Type"].partition(";")[0]) == (200, media), accept


def test_unequal_rows_end_independently(tiny_clients: Clients) -> None:
    fields: dict[str, Any] = {"input_ids": [[1, 2, 3], [4], [5, 6]], "token_type_ids": [[0, 1, 0], [1], [1, 1]]}
    fields["offset"] = [0, 2, 4]
    *events, end = events_of(tiny_clients.http, "bert", **fields)
    assert [data.get("lengths") for _, _, data in events] == [None, [1, 0, 1], [1, 0, 0]]
    order = [0, 3, 4, 1, 5, 2]  # where the tokens of the events stand in the rows one after another
    whole = native_bytes(tiny_clients, "bert", fields)
    assert b"".join(vectors_of(data) for _, _, data in events) == whole[order].tobytes()
    assert end[2] == {"next_offset": [3, 3, 6]}


def test_error_after_the_first_event_is_an_event(tiny_http: httpx.Client) -> None:
    events = events_of(tiny_http, "gpt", input_ids=[1, 2, 3], offset=4)
    assert [name for name, _, _ in events] == ["message", "message", "error"]
    problem = tiny_http.post("/models/gpt/embed", json={"input_ids": [3], "offset": 6}).json()
    del problem["request_id"]  # the stream is another request
    assert events[-1][2] == {"error": problem}
