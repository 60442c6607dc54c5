"""Frames of a WebSocket (RFC 6455, section 5)."""

import struct

BINARY, MASKED, FINAL, CONTROL = 0x82, 0x80, 0x80, 0x08
"""First byte of a binary message in one frame, and bits of the first two bytes of a frame."""
MASK_BYTES = 4
LONGEST = 127
LENGTH_BYTES = {126: 2, LONGEST: 8}
"""Bytes of the extended payload length, by the length code."""
MAX_FRAGMENT_BYTES = 2**16
"""Bytes of a frame that stays whole."""


def binary_payload(data: bytes) -> bytes | None:
    """Return the payload if `data` is exactly one binary message of at most 65,535 bytes, else None."""
    if len(data) < 2 + MASK_BYTES or data[0] != BINARY or not MASKED <= data[1] < MASKED + 127:
        return None
    start = 6 if data[1] < MASKED + 126 else 8
    length = data[1] - MASKED if start == 6 else int.from_bytes(data[2:4], "big")
    if len(data) != start + length:
        return None
    return unmask(data[start:], data[start - MASK_BYTES : start])


def binary_head(size: int) -> bytes:
    """Return the head of a server's binary message in one frame of `size` bytes.

    Clients reject a length in more bytes than it needs.
    """
    if size < 126:
        return struct.pack("!BB", BINARY, size)
    return struct.pack("!BBH", BINARY, 126, size) if size < 2**16 else struct.pack("!BBQ", BINARY, LONGEST, size)


def unmask(payload: bytes, mask: bytes) -> bytes:
    """Remove the mask from a client's payload (section 5.3)."""
    size = len(payload)
    repeated = (mask * (size // MASK_BYTES + 1))[:size]
    return (int.from_bytes(payload, "little") ^ int.from_bytes(repeated, "little")).to_bytes(size, "little")


class FrameReader:
    """Tracks frame boundaries in a client's input, and splits long frames into fragments (section 5.4).

    `websockets` copies a complete frame several times, and other requests wait meanwhile. Fragments are short, so they
    are copied and unmasked while the rest arrives.

    Args:
        max_bytes: largest message; a longer frame is not split, so that its head alone is refused.

    Attributes:
        fragments: frames of the incomplete message; 0 between two messages.
        received: payload bytes of the incomplete message, and of control frames within it.

    """

    def __init__(self, max_bytes: int) -> None:
        self.fragments = self.received = 0
        self._max_bytes = max_bytes
        self._head = b""
        self._payload = 0  # remaining payload bytes of the current frame
        self._split = False
        self._fragment_payload = bytearray()
        self._first, self._mask = 0, b""  # first byte and mask of the next fragment

    @property
    def between_messages(self) -> bool:
        """Whether the input ends with a complete message, or with a complete control frame after one."""
        return not self.fragments and not self._head and not self._payload

    def feed(self, data: bytes) -> bytes:
        """Read the next bytes of input, and return frames with the same messages, without the end of a long one."""
        position, found = 0, []
        while position < len(data):
            if self._payload:
                part = data[position : position + self._payload]
                self._payload -= len(part)
                self.received += len(part)
                position += len(part)
                found.append(self._fragment(part) if self._split else part)
            else:
                self._head += data[position : position + 1]
                position += 1
                found.append(self._read_head())
            if self.between_messages:
                self.received = 0
        return b"".join(found)

    def _read_head(self) -> bytes:
        """Read the head of a frame so far, and return its bytes that `websockets` may read now."""
        head = self._head
        code = head[1] % MASKED if len(head) > 1 else 0
        begin, end = 2, 2 + LENGTH_BYTES.get(code, 0)
        if code == LONGEST and head[1] >= MASKED and not head[0] & CONTROL:
            begin = end  # its length decides
        if len(head) < begin:
            return b""
        length = int.from_bytes(head[2:end], "big") if end > 2 else code
        split = begin > 2 and MAX_FRAGMENT_BYTES < length <= self._max_bytes
        if len(head) == end + MASK_BYTES:
            self._head, self._payload, self._split = b"", length, split
            self._first, self._mask = head[0], head[-MASK_BYTES:]
            if not head[0] & CONTROL:
                self.fragments = 0 if head[0] & FINAL else self.fragments + 1
        if split:
            return b""
        return head if len(head) == begin else head[-1:]

    def _fragment(self, part: bytes) -> bytes:
        """Add to the payload of a long frame, and return the next fragment if it is complete."""
        self._fragment_payload += part
        size = len(self._fragment_payload)
        if self._payload and size < MAX_FRAGMENT_BYTES:
            return b""
        first = self._first if not self._payload else self._first & ~FINAL
        frame = struct.pack("!BBQ", first, MASKED + LONGEST, size) + self._mask + self._fragment_payload
        self._first &= FINAL  # further fragments continue the message
        turn = size % MASK_BYTES
        self._mask = self._mask[turn:] + self._mask[:turn]
        self._fragment_payload.clear()
        return frame
