"""The JSON messages of a decode stream for steps that no frame can hold, described in `docs/decode.md`."""

import base64
import json
from collections.abc import Mapping, Sequence
from typing import Any

from preblock.client.frames import CLOSING, ERROR, VECTORS, AnswerFrame
from preblock.client.results import array_of
from preblock.client.token_ids import to_json


def write_step(fields: Mapping[str, Any], number: int, offset: Sequence[int]) -> str:
    """Return a step as JSON.

    Args:
        fields: `input_ids` or `parts`, and further fields of the step.
        number: number of the message, 1 or more.
        offset: expected offset of each row, checked by the service.

    """
    return to_json({**fields, "step": number, "offset": [*offset] or None})


def read_message(message: bytes) -> AnswerFrame:
    """Read the JSON answer to a step, an error or a close message; its tensors are writable.

    Raises:
        KeyError, TypeError, ValueError: the message is no such answer.

    """
    document = json.loads(message)
    number = document.get("step", 0)
    if "error" in document:
        return AnswerFrame(ERROR, number, [], [], json.dumps(document["error"]).encode())
    offset, context = document["next_offset"], document.get("next_context")
    if "closing" in document:
        return AnswerFrame(CLOSING, number, offset, [], document["closing"].encode(), context)
    if "outputs" in document:
        found = [(output["data"], output["dtype"], output["shape"]) for output in document["outputs"].values()]
    else:  # one output, under its name
        (name,) = document.keys() - ANSWER_FIELDS
        found = [(document[name], document["dtype"], document["shape"])]
    tensors = [array_of(bytearray(base64.b64decode(data)), dtype, shape) for data, dtype, shape in found]
    return AnswerFrame(VECTORS, number, offset, tensors, b"", context)


ANSWER_FIELDS = frozenset(
    ("model", "version", "dtype", "encoding", "use_as", "shape", "lengths", "next_offset", "next_context", "step")
)
"""Fields of an answer beside its output."""
