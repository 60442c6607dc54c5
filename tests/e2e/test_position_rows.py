"""`position_rows`: the `position_ids` of RoBERTa in transformers, over every protocol. Oracle: its embeddings."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from transformers.models.roberta.modeling_roberta import RobertaEmbeddings

from preblock.client.errors import RequestError
from preblock.export.exporter import export
from tests.support.decode_protocols import decode_json
from tests.support.own_client import OWN
from tests.support.protocols import NATIVE, TENSORS, Clients, RequestRefused, connect, native_json, native_npy
from tests.support.servers import serve

IDS = [[0, 31, 5, 9, 2, 1, 1]]
"""Two tokens of padding at the end."""
ROWS = [[2, 4, 3, 9, 6, 1, 1]]


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
        expected = embeddings(torch.tensor(IDS), position_ids=torch.tensor(ROWS))[0].numpy()
    described = row_clients.http.get("/models/roberta").json()
    assert described["first_row"] == described["manifest"]["first_row"] == 2
    fields = {"input_ids": IDS, "position_rows": ROWS}
    same = native_json(row_clients, "roberta", {"input_ids": IDS, "position_ids": [[0, 2, 1, 7, 4, 0, 0]]})
    assert np.abs(same - expected).max() < 1e-5
    for protocol in (*NATIVE, native_npy, *OWN, *TENSORS, decode_json):
        assert protocol(row_clients, "roberta", fields).tobytes() == same.tobytes(), protocol.__name__
    with row_clients.own.decode("roberta") as stream:
        assert stream.step(IDS, position_rows=ROWS).tobytes() == same.tobytes()
        assert stream.offset == [8]


def test_bad_rows_are_refused(row_clients: Clients) -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"position_ids": ROWS}, "position_ids and position_rows exclude each other"),
        ({"position_rows": [[2, 3, 4, 1, 5, 1, 1]]}, "position_rows[0][3]: got 1, expected 2 to 17"),
        ({"position_rows": [[2, 3, 4, 18, 5, 1, 1]]}, "position_rows[0][3]: got 18, expected 2 to 17"),
        ({"position_rows": [[2]]}, "position_rows[0]: got 1 values, expected 7 values"),
        ({"attention_mask": [[1]]}, "attention_mask[0]: got 1 values, expected 7 values"),
    ]
    for fields, message in cases:
        asked = {"input_ids": IDS, "position_rows": ROWS} | fields
        for protocol in (native_json, decode_json):
            with pytest.raises(RequestRefused) as refused:
                protocol(row_clients, "roberta", asked)
            assert (refused.value.status, message in refused.value.message) == (422, True), refused.value
        with row_clients.own.decode("roberta") as stream, pytest.raises(RequestError, match=next(iter(fields))):
            stream.step(asked.pop("input_ids"), **asked)
