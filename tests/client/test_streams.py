"""Decode streams on a real server, and refused messages. Oracle: one call, itself tested against the native API."""

import asyncio
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

import preblock
from preblock.client import errors
from tests.client.conftest import Connect, raises_kind, whole
from tests.client.flaky_proxy import FlakyProxy
from tests.support.late import torch
from tests.support.servers import Server


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_stream_steps_equal_one_call_bit_for_bit(tiny_client: Any, dtype: str) -> None:
    steps: list[Any] = [range(1, 2), np.array([2, 3], np.uint8), torch.tensor([4]), ((5, 6),)]
    with tiny_client.decode("bert", version=1, offset=range(1, 2), dtype=dtype) as stream:
        parts = [stream.step(ids) for ids in steps]
        assert [part.shape for part in parts] == [(1, 1, 4), (1, 2, 4), (1, 1, 4), (1, 2, 4)]
        assert (stream.offset, stream.version) == ([7], 1)
    expected = whole(tiny_client, [range(1, 7)], model="bert", version=1, offset=1, dtype=dtype)
    found = np.concatenate(parts, 1)
    assert (found.dtype, found.tobytes()) == (expected.dtype, expected.tobytes())
    parts[0][:] = 0


def test_rows_stay_correct_after_rewind_reorder_and_resize(connect: Connect, tiny_server: Server) -> None:
    client = connect(tiny_server.address)

    def expect(vectors: Any, ids: Any, **fields: Any) -> None:
        expected = whole(client, ids, model="bert", **fields)
        assert (vectors.shape, vectors.tobytes()) == (expected.shape, expected.tobytes())

    with client.decode("bert", offset=[0, 3]) as stream:
        expect(stream.step([[1, 2], [3, 4]]), [[1, 2], [3, 4]], offset=[0, 3])
        expect(stream.step([[5, 6, 7], [8]]), [[5, 6, 7], [8]], offset=[2, 5])
        assert stream.step([[], [9]]).shape == (1, 4)
        assert stream.offset == [5, 7]
        stream.rewind([1, 7])
        stream.reorder([1, 0, 0])
        assert stream.offset == [7, 1, 1]
        stream.append(4)
        stream.append([0, 2])
        stream.drop([0, 4])
        stream.drop(3)
        assert stream.offset == [1, 1, 4]
        stream.rewind(1)
        stream.ping()
        segments = [[0, 1], [1, 1], [0, 0]]
        ids = np.array([[1, 2], [3, 4], [5, 6]])
        expect(stream.step(ids, token_type_ids=segments), ids, token_type_ids=segments, offset=1)
        mask = torch.tensor([[0, 1], [1, 1], [1, 0]])
        expect(stream.step(ids, attention_mask=mask), ids, attention_mask=mask, offset=3)
        assert stream.offset == [4, 5, 4]
        places = [[7, 0], [6, 5], [0, 1]]
        expect(stream.step(ids, position_ids=places), ids, position_ids=places)
        assert stream.offset == [8, 7, 2]
        stream.drop([2, 0, 1])
        assert stream.offset == []
        stream.append([7])
        expect(stream.step([3]), [3], offset=7)


@pytest.mark.parametrize(
    ("options", "offset"), [({"offset": 2, "rows": np.int64(3)}, [2, 2, 2]), ({"rows": 0}, []), ({"offset": []}, [])]
)
def test_stream_opens_with_rows_or_none(tiny_client: Any, options: dict[str, Any], offset: list[int]) -> None:
    with tiny_client.decode("gpt", **options) as stream:
        assert stream.offset == offset


@pytest.mark.parametrize("resume", [False, True])
def test_cancelled_step_does_not_advance_stream(flaky: FlakyProxy, resume: bool) -> None:
    async def cancel() -> None:
        async with preblock.connect_async(flaky.address) as client, client.decode("gpt", resume=resume) as stream:
            flaky.hold()
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(stream.step([1]), 0.2)
            flaky.release()
            if resume:
                expected = await client.embed([2], model="gpt")
                assert np.array_equal(await stream.step([2]), expected.vectors)
                return
            with pytest.raises(errors.StreamClosed, match="not waited for") as raised:
                await stream.step([2])
            assert raised.value.offset == [0]

    asyncio.run(cancel())


def test_concurrent_steps_of_stream_run_in_order(tiny_server: Server) -> None:
    async def together() -> None:
        async with preblock.connect_async(tiny_server.address) as client, client.decode("gpt") as stream:
            found = await asyncio.gather(*(stream.step([index]) for index in range(6)))
            expected = (await client.embed(list(range(6)), model="gpt")).vectors
            assert np.array_equal(np.concatenate(found, 1), expected)

    asyncio.run(together())


def test_steps_with_nine_further_inputs_equal_one_call(kinds_client: Any) -> None:
    """The flags of a frame name eight inputs; rows of different lengths hold values for the ninth too."""
    ids = [[1, 2, 3], [4]]
    levels: dict[str, Any] = {f"level_{number}": [[number % 2, 1, 0], [1]] for number in range(9)}
    first = {name: rows for name, rows in levels.items() if name != "level_8"}
    with kinds_client.decode("nine-levels", rows=2) as stream:
        for indices in (levels, first):
            expected = kinds_client.embed(ids, model="nine-levels", indices=indices).vectors
            assert np.array_equal(stream.step(ids, indices=indices), expected)
        assert stream.offset == [6, 2]
        with pytest.raises(errors.RequestError, match=r"no such input; it has .*level_8"):
            stream.step(ids, indices={"level_9": ids})


def test_stream_without_context_manager_works(connect: Connect, tiny_server: Server) -> None:
    client = connect(tiny_server.address)
    stream = client.decode("gpt", offset=1, rows=2)
    assert (stream.offset, stream.version) == ([1, 1], None)
    assert np.array_equal(stream.step([[1], [2]]), whole(client, [[1], [2]], model="gpt", offset=1))
    assert (stream.offset, stream.version) == ([2, 2], 1)
    stream.close()
    with pytest.raises(errors.StreamClosed, match=r"closed by its user; a new stream resumes at offset \[2, 2\]"):
        stream.step([[1], [2]])
    with raises_kind("NotFound"):
        client.decode("none").step([1])


def test_open_stream_does_not_block_interpreter_exit(tiny_server: Server) -> None:
    script = f"import preblock; preblock.connect({tiny_server.address!r}).decode('gpt').step([1]); print('done')"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr


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


def test_broken_stream_reports_offset_to_resume(connect: Connect, flaky: FlakyProxy) -> None:
    with connect(flaky.address).decode("gpt", offset=1) as stream:
        stream.step([1, 2])
        flaky.break_all()
        for _ in range(2):
            with pytest.raises(errors.StreamClosed) as raised:
                stream.step([3, 4])
            assert raised.value.offset == [3]
    assert flaky.connections == 1
