"""Request messages of the Open Inference Protocol over gRPC, with the raw tensors as views of the message.

Protobuf's parser copies a raw tensor twice, and holds the GIL meanwhile: other requests would wait for these copies.
NumPy copies an unaligned view once, without the GIL.

Source: Protocol Buffers, "Encoding".
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from google.protobuf.message import DecodeError

from preblock.service.codecs.v2 import open_inference_pb2 as pb
from preblock.service.core.errors import Malformed

RAW_CONTENTS = pb.ModelInferRequest.RAW_INPUT_CONTENTS_FIELD_NUMBER
MIN_SPLIT_BYTES = 2**16
"""Protobuf parses a shorter message in less time than `_split`."""
MAX_SPLIT_FIELDS = 64
"""Most fields that `_split` reads. Messages of clients have fewer: one for each tensor, output and parameter."""
MAX_TAG_BYTES, MAX_VARINT_BYTES = 5, 10
VARINT, FIXED_64, BYTES, FIXED_32 = 0, 1, 2, 5
"""Wire types of fields; there are two others, for the groups of old messages."""


class RequestMessage(NamedTuple):
    """A parsed message.

    Args:
        fields: all fields, with or without the raw contents.
        raw_contents: bytes of the raw tensors, in order.

    """

    fields: pb.ModelInferRequest
    raw_contents: Sequence[bytes | memoryview]


def read(kind: Any, message: bytes) -> Any:
    """Read a message of a generated class.

    Raises:
        Malformed: the bytes are not such a message.

    """
    try:
        return kind.FromString(message)
    except DecodeError as error:
        raise Malformed("message", f"{len(message)} bytes", f"a message {kind.DESCRIPTOR.full_name}") from error


def read_request(message: bytes) -> RequestMessage:
    """Read a request. In a long message the raw contents are views of `message`.

    Raises:
        Malformed: the bytes are not such a message.

    """
    if len(message) >= MIN_SPLIT_BYTES and (parts := _split(message)) is not None:
        others, raw_contents = parts
        return RequestMessage(read(pb.ModelInferRequest, others), raw_contents)
    fields = read(pb.ModelInferRequest, message)
    return RequestMessage(fields, fields.raw_input_contents)


def _split(message: bytes) -> tuple[bytes, list[memoryview]] | None:
    """Return the bytes of all other fields, and views of the raw contents; None if protobuf must read the message."""
    view, position = memoryview(message), 0
    others: list[memoryview] = []
    raw_contents: list[memoryview] = []
    try:
        for _ in range(MAX_SPLIT_FIELDS + 1):
            if position == len(message):
                return (b"".join(others), raw_contents) if raw_contents else None
            tag, start = _read_varint(message, position)
            if start > position + MAX_TAG_BYTES:
                return None
            field, wire_type = tag >> 3, tag & 7
            if wire_type == BYTES:
                size, start = _read_varint(message, start)
                end = start + size
            elif wire_type == VARINT:
                _, end = _read_varint(message, start)
            elif wire_type in (FIXED_64, FIXED_32):
                end = start + (8 if wire_type == FIXED_64 else 4)
            else:
                return None
            if end > len(message):
                return None
            if field == RAW_CONTENTS and wire_type == BYTES:
                raw_contents.append(view[start:end])
            else:
                others.append(view[position:end])
            position = end
    except IndexError:  # an incomplete integer
        pass
    return None


def _read_varint(message: bytes, position: int) -> tuple[int, int]:
    """Return a variable-width integer, and the position after it; raise IndexError without a complete one."""
    value = 0
    for shift in range(0, 7 * MAX_VARINT_BYTES, 7):
        byte = message[position]
        value |= (byte & 0x7F) << shift
        position += 1
        if byte < 0x80:
            return value, position
    raise IndexError
