"""Decode streams that are refused, and steps with invalid input."""

import re
from typing import Any

import numpy as np
import pytest

from preblock.client import errors
from tests.client.conftest import Connect as Connecting
from tests.client.conftest import raises_kind, whole
from tests.client.flaky_proxy import FlakyProxy, canned


@pytest.mark.parametrize(
    ("ids", "field"),
    [
        ([7], "input_ids[0][0]"),
        ([], "input_ids"),
        ([1] * 5, "offset"),
        ([[1], [2]], "input_ids"),
        ([[1, 2], [3]], "input_ids"),
        ([[[1]]], "input_ids"),
        ([[1], 2], "input_ids"),
        (1, "input_ids"),
        ([1.0], "input_ids"),
        ([2**63], "input_ids"),
        ([2**70], "input_ids"),
        (["a"], "input_ids"),
        ("a", "input_ids"),
        (np.zeros((1, 1, 1), np.int64), "input_ids"),
    ],
    ids=str,
)
def test_rejected_step_keeps_offset(tiny_client: Any, ids: Any, field: str) -> None:
    with tiny_client.decode("gpt", offset=2) as stream:
        with raises_kind("Invalid") as raised:
            stream.step(ids)
        assert str(raised.value.field).startswith(field)
        assert stream.offset == [2]
        assert np.array_equal(stream.step([1, 2, 3, 4]), whole(tiny_client, [1, 2, 3, 4], model="gpt", offset=2))


@pytest.mark.parametrize(
    ("method", "argument", "kind", "field"),
    [
        ("rewind", 3, "Invalid", "rewind[0]"),
        ("rewind", [1, 1, 1], "Invalid", "rewind"),
        ("rewind", 1.5, "Invalid", "rewind"),
        ("rewind", [[1, 2]], "Invalid", "rewind"),
        ("reorder", [2], "Invalid", "reorder[0]"),
        ("reorder", [0] * 10**5, "TooLarge", "reorder"),
        ("append", [7], "Invalid", "append"),
        ("drop", [-1], "Invalid", "drop[0]"),
    ],
)
def test_rejected_message_keeps_offsets(tiny_client: Any, method: str, argument: Any, kind: str, field: str) -> None:
    with tiny_client.decode("gpt", offset=2, rows=2) as stream:
        with raises_kind(kind) as raised:
            getattr(stream, method)(argument)
        assert raised.value.field == field
        assert stream.offset == [2, 2]


def test_text_in_place_of_integers_is_quoted(tiny_client: Any) -> None:
    with tiny_client.decode("gpt") as stream:
        for send, given in ((stream.step, "hello"), (stream.step, ["hello"]), (stream.rewind, "1")):
            with raises_kind("Invalid", match=f"got {re.escape(repr(given))}, expected 64-bit integers: "):
                send(given)


def test_step_rejects_unknown_or_mismatched_token_fields(tiny_client: Any) -> None:
    with tiny_client.decode("gpt") as stream:
        for further in ({"attention_mask": [1]}, {"position_ids": [[1], [1]]}, {"token_type_ids": [0, 0]}):
            with raises_kind("Invalid") as raised:
                stream.step([1, 2], **further)
            assert raised.value.field in further
        assert stream.step([1, 2], attention_mask=[[0, 1]]).shape == (1, 2, 4)
        assert stream.offset == [1]


def test_step_beyond_max_len_is_rejected(tiny_client: Any) -> None:
    with tiny_client.decode("gpt", offset=4) as stream:
        stream.step([1, 2])
        with raises_kind("Invalid", match="6") as raised:
            stream.step([1])
        assert raised.value.field == "offset[0] + tokens"
        stream.rewind(5)
        assert np.array_equal(stream.step([3]), whole(tiny_client, [3], model="gpt", offset=5))


@pytest.mark.parametrize(
    ("model", "options", "kind"),
    [
        ("none", {}, "NotFound"),
        ("gpt", {"version": 9}, "NotFound"),
        ("gpt", {"offset": 7}, "Invalid"),
        ("gpt", {"offset": [1, 2], "rows": 3}, "Invalid"),
        ("gpt", {"offset": [], "rows": 3}, "Invalid"),
        ("gpt", {"offset": "1"}, "Invalid"),
        ("gpt", {"rows": -1}, "Invalid"),
        ("gpt", {"rows": 10**6}, "TooLarge"),
        ("gpt", {"dtype": "float64"}, "Invalid"),
        ("gpt", {"output": "logits"}, "Invalid"),
        ("gpt", {"companions": ["embeddings"]}, "Invalid"),
    ],
)
def test_stream_with_invalid_options_is_rejected(
    tiny_client: Any, model: str, options: dict[str, Any], kind: str
) -> None:
    with raises_kind(kind), tiny_client.decode(model, **options):
        pass


def test_stream_opened_by_another_server_is_refused(connect: Connecting, flaky: FlakyProxy) -> None:
    flaky.script = [canned("200 OK", b"<html>")]
    with raises_kind("status 200"), connect(flaky.address).decode("gpt"):
        pass
    assert flaky.connections == 1


def test_broken_stream_reports_offset_to_resume(connect: Connecting, flaky: FlakyProxy, tiny_client: Any) -> None:
    client = connect(flaky.address)
    parts = []
    with client.decode("gpt", offset=1) as stream:
        parts.append(stream.step([1, 2]))
        flaky.break_all()
        with pytest.raises(errors.StreamClosed, match=r"resumes at offset \[3\]$") as raised:
            stream.step([3, 4])
        with pytest.raises(errors.StreamClosed):
            stream.step([3, 4])
    assert flaky.connections == 1
    with client.decode("gpt", offset=raised.value.offset) as stream:
        parts.append(stream.step([3, 4]))
    assert np.array_equal(np.concatenate(parts, 1), whole(tiny_client, [1, 2, 3, 4], model="gpt", offset=1))
