"""Request messages with raw contents as views. Oracle: protobuf's own parser of the whole message.

The generated messages need a process of their own; see test_protobuf.py.
"""

import subprocess
import sys

SCRIPT = """
import random
from google.protobuf.message import DecodeError
from preblock.service.codecs.v2 import open_inference_pb2 as pb
from preblock.service.codecs.v2.protobuf import MAX_SPLIT_FIELDS, MIN_SPLIT_BYTES, read_request
from preblock.service.core.errors import Malformed

def parse(message):
    try:
        fields = pb.ModelInferRequest.FromString(message)
    except DecodeError:
        return None
    raw = list(fields.raw_input_contents)
    del fields.raw_input_contents[:]
    return fields.SerializeToString(deterministic=True), raw

def read(message):
    try:
        fields, raw = read_request(message)
    except Malformed:
        return None
    kinds.add(type(raw).__name__)
    raw = [bytes(content) for content in raw]
    del fields.raw_input_contents[:]
    return fields.SerializeToString(deterministic=True), raw

def draw():
    message = pb.ModelInferRequest(model_name="gpt", id=random.choice(["", "7", "x" * 300]))
    for name in random.sample(["input_ids", "offset", "attention_mask"], random.randrange(4)):
        message.inputs.add(name=name, datatype="INT64", shape=[1, random.choice([3, 2**20])])
        message.raw_input_contents.append(random.randbytes(random.choice([0, 8, MIN_SPLIT_BYTES])))
    message.parameters["sequence_id"].int64_param = -1
    # Unknown fields of every wire type: 9 varint, 10 and 11 of fixed width, 12 bytes, 13 a group.
    unknown = [b"\\x48\\x96\\x01", b"\\x51" + bytes(8), b"\\x5d" + bytes(4), b"\\x62\\x01a", b"\\x6b\\x6c"]
    parts = [message.SerializeToString(), *random.sample(unknown, random.randrange(3))]
    random.shuffle(parts)
    return b"".join(parts) + b"\\x3a\\x80\\x80\\x04" + bytes(MIN_SPLIT_BYTES)

random.seed(0)
kinds, refused = set(), 0
for _ in range(300):
    message = draw()
    assert parse(message) == read(message)
    for _ in range(5):
        changed = bytearray(message)
        for _ in range(random.randrange(1, 4)):
            changed[random.choice([random.randrange(80), random.randrange(len(changed))])] = random.randrange(256)
        changed = bytes(changed)[: random.choice([len(changed), random.randrange(len(changed))])]
        expected = parse(changed)
        refused += expected is None
        assert read(changed) == expected, changed[:100]
empty = b"\\x3a\\x00" * MIN_SPLIT_BYTES  # more entries than `MAX_SPLIT_FIELDS`
assert read(empty) == parse(empty)
for endless in (b"\\x48" + b"\\x96" * 11, b"\\x48\\x96"):  # an integer of too many bytes, and one cut off
    message = draw()[::1] + endless
    assert read(message) is parse(message) is None
long_tag = b"\\xba\\x80\\x80\\x80\\x80\\x80\\x00" + b"\\x80\\x80\\x04" + bytes(MIN_SPLIT_BYTES)
assert read(long_tag) is parse(long_tag) is None
assert kinds == {"list", "RepeatedScalarContainer"} and refused > 100, (kinds, refused)
print("ok")
"""


def test_read_request_equals_protobuf_for_any_bytes() -> None:
    run = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=False)
    assert (run.stdout, run.stderr) == ("ok\n", "")
