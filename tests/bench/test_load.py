"""`preblock bench`, against a real server."""

import json
import re
import subprocess
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
import trustme

from preblock.bench.load import PROTOCOLS
from preblock.bench.stats import LoadResult
from preblock.bench.workload import LoadTarget, random_ids
from preblock.client import connect
from preblock.client.errors import RequestError
from tests.cli.command_line import failing, run
from tests.support.paths import PREBLOCK
from tests.support.scrapes import read_metrics
from tests.support.servers import Server, serve
from tests.support.waiting import wait_until

SHORT = ("--seconds", "0.2", "--connections", "2")


def bench(server: Server, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    port = server.grpc.rpartition(":")[2]
    return run("bench", server.address, "--grpc-port", port, *SHORT, *arguments, **environment)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_bench_each_protocol_reports_all_requests(protocol: str, counted_server: Server) -> None:
    """All requests ask the given version."""
    before = answered(counted_server)
    done = bench(counted_server, "--model", "bert@1", "--protocol", protocol, "--shape", "2,3", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    document = json.loads(done.stdout)
    (found,) = document["results"]
    assert (document["system"]["model"], document["system"]["version"]) == ("bert", 1)
    assert (found["protocol"], found["shape"], found["connections"], found["errors"]) == (protocol, [2, 3], 2, {})
    # Of two rows each. The first of each connection is not counted by the load, but by the server.
    rows = 2 * (found["requests"] + 2)
    wait_until(lambda: answered(counted_server) == before | {"1": before.get("1", 0) + rows}, 5)
    assert found["requests"] >= 2
    assert found["seconds"] >= 0.2
    assert found["rates"]["requests"] == pytest.approx(found["requests"] / found["seconds"])
    assert found["rates"]["tokens"] == pytest.approx(6 * found["rates"]["requests"])
    assert found["rates"]["bytes"] > 96 * found["rates"]["requests"]  # 6 vectors of 4 values, of 4 bytes each
    quantiles = list(found["milliseconds"].values())
    assert list(found["milliseconds"]) == ["p50", "p90", "p99", "max"]
    assert quantiles == sorted(quantiles)
    assert 0 < quantiles[0] <= 1e3 * found["seconds"]


def answered(server: Server, model: str = "bert") -> dict[str, float]:
    """Return the server's counter of answered rows for each version of a model."""
    name = "preblock_model_rows_total"
    return {key[2]: value for key, value in read_metrics(server.address).items() if key[:2] == (name, model)}


def test_load_result_has_percentiles_and_rates() -> None:
    result = LoadResult("npy", (2, 5), connections=4, begin=10.0, end=12.0, received=4_000)
    result.latencies.extend(number / 1000 for number in range(101))
    assert result.milliseconds == pytest.approx({"p50": 50, "p90": 90, "p99": 99, "max": 100})
    assert result.rates == pytest.approx({"requests": 50.5, "tokens": 505, "bytes": 2000})
    result = LoadResult("npy", (2, 5), connections=4)
    assert (result.seconds, result.milliseconds, set(result.rates.values())) == (0, {}, {0})


def test_bench_table_has_line_per_protocol_and_shape(tiny_server: Server) -> None:
    done = bench(
        tiny_server, "--model", "gpt", "--protocol", "npy", "--protocol", "steps", "--shape", "1,1", "--shape", "2,6"
    )
    assert (done.returncode, done.stderr) == (0, "")  # nothing moves where there is no terminal
    system, _, results = done.stdout.partition("\n\n")
    server, workers, measured, load_from = system.splitlines()
    version = httpx.get(f"{tiny_server.address}/v2").json()["version"]
    assert server == f"server: preblock {version} at {tiny_server.address}"
    assert measured == "model: gpt version 1, family gpt2, on CPUExecutionProvider"
    assert re.fullmatch(r"load from: .+, \d+ cores, \w+", load_from)
    assert workers == f"workers: 1, on {load_from.removeprefix('load from: ')}"
    head, *lines = results.splitlines()
    assert head.split()[:4] == ["protocol", "shape", "requests/s", "tokens/s"]
    assert [line.split()[:2] for line in lines] == [["npy", "1,1"], ["npy", "2,6"], ["steps", "1,1"], ["steps", "2,6"]]
    assert all(line.split()[-1] == "0" for line in lines)


@pytest.fixture(scope="module")
def guarded(tiny_repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, str]]:
    """A server with API keys and a small token limit, and a valid key."""
    key, entry = run("key", "someone").stdout.split("\n\n")
    keys = tmp_path_factory.mktemp("keys") / "keys.toml"
    keys.write_text(entry)
    with serve(tiny_repository, "--api-keys-file", str(keys), "--rate-limit-per-second", "5") as server:
        yield server, key


def test_bench_with_key_counts_rate_limit_errors_per_protocol(guarded: tuple[Server, str]) -> None:
    server, key = guarded
    for protocol, kind in (
        ("npy", "RateLimited"),
        ("v2", "RateLimited"),
        ("grpc", "RESOURCE_EXHAUSTED"),
        ("steps", "RateLimited"),
    ):
        time.sleep(1.1)  # until it may ask again
        shown, hidden = (("--key", key), {}) if protocol == "npy" else ((), {"PREBLOCK_API_KEY": key})
        done = bench(server, "--model", "gpt", *shown, "--protocol", protocol, "--shape", "1,1", "--json", **hidden)
        assert done.stderr == ""
        (found,) = json.loads(done.stdout)["results"]
        assert set(found["errors"]) == {kind}, protocol
        assert found["errors"][kind] > 0
        assert "5 requests a second" in found["messages"][kind]
        assert done.returncode == (found["requests"] == 0)


def test_bench_counts_errors_and_prints_finished_results(tiny_repository: Path) -> None:
    """The server stops during the first shape, and the second one fails."""
    with serve(tiny_repository) as server:
        command = [PREBLOCK, "bench", server.address, "--model", "gpt", "--seconds", "2", "--json"]
        command += ["--shape", "1,1", "--shape", "1,2"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            wait_until(lambda: answered(server, "gpt").get("1", 0) > 4, 60)  # after the first of each connection
            server.process.terminate()
            said, errors = process.communicate(timeout=60)
    (found,) = json.loads(said)["results"]
    assert (found["shape"], process.returncode) == ([1, 1], 1)
    assert found["requests"] > 0
    assert found["seconds"] >= 2  # else the rates would be those of the time until the stop
    assert set(found["errors"]) & {"ConnectionResetError", "ConnectionRefusedError"}
    address = re.escape(server.address.removeprefix("http://"))
    assert re.fullmatch(rf"\S+: no connection to {address} \(.*\)\n", errors)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        *((("--shape", shape), f"'{shape}' is not rows and tokens") for shape in ("8", "0,1", "1,2,3", "-1,2")),
        *((("--seconds", time), f"'--seconds': '{time}' is not a positive number") for time in ("0", "soon", "nan")),
        (("--connections", "0"), "'--connections': 0 is not in the range"),
        (("--timeout", "inf"), "'--timeout': 'inf' is not a positive number of seconds"),
        (("--protocol", "nope"), "'nope' is not one of 'npy', 'v2', 'json', 'grpc', 'steps'"),
        (("--protocol", "grpc"), "the protocol grpc needs --grpc-port"),
        (("--model", "gpt@x"), "gpt@x: the version after the @ is 'x', not a whole number from 1 on"),
    ],
)
def test_bench_with_invalid_option_fails_with_one_line(arguments: tuple[str, ...], said: str) -> None:
    assert said in failing("bench", "http://127.0.0.1:9", "--model", "gpt", *arguments, code=2)


def test_bench_that_cannot_begin_fails_with_one_line(tiny_server: Server, guarded: tuple[Server, str]) -> None:
    tiny = tiny_server.address
    for address, arguments, said in (
        (tiny, ("--model", "nope"), "model: got nope, expected bert, gpt"),
        (tiny, ("--model", "gpt@9"), "version: got 9, expected"),
        (tiny, ("--shape", "1,7"), "shape: got 1,7, expected at most 6 tokens of a row"),
        (tiny, ("--shape", "65536,6"), "shape: got 65536,6, expected at most 65536 tokens"),
        (tiny, ("--protocol", "grpc", "--grpc-port", "9", "--timeout", "0.5"), "no connection to 127.0.0.1:9 within"),
        (guarded[0].address, (), "key"),
        ("http://127.0.0.1:9", (), "efused"),
        ("127.0.0.1:8000", (), "url: got 127.0.0.1:8000, expected http://"),
    ):
        assert said in failing("bench", address, "--model", "gpt", *arguments, code=1), said


def test_random_ids_for_stem_model_are_rejected(tiny_server: Server) -> None:
    with connect(tiny_server.address) as client:
        stem = replace(client.model("gpt"), manifest={"kind": "stem"})
    with pytest.raises(RequestError, match="model: got gpt, of stem, expected a model of token ids"):
        random_ids(stem, (1, 1))


def test_load_target_keeps_path_of_address() -> None:
    target = LoadTarget("http://host:81/below/", "a b", version=2)
    assert target.path("embed") == "/below/models/a%20b/versions/2/embed"
    assert target.path("infer", "/v2") == "/below/v2/models/a%20b/versions/2/infer"


def test_bench_over_tls_works_only_with_trusted_certificate(tiny_repository: Path, tmp_path: Path) -> None:
    authority, pair, trusted = trustme.CA(), str(tmp_path / "pair.pem"), str(tmp_path / "trusted.pem")
    authority.issue_cert("127.0.0.1").private_key_and_cert_chain_pem.write_to_path(pair)
    authority.cert_pem.write_to_path(trusted)
    with serve(tiny_repository, "--tls-cert-file", pair, "--tls-key", pair) as server:
        command = ["bench", server.address, "--model", "gpt", "--grpc-port", server.grpc.rpartition(":")[2], *SHORT]
        protocols = [argument for protocol in ("npy", "grpc", "steps") for argument in ("--protocol", protocol)]
        done = run(*command, *protocols, "--shape", "1,1", "--json", SSL_CERT_FILE=trusted)
        assert (done.returncode, done.stderr) == (0, "")
        assert [(found["errors"], found["requests"] > 0) for found in json.loads(done.stdout)["results"]] == [
            ({}, True)
        ] * 3
        assert "certificate" in failing(*command, code=1).lower()
