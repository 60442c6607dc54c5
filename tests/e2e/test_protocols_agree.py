"""One request, one answer, bit for bit, whichever protocol, worker, address and company.

200 random requests are checked against the raw tables, and `position_rows` against RoBERTa in transformers.
"""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from numpy.typing import NDArray
from transformers.models.roberta.modeling_roberta import RobertaEmbeddings

from preblock.export.exporter import export
from tests.support.decode_protocols import decode_frame, decode_json
from tests.support.own_client import OWN
from tests.support.protocols import (
    NATIVE,
    TENSORS,
    Clients,
    Fields,
    Protocol,
    RequestRefused,
    connect,
    native_json,
    native_npy,
    openai_base64,
    openai_mean,
)
from tests.support.random_requests import positions_of, random_request
from tests.support.servers import serve


def lookup(tables: dict[str, NDArray[np.float32]], fields: Fields) -> NDArray[np.float32]:
    """Return GPT-2's front-end: a row of one table plus a row of the other."""
    ids, positions = np.concatenate(fields["input_ids"]), np.concatenate(positions_of(fields))
    vectors: NDArray[np.float32] = tables["tokens"][ids] + tables["positions"][positions]
    return vectors


def protocols_for(fields: Fields) -> list[Protocol]:
    """Return the protocols for a request."""
    protocols = [*NATIVE, *OWN]
    if len({len(row) for row in fields["input_ids"]}) == 1:
        protocols += [native_npy, *TENSORS]
    if set(fields) == {"input_ids"}:
        protocols.append(openai_base64)
    if len(fields["input_ids"]) == 1 and not isinstance(fields.get("offset"), list):
        if set(fields) <= {"input_ids", "offset", "token_type_ids"}:
            protocols.append(decode_json)
        if set(fields) <= {"input_ids", "offset"}:
            protocols.append(decode_frame)
    return protocols


@pytest.fixture(scope="module")
def anywhere(tiny_clients: Clients, tiny_repository: Path) -> Iterator[list[Clients]]:
    """Connect to a server of one worker, and three times to a server of two."""
    with serve(tiny_repository, "--workers", "2") as two, ExitStack() as stack:
        yield [tiny_clients, *(stack.enter_context(connect(two)) for _ in range(3))]


def row_of(fields: Fields, index: int) -> Fields:
    """Return the request for one row alone."""
    return {name: [value[index]] if isinstance(value, list) else value for name, value in fields.items()}


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("model", "version"), [("bert", 2), ("gpt", 1)])
def test_random_requests_match_bit_for_bit_over_all_protocols(
    anywhere: list[Clients], tiny_tables: dict[str, NDArray[np.float32]], model: str, version: int, seed: int
) -> None:
    random = np.random.default_rng([seed, len(model)])
    for _ in range(25):
        fields = random_request(random, model)

        def ask(protocol: Protocol, asked: Fields) -> Any:
            """Ask any worker of any server, by any address of the model."""
            address = model if random.random() < 0.5 else f"{model}/versions/{version}"
            return protocol(anywhere[random.integers(len(anywhere))], address, asked)

        whole = native_json(anywhere[0], model, fields)
        if model == "gpt":
            assert lookup(tiny_tables, fields).tobytes() == whole.tobytes(), fields
        for protocol in protocols_for(fields):
            assert ask(protocol, fields).tobytes() == whole.tobytes(), (protocol.__name__, fields)
        rows = [row_of(fields, index) for index in range(len(fields["input_ids"]))]
        alone = [
            ask(protocols[random.integers(len(protocols))], row) for row in rows for protocols in [protocols_for(row)]
        ]
        assert np.concatenate(alone).tobytes() == whole.tobytes(), fields
        if set(fields) == {"input_ids"}:
            means = [row.astype(np.float64).sum(0) / len(row) for row in alone]
            assert ask(openai_mean, fields).tobytes() == np.stack(means).astype(np.float32).tobytes(), fields


def test_other_version_returns_other_vectors(tiny_clients: Clients) -> None:
    fields = {"input_ids": [[1, 2, 3]]}
    for protocol in protocols_for(fields):
        found = {address: protocol(tiny_clients, address, fields).tobytes() for address in ("bert", "bert/versions/1")}
        assert len(set(found.values())) == 2, protocol.__name__


PADDED = [[0, 31, 5, 9, 2, 1, 1]]
"""Two tokens of padding at the end."""
POSITION_ROWS = [[2, 4, 3, 9, 6, 1, 1]]


@pytest.fixture(scope="module")
def roberta() -> Any:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.RobertaConfig(
        vocab_size=40, max_position_embeddings=18, intermediate_size=8, initializer_range=0.5, **sizes
    )
    model: Any = transformers.RobertaModel(config, add_pooling_layer=False)
    return model.eval()


@pytest.fixture(scope="module")
def row_clients(roberta: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Clients]:
    source, root = tmp_path_factory.mktemp("roberta"), tmp_path_factory.mktemp("served")
    roberta.save_pretrained(source)
    export(str(source), "roberta", root)
    with serve(root) as server, connect(server) as connected:
        yield connected


def test_rows_of_transformers_match_over_every_protocol(roberta: Any, row_clients: Clients) -> None:
    embeddings: RobertaEmbeddings = roberta.embeddings
    with torch.inference_mode():
        expected = embeddings(torch.tensor(PADDED), position_ids=torch.tensor(POSITION_ROWS))[0].numpy()
    described = row_clients.http.get("/models/roberta").json()
    assert described["first_row"] == described["manifest"]["first_row"] == 2
    fields = {"input_ids": PADDED, "position_rows": POSITION_ROWS}
    same = native_json(row_clients, "roberta", {"input_ids": PADDED, "position_ids": [[0, 2, 1, 7, 4, 0, 0]]})
    assert np.abs(same - expected).max() < 1e-5
    for protocol in (*NATIVE, native_npy, *OWN, *TENSORS, decode_json):
        assert protocol(row_clients, "roberta", fields).tobytes() == same.tobytes(), protocol.__name__
    with row_clients.own.decode("roberta") as stream:
        assert stream.step(PADDED, position_rows=POSITION_ROWS).tobytes() == same.tobytes()
        assert stream.offset == [8]


def test_bad_rows_are_refused(row_clients: Clients) -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"position_ids": POSITION_ROWS}, "position_ids and position_rows exclude each other"),
        ({"position_rows": [[2, 3, 4, 1, 5, 1, 1]]}, "position_rows[0][3]: got 1, expected 2 to 17"),
        ({"position_rows": [[2, 3, 4, 18, 5, 1, 1]]}, "position_rows[0][3]: got 18, expected 2 to 17"),
        ({"position_rows": [[2]]}, "position_rows[0]: got 1 values, expected 7 values"),
        ({"attention_mask": [[1]]}, "attention_mask[0]: got 1 values, expected 7 values"),
    ]
    for fields, message in cases:
        asked = {"input_ids": PADDED, "position_rows": POSITION_ROWS} | fields
        for protocol in (native_json, decode_json):
            with pytest.raises(RequestRefused) as refused:
                protocol(row_clients, "roberta", asked)
            assert (refused.value.status, message in refused.value.message) == (422, True), refused.value
