"""Frames of WebSocket clients (RFC 6455, section 5)."""

BINARY, MASKED, FINAL, CONTROL = 0x82, 0x80, 0x80, 0x08
"""First byte of a binary message in one frame, and bits of the first two bytes of a frame."""
MASK_BYTES = 4
LENGTH_BYTES = {126: 2, 127: 8}
"""Bytes of the extended payload length, by the length code."""


def binary_payload(data: bytes) -> bytes | None:
    """Return the payload if `data` is exactly one binary message of at most 65,535 bytes, else None."""
    if len(data) < 2 + MASK_BYTES or data[0] != BINARY or not MASKED <= data[1] < MASKED + 127:
        return None
    start = 6 if data[1] < MASKED + 126 else 8
    length = data[1] - MASKED if start == 6 else int.from_bytes(data[2:4], "big")
    if len(data) != start + length:
        return None
    return unmask(data[start:], data[start - MASK_BYTES : start])


def unmask(payload: bytes, mask: bytes) -> bytes:
    """Remove the mask from a client's payload (section 5.3)."""
    size = len(payload)
    repeated = (mask * (size // MASK_BYTES + 1))[:size]
    return (int.from_bytes(payload, "little") ^ int.from_bytes(repeated, "little")).to_bytes(size, "little")


class FrameTracker:
    """Tracks frame boundaries in a client's input.

    Attributes:
        fragments: frames of the incomplete message; 0 between two messages.
        received: payload bytes of the last message, complete or not.

    """

    def __init__(self) -> None:
        self.fragments = self.received = 0
        self._head = b""
        self._payload = 0  # remaining payload bytes of the current frame

    @property
    def between_messages(self) -> bool:
        """Whether the input ends with a complete message, or with a complete control frame after one."""
        return not self.fragments and not self._head and not self._payload

    def feed(self, data: bytes) -> None:
        """Read the next bytes of input."""
        position = 0
        while position < len(data):
            if self._payload:
                size = min(self._payload, len(data) - position)
                self._payload -= size
                self.received += size
                position += size
            else:
                self._head += data[position : position + 1]
                position += 1
                self._read_head()

    def _read_head(self) -> None:
        """Start the payload of a frame if its head is complete."""
        head = self._head
        code = head[1] % MASKED if len(head) > 1 else 0
        extended = LENGTH_BYTES.get(code, 0)
        if len(head) < 2 + extended + MASK_BYTES:
            return
        self._head, self._payload = b"", int.from_bytes(head[2 : 2 + extended], "big") if extended else code
        if not head[0] & CONTROL:
            self.received = self.received if self.fragments else 0
            self.fragments = 0 if head[0] & FINAL else self.fragments + 1
