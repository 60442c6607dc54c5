"""Decode streams resumed after a broken connection, through a proxy with faults."""

import shutil
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from preblock.client import errors
from tests.client.conftest import Connect, raises_kind, whole
from tests.client.flaky_proxy import CUT, DROP, SWALLOW, Act, After, FlakyProxy, canned
from tests.support.artifacts import copy_artifact
from tests.support.servers import serve

BUSY = canned("503 Service Unavailable", b'{"type":"urn:preblock:error:Unavailable","detail":"full"}')


def decode_rows(client: Any) -> bytearray:
    """Run every operation of a decoder on rows at distinct offsets, and return the bytes of all answers."""
    found = bytearray()
    with client.decode("bert", offset=[0, 2], resume=True) as stream:
        for ids in ([[1], [2]], [[3, 4], []], [[5], [6]]):
            found += stream.step(ids).tobytes()
        stream.rewind([1, 3])
        stream.reorder([1, 0, 1])
        found += stream.step([[7], [8], [9]], token_type_ids=[[1], [0], [1]]).tobytes()
        stream.append(5)
        found += stream.step([[1], [], [], [10]]).tobytes()
        stream.drop([0])
        found += stream.step([[1], [2], [3]], position_ids=[[7], [2], [0]]).tobytes()
        assert stream.offset == [8, 3, 1]
    return found


@pytest.mark.parametrize("direction", ["up", "down"])
def test_stream_resumes_after_connection_cut_at_any_byte(
    connect: Connect, flaky: FlakyProxy, tiny_client: Any, direction: str
) -> None:
    """Connections are cut at bytes of the handshake, of the opening and of frames, before and in answers."""
    # A late cut follows a cut during the opening, so that pauses do not grow.
    early, late = [1, 150, 260, 300, 330, 345], [440, 461, 497, 540, 593, 660]
    if direction == "down":  # the answer to the opening is longer
        late = [byte + 80 for byte in late]
    flaky.script = [After(**{direction: byte}) for pair in zip(early, late, strict=True) for byte in pair]
    script: list[Act] = list(flaky.script)
    assert decode_rows(connect(flaky.address)) == decode_rows(tiny_client)
    assert flaky.connections > 4, f"{script} broke nothing"


@pytest.mark.parametrize("act", [DROP, SWALLOW, CUT, BUSY])
def test_resume_stops_at_retry_limit_and_can_be_repeated(
    connect: Connect, flaky: FlakyProxy, tiny_client: Any, act: Act
) -> None:
    with connect(flaky.address, retries=1).decode("gpt", resume=True) as stream:
        stream.step([1])
        flaky.script = [act] * 2
        flaky.break_all()
        with raises_kind("Unavailable" if act == BUSY else "StreamClosed"):
            stream.step([2])
        assert stream.offset == [1]
        assert np.array_equal(stream.step([2]), whole(tiny_client, [2], model="gpt", offset=1))
    assert flaky.connections == 4


def test_stream_resumes_with_its_first_model_version(connect: Connect, tiny_repository: Path, tmp_path: Path) -> None:
    (tmp_path / "bert").mkdir()
    shutil.copytree(tiny_repository / "bert" / "1", tmp_path / "bert" / "1")
    with (
        serve(tmp_path, PREBLOCK_MODEL_CONTROL="poll", PREBLOCK_MODEL_POLL_INTERVAL_SECONDS="0.1") as server,
        FlakyProxy(server.address) as flaky,
    ):
        client = connect(flaky.address)
        with client.decode("bert", resume=True) as stream:
            first = stream.step([1])
            shutil.copytree(tiny_repository / "bert" / "2", tmp_path / "new")
            (tmp_path / "new").rename(tmp_path / "bert" / "2")
            while client.model("bert").version != 2:
                time.sleep(0.05)
            flaky.break_all()
            stream.rewind(0)
            assert stream.version == 1
            assert np.array_equal(stream.step([1]), first)
            assert not np.array_equal(client.embed([1], model="bert").vectors, first)


def test_resumed_stream_rejects_another_artifact(connect: Connect, tmp_path: Path) -> None:
    """Both servers have a version 1 of the same name, width and limit."""
    for name in ("gpt", "counts-ids"):
        copy_artifact(name, tmp_path / name, "m")
    with (
        serve(tmp_path / "gpt") as first,
        serve(tmp_path / "counts-ids") as second,
        FlakyProxy(first.address) as flaky,
        connect(flaky.address, retries=1).decode("m", resume=True) as stream,
    ):
        expected = stream.step([1])
        flaky.aim(second.address)
        flaky.break_all()
        for _ in range(2):
            with pytest.raises(errors.StreamClosed, match="is another artifact there") as raised:
                stream.rewind(0)
            assert raised.value.offset == stream.offset == [1]
        flaky.aim(first.address)
        stream.rewind(0)
        assert np.array_equal(stream.step([1]), expected)


def test_idle_stream_reports_timeout_or_resumes(connect: Connect, tiny_repository: Path) -> None:
    with serve(tiny_repository, PREBLOCK_STREAM_IDLE_TIMEOUT_SECONDS="1") as impatient:
        client = connect(impatient.address)
        with (
            client.decode("gpt") as fresh,
            client.decode("gpt") as begun,
            client.decode("gpt", resume=True) as resumed,
        ):
            begun.step([1])
            resumed.step([1])
            time.sleep(1.3)
            for stream, offset in ((fresh, [0]), (begun, [1])):
                with pytest.raises(errors.StreamClosed, match="idle") as raised:
                    stream.step([2])
                assert raised.value.offset == offset
            assert np.array_equal(resumed.step([2]), whole(client, [2], model="gpt", offset=1))


@pytest.mark.parametrize("resume", [False, True])
def test_step_timeout_closes_stream_unless_it_resumes(
    connect: Connect, flaky: FlakyProxy, tiny_client: Any, resume: bool
) -> None:
    with connect(flaky.address, timeout=0.5).decode("gpt", resume=resume) as stream:
        stream.step([1])
        flaky.hold()
        with pytest.raises(errors.StreamClosed, match="no answer in time") as raised:
            stream.step([2])
        assert raised.value.offset == stream.offset == [1]
        flaky.release()
        # Its late answer must not be taken for the answer to the next step.
        if resume:
            assert np.array_equal(stream.step([3]), whole(tiny_client, [3], model="gpt", offset=1))
        else:
            with pytest.raises(errors.StreamClosed, match="no answer in time"):
                stream.step([3])
