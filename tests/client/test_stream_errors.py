"""Decode streams that are refused, and messages with invalid input."""

from typing import Any

import numpy as np
import pytest

from preblock.client import errors
from tests.client.conftest import Connect, raises_kind, whole
from tests.client.flaky_proxy import FlakyProxy
from tests.support.servers import Server


@pytest.mark.parametrize(
    ("method", "argument", "kind", "field"),
    [
        ("step", [[7], [1]], "Invalid", "input_ids[0][0]"),
        ("step", [], "Invalid", "input_ids"),
        ("step", [[1] * 5, [1]], "Invalid", "offset[0] + tokens"),
        ("step", [[1]], "Invalid", "input_ids"),
        ("step", [[[1]]], "Invalid", "input_ids[0]"),
        ("step", 1, "Invalid", "input_ids"),
        ("step", [1.0], "Invalid", "input_ids"),
        ("step", [2**63], "Invalid", "input_ids"),
        ("step", [2**70], "Invalid", "input_ids"),
        ("step", [["a"]], "Invalid", "input_ids[0]"),
        ("step", "a", "Invalid", "input_ids"),
        ("step", np.zeros((1, 1, 1), np.int64), "Invalid", "input_ids"),
        ("rewind", 3, "Invalid", "rewind[0]"),
        ("rewind", [1, 1, 1], "Invalid", "rewind"),
        ("rewind", 1.5, "Invalid", "rewind"),
        ("rewind", [[1, 2]], "Invalid", "rewind"),
        ("reorder", [2], "Invalid", "reorder[0]"),
        ("reorder", [0] * 10**5, "TooLarge", "reorder"),
        ("append", [7], "Invalid", "append"),
        ("drop", [-1], "Invalid", "drop[0]"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_rejected_message_changes_nothing(tiny_client: Any, method: str, argument: Any, kind: str, field: str) -> None:
    with tiny_client.decode("gpt", offset=2, rows=2) as stream:
        with raises_kind(kind) as raised:
            getattr(stream, method)(argument)
        assert raised.value.field == field
        assert stream.offset == [2, 2]
        ids = [[1, 2, 3, 4], [4, 3, 2, 1]]
        assert np.array_equal(stream.step(ids), whole(tiny_client, ids, model="gpt", offset=2))


def test_message_that_cannot_be_sent_changes_nothing(connect: Connect, tiny_server: Server) -> None:
    client = connect(tiny_server.address)
    with client.decode("gpt") as stream:
        for field, call in (
            ("input_ids", stream.step),
            ("attention_mask", lambda: stream.step([1, 2], attention_mask=[1])),
            ("position_ids", lambda: stream.step([1, 2], position_ids=[[1], [1]])),
            ("token_type_ids", lambda: stream.step([1, 2], token_type_ids=[0, 0])),
            ("word", lambda: stream.step([1, 2], indices={"word": [1, 1]})),
            ("context", lambda: stream.append([0], context=[[1]])),
        ):
            with raises_kind("Invalid") as raised:
                call()
            assert (raised.value.field, stream.offset) == (field, [0])
        assert stream.step([1, 2], attention_mask=[[0, 1]]).shape == (1, 2, 4)
        assert stream.offset == [1]
    with raises_kind("TooLarge"), client.decode("gpt", rows=10**6):
        pass


@pytest.mark.parametrize(
    ("options", "kind", "field"),
    [
        ({"model": "none"}, "NotFound", "model"),
        ({"offset": [1, 2], "rows": 3}, "Invalid", "offset"),
        ({"offset": [], "rows": 3}, "Invalid", "offset"),
        ({"offset": "1"}, "Invalid", "offset"),
        ({"output": ["embeddings"]}, "Invalid", "output"),
        ({"dtype": np.float16}, "Invalid", "dtype"),
        ({"companions": "rotary_cos"}, "Invalid", "companions"),
        ({"companions": None}, "Invalid", "companions"),
        ({"companions": ["embeddings"]}, "Invalid", "output"),
    ],
    ids=str,
)
def test_stream_with_invalid_options_is_rejected(
    tiny_client: Any, options: dict[str, Any], kind: str, field: str
) -> None:
    with raises_kind(kind) as raised, tiny_client.decode(**{"model": "gpt"} | options):
        pass
    assert raised.value.field == field


def test_broken_stream_reports_offset_to_resume(connect: Connect, flaky: FlakyProxy, tiny_client: Any) -> None:
    client = connect(flaky.address)
    parts = []
    with client.decode("gpt", offset=1) as stream:
        parts.append(stream.step([1, 2]))
        flaky.break_all()
        for _ in range(2):
            with pytest.raises(errors.StreamClosed) as raised:
                stream.step([3, 4])
            assert raised.value.offset == [3]
    assert flaky.connections == 1
    with client.decode("gpt", offset=raised.value.offset) as stream:
        parts.append(stream.step([3, 4]))
    assert np.array_equal(np.concatenate(parts, 1), whole(tiny_client, [1, 2, 3, 4], model="gpt", offset=1))
