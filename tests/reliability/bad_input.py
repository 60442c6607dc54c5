"""Bad requests as rows of a table: the protocols that carry each, and the field of its error."""

from tests.support.decode_protocols import decode_frame, decode_json
from tests.support.protocols import (
    TENSORS,
    Fields,
    Protocol,
    grpc_raw,
    grpc_typed,
    native_json,
    native_npy,
    native_raw,
    native_safetensors,
    open_inference_binary,
    open_inference_json,
)

BINARY = (native_npy, native_raw, native_safetensors, *TENSORS)
TENSOR = (native_json, *BINARY)
STREAMS = (decode_json, decode_frame)
EVERY = (*TENSOR, *STREAMS)
BATCHES = (*TENSOR, decode_json)
JSON = (native_json, open_inference_json, decode_json)
NATIVE = (native_json, native_npy)
TEXTS = (native_json, decode_json)

Row = tuple[Fields, tuple[Protocol, ...], str]
BAD: dict[str, list[Row]] = {
    "bert": [
        ({"input_ids": [[1, -1]]}, EVERY, "input_ids[0][1]: got -1, expected 0 to 10"),
        ({"input_ids": [[1, 11]]}, EVERY, "input_ids[0][1]: got 11, expected 0 to 10"),
        ({"input_ids": [[2**63 - 1]]}, EVERY, "input_ids[0][0]: got 9223372036854775807, expected 0 to 10"),
        ({"input_ids": [[-(2**63)]]}, EVERY, "input_ids[0][0]: got -9223372036854775808, expected 0 to 10"),
        ({"input_ids": [[2**63]]}, (*JSON, native_npy), "got 9223372036854775808, expected a 64-bit integer"),
        ({"input_ids": [[1, 2.0]]}, JSON, "[1]: got 2.0, expected a 64-bit integer"),
        ({"input_ids": [[1.0, 2.0]]}, (native_npy,), "input_ids dtype: got float64, expected an integer type"),
        ({"input_ids": [[1, True]]}, JSON, "[1]: got True, expected a 64-bit integer"),
        ({"input_ids": [[True]]}, (native_npy,), "input_ids dtype: got bool, expected an integer type"),
        ({"input_ids": [[1, "2"]]}, JSON, "[1]: got '2', expected a 64-bit integer"),
        ({"input_ids": [["2"]]}, (native_npy,), "input_ids dtype: got <U1, expected an integer type"),
        ({"input_ids": [[1, None]]}, JSON, "[1]: got None, expected a 64-bit integer"),
        ({"input_ids": [[None]]}, (native_npy,), "body: not a valid .npy file "),
        ({"input_ids": [[{}]]}, JSON, "got {}, expected a 64-bit integer"),
        ({"input_ids": [[[1]]]}, TEXTS, "input_ids[0][0]: got [1], expected a 64-bit integer"),
        (
            {"input_ids": [[[1]]]},
            (open_inference_binary, grpc_raw),
            "input_ids.shape: got [1, 1, 1], expected [batch, ",
        ),
        (
            {"input_ids": [[[1]]]},
            (native_npy,),
            "input_ids shape: got (1, 1, 1), expected (length,) or (batch, length)",
        ),
        ({"input_ids": "12"}, TEXTS, "input_ids: got '12', expected a list of integers"),
        ({"input_ids": 12}, TEXTS, "input_ids: got 12, expected a list of integers"),
        ({"input_ids": [[1], 2]}, TEXTS, "input_ids[1]: got 2, expected a row"),
        ({"input_ids": []}, TEXTS, "input_ids: got [], expected at least one row"),
        ({"input_ids": []}, (open_inference_json, grpc_typed), "input_ids.shape: got [0, 0], expected sizes of 1 "),
        ({"input_ids": [[1], []]}, (native_json,), "input_ids[1]: got [], expected a row of at least one"),
        ({"input_ids": [[], []]}, TENSORS, "input_ids.shape: got [2, 0], expected sizes of 1 or more"),
        ({"input_ids": [[]]}, STREAMS, "input_ids[0]: got an empty row, expected at least one id"),
        ({"input_ids": [[1], [2]]}, (decode_json,), "input_ids: got 2 rows, expected one row"),
        ({"offset": 0}, (native_json,), "input_ids, text or parts is required"),
        ({"offset": 0}, TENSORS, "inputs: got no input_ids, expected a tensor input_ids"),
        ({"token_type_ids": [0]}, (decode_json,), "input_ids: got None, expected a list of integers"),
        ({"input_ids": [[1]], "mask": [[1]]}, NATIVE, "unknown field mask; expected input_ids, "),
        ({"input_ids": [[1]], "mask": [[1]]}, TENSORS, "inputs.name: got mask, expected input_ids, "),
        (
            {"input_ids": [[1]], "mask": [[1]]},
            (decode_json,),
            "unknown field mask; expected input_ids, position_ids, ",
        ),
        ({"input_ids": [[1, 2]], "token_type_ids": [[0, 2]]}, BATCHES, "token_type_ids[0][1]: got 2, expected 0 to 1"),
        (
            {"input_ids": [[1, 2]], "token_type_ids": [[-1, 0]]},
            BATCHES,
            "token_type_ids[0][0]: got -1, expected 0 to 1",
        ),
        (
            {"input_ids": [[1, 2]], "token_type_ids": [[0]]},
            BATCHES,
            "token_type_ids[0]: got 1 values, expected 2 ",
        ),
        (
            {"input_ids": [[1, 2]], "token_type_ids": [[0, 0], [0, 0]]},
            BATCHES,
            "token_type_ids: got 2 rows, expected 1 rows",
        ),
    ],
    "gpt": [
        ({"input_ids": [[7, 0]]}, EVERY, "input_ids[0][0]: got 7, expected 0 to 6"),
        ({"input_ids": [[1, 2]], "token_type_ids": [[0, 0]]}, BATCHES, "token_type_ids is not an input: "),
        ({"input_ids": [[1, 2]], "attention_mask": [[1, 2]]}, TENSOR, "attention_mask[0][1]: got 2, expected 0 to 1"),
        ({"input_ids": [[1, 2]], "attention_mask": [[1, 1, 1]]}, TENSOR, "attention_mask[0]: got 3 values, expected 2"),
        ({"input_ids": [[1, 2]], "position_ids": [[0, 6]]}, TENSOR, "position_ids[0][1]: got 6, expected 0 to 5"),
        ({"input_ids": [[1, 2]], "position_ids": [[-1, 0]]}, TENSOR, "position_ids[0][0]: got -1, expected 0 to 5"),
        ({"input_ids": [[1]], "position_ids": [[0]], "offset": 0}, TENSOR, "offset and position_ids exclude each oth"),
        ({"input_ids": [[1]], "offset": -1}, TENSOR, "offset[0]: got -1, expected 0 or more"),
        ({"input_ids": [[1]], "offset": -1}, STREAMS, "offset: got -1, expected 0 to 6"),
        ({"input_ids": [[1], [1]], "offset": [0, -1]}, TENSOR, "offset[1]: got -1, expected 0 or more"),
        ({"input_ids": [[1, 2, 3]], "offset": 4}, EVERY, "offset[0] + tokens: got 4 + 3 = 7, expected at most 6"),
        ({"input_ids": [[1, 2], [1, 2]], "offset": [4, 5]}, TENSOR, "offset[1] + tokens: got 5 + 2 = 7, expected at"),
        ({"input_ids": [[0] * 7]}, EVERY, "offset[0] + tokens: got 0 + 7 = 7, expected at most 6"),
        (
            {"input_ids": [[1, 2, 3]], "attention_mask": [[1, 0, 1]], "offset": 5},
            TENSOR,
            "got 5 + 2 = 7, expected at most 6",
        ),
        ({"input_ids": [[1, 2]], "offset": 2**63 - 1}, TENSOR, "got 9223372036854775807 + 2 = 9223372036854775809"),
        ({"input_ids": [[1]], "offset": 2**63 - 1}, STREAMS, "offset: got 9223372036854775807, expected 0 to 6"),
        ({"input_ids": [[1]], "offset": -(2**63)}, TENSOR, "offset[0]: got -9223372036854775808, expected 0 or more"),
        ({"input_ids": [[1]], "offset": 2**63}, NATIVE, "offset: got 9223372036854775808, expected a 64-bit integer"),
        ({"input_ids": [[1]], "offset": 2**63}, (open_inference_json,), "offset.data[0]: got 9223372036854775808, "),
        ({"input_ids": [[1]], "offset": 2**63}, STREAMS, "offset: got 9223372036854775808, expected a 64-bit integer"),
        ({"input_ids": [[1]], "offset": 2**64}, (*NATIVE, *STREAMS), "offset: got 1.8446744073709552e+19, expected a"),
        ({"input_ids": [[1]], "offset": 1.0}, (*NATIVE, *STREAMS), "offset: got 1.0, expected a"),
        ({"input_ids": [[1]], "offset": True}, NATIVE, "offset: got True, expected a"),
        ({"input_ids": [[1]], "offset": "1"}, NATIVE, "offset: got '1', expected a"),
        ({"input_ids": [[1]], "offset": []}, NATIVE, "offset: got [], expected a"),
        ({"input_ids": [[1], [1]], "offset": [0, 0, 0]}, TENSOR, "offset: got 3 values, expected one value, or one "),
        ({"input_ids": [[1]], "dtype": "float64"}, (native_json,), "dtype: got float64, expected float32, "),
        ({"input_ids": [[1]], "dtype": 5}, (native_json,), "dtype: got 5, expected a name"),
        ({"input_ids": [[1]], "encoding": "hex"}, (native_json,), "encoding: got hex, expected base64, "),
    ],
}
"""Fields, the protocols that can express them, and a part of the message, by model."""
