"""Requests of sequences, and the number of open sequences."""

from typing import Any

import httpx

from tests.support.open_inference import infer_message
from tests.support.protocols import Clients, native_bytes
from tests.support.scrapes import read_metrics
from tests.support.waiting import wait_until

STEPS: list[tuple[list[list[int]], dict[str, Any], int | str]] = [
    ([[1, 2]], {"sequence_start": True}, 0),
    ([[3]], {}, 2),
    ([[7]], {}, "input_ids[0][0]: got 7, expected 0 to 6"),
    ([[4]], {"parameters": {"offset": 2}}, "offset[0]: got 2, expected 3, the offset of this row"),
    ([[4], [4]], {}, "input_ids: got 2 rows, expected one row, as are running"),
    ([[4, 5, 6, 1]], {}, "offset[0] + tokens: got 3 + 4 = 7, expected at most 6, the max_len of this model"),
    ([[4, 5, 6]], {"parameters": {"offset": 3}}, 3),
    ([[1]], {}, "offset[0] + tokens: got 6 + 1 = 7, expected at most 6, the max_len of this model"),
    ([[1]], {"sequence_start": True, "parameters": {"offset": 4}}, 4),
    ([[2]], {"sequence_end": True}, 5),
    (
        [[2]],
        {},
        "parameters.sequence_id ID does not run on gpt version 1; its first request has ",
    ),
]
"""Ids, parameters of the sequence, and the offset of the row or the error."""


def check(answers: list[bytes | str], id_: int | str, clients: Clients) -> None:
    """Compare the vectors, or the error, of each of STEPS."""
    for (ids, _, expected), found in zip(STEPS, answers, strict=True):
        if isinstance(expected, str):
            assert isinstance(found, str)
            assert found.startswith(expected.replace("ID", repr(id_)))
        else:
            assert found == native_bytes(clients, "gpt", {"input_ids": ids, "offset": expected}).tobytes()


def sequences_open(http: httpx.Client) -> float:
    return read_metrics(http)["preblock_sequences_open",]


def wait_for_sequences(http: httpx.Client, count: int) -> None:
    wait_until(lambda: sequences_open(http) == count)


def request(ids: Any, id_: int, **told: bool) -> Any:
    """Return a request of a sequence, or of none with the id 0."""
    message = infer_message(ids)
    if id_:
        message.parameters["sequence_id"].int64_param = id_
    for name, value in told.items():
        message.parameters[name].bool_param = value
    return message
