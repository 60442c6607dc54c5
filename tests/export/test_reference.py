"""The two references of a proof against each other: every kind of step and output, at its edges."""

import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest

from preblock.export.parity import ROTARY_ULP, allowed_ulp, difference, per_layer_ulp
from preblock.export.reference import NumpyReference
from preblock.export.torch_reference import TorchReference
from preblock.models.config import FrontEndConfig
from preblock.models.frontend import FrontEnd
from preblock.models.frontend_data import shapes_of
from preblock.models.steps import (
    Positions,
    Scale,
)
from preblock.service.core.types import Int64
from tests.models.front_ends import CONFIGS, NGRAMS, PADDING, PER_LAYER, ROTARY, M, V, config_of
from tests.support.artifacts import STORED
from tests.support.weights import seeded_


def references_of(config: FrontEndConfig) -> tuple[NumpyReference, TorchReference]:
    """Return both references of a front-end with values of every size."""
    frontend = FrontEnd(config)
    seeded_(frontend, 0)
    data = frontend.data()
    assert {name: values.shape for name, values in data.tensors.items()} == shapes_of(config)
    return NumpyReference(data), TorchReference.of(data)


def calls(config: FrontEndConfig) -> list[dict[str, Int64]]:
    """Return inputs of the graph: every id, both ends of the positions, padding, offsets of each row, and no tokens."""
    random, last = np.random.default_rng(1), (config.max_len or M) - M
    ids = np.concatenate((np.arange(V), np.full(3 * M - V % M, PADDING))).reshape(-1, M)
    found = []
    for part, offset in (
        (ids, [0]),
        (ids, [last]),
        (ids[:4, -2:], [0, last, M // 2, 1]),
        (ids[:, :1], [(config.max_len or M) - 1]),
        (ids[:0], [0]),
        (ids[:2, :0], [0, 1]),
    ):
        feeds = {"input_ids": part, "offset": np.array(offset)}
        feeds |= {name: random.integers(0, count, part.shape) for name, count in config.indices.items()}
        if config.needs_mask:
            row, place = np.ogrid[: len(part), : part.shape[1]]
            feeds["attention_mask"] = ((place >= row) & (place < M - row)).astype(np.int64)
        found.append(feeds)
    return found


@pytest.mark.parametrize("name", CONFIGS)
def test_references_give_same_vectors(name: str) -> None:
    config = CONFIGS[name]
    ours, module = references_of(config)
    allowed = allowed_ulp(ours)
    assert allowed == allowed_ulp(module)
    assert (allowed == 0) == config.exact
    for feeds in calls(config):
        needed = {name: values for name, values in feeds.items() if name in ("input_ids", "offset", *config.needed)}
        for given in (feeds, needed):
            found, expected = (one.vectors(given) for one in (ours, module))
            assert (found.shape, found.dtype.name) == (expected.shape, "float32")
            assert not found.size or difference(found, expected)[1] <= allowed, feeds
        for scaled in (True, False):
            found, expected = (one.look_up(feeds["input_ids"], scaled) for one in (ours, module))
            assert np.array_equal(found, expected)


def test_references_give_same_further_outputs() -> None:
    config = config_of(Scale(by=3.3), rotary=ROTARY, per_layer=PER_LAYER, ngrams=NGRAMS, lookup=2)
    ours, module = references_of(config)
    for feeds in calls(config):
        ids, offset = feeds["input_ids"], feeds["offset"]
        context = np.random.default_rng(2).integers(0, 5, (len(ids), NGRAMS.history))  # many ends of sequences
        outputs = [
            reference.rotary_outputs(ids, offset)
            | reference.per_layer_outputs(ids)
            | reference.ngram_outputs(ids, context)
            for reference in (ours, module)
        ]
        assert list(outputs[0]) == list(outputs[1])
        assert {*config.signature.rotary, "per_layer_inputs", "ngram_row_ids"} <= {*outputs[0]}
        for name, found in outputs[0].items():
            expected = outputs[1][name]
            assert (found.shape, found.dtype) == (expected.shape, expected.dtype), name
            if name.startswith("rotary"):
                assert np.abs(found - expected).max(initial=0) <= ROTARY_ULP * 2.0**-23 * 1.35, name
            elif name == "per_layer_inputs":
                assert not found.size or difference(found, expected)[1] <= per_layer_ulp(ours)
            else:
                assert np.array_equal(found, expected), name


def test_narrow_weights_are_widened_at_lookup() -> None:
    config = config_of(Positions(rows=M))
    data = FrontEnd(config).data()
    for dtype in (np.float16, "bfloat16"):
        narrow = replace(data, tensors={name: values.astype(dtype) for name, values in data.tensors.items()})
        wide = replace(data, tensors={name: values.astype(np.float32) for name, values in narrow.tensors.items()})
        for feeds in calls(config):
            expected = TorchReference.of(wide).vectors(feeds)
            for reference in (NumpyReference(narrow), TorchReference.of(narrow)):
                assert np.array_equal(reference.vectors(feeds), expected)


WITHOUT_TORCH = """
import sys
sys.modules["torch"] = sys.modules["transformers"] = None
from pathlib import Path
from preblock.export.stored_tables import read_data
from preblock.export.verification import prove_artifact, reference_of
from preblock.models.config import FrontEndConfig
from preblock.service.artifacts.io import read_manifest
for folder in map(Path, sys.argv[1:]):
    reference = reference_of(*read_data(folder, FrontEndConfig.from_document(read_manifest(folder).front_end)))
    parity = prove_artifact(reference, folder, "CPUExecutionProvider", lambda _: None)
    print(parity.reference.split()[0], *sorted(parity.outputs))
"""


def test_artifacts_are_proven_without_torch() -> None:
    folders = [STORED / name for name in ("gemma", "bert", "t5")]
    done = subprocess.run([sys.executable, "-c", WITHOUT_TORCH, *folders], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "numpy embeddings rotary_cos rotary_sin unscaled_token_embeddings",
        "numpy embeddings token_embeddings",
        "numpy bias embeddings",
    ]
