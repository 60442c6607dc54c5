"""Every row of the family table against transformers itself, on tiny random checkpoints."""

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from transformers import CONFIG_MAPPING

from preblock.export.discovery.discovery import discover
from preblock.export.exporter import export
from preblock.export.outputs import write_graphs
from preblock.export.parity import ROTARY_ULP, difference
from preblock.export.reference import NumpyReference
from preblock.export.stems.graph import allowed_ulp
from preblock.export.torch_reference import TorchReference
from preblock.export.verification import prove_artifact, verify
from preblock.models.checkpoints.family_lookup import section_of
from preblock.models.checkpoints.reader import read_frontend
from preblock.models.checkpoints.stem_reader import read_stem, stem_files_needed
from preblock.models.families import FAMILIES, STEMS
from preblock.models.families.published_config import ALIASES, Config
from preblock.models.frontend import FrontEnd
from preblock.models.steps import Tokens
from preblock.service.artifacts.names import GRAPH
from preblock.service.runtime.providers import CPU
from tests.clients.client_matrix import check_standard
from tests.families.config_edits import edits_of, save_whole, try_edit
from tests.families.config_fuzzing import WRONG
from tests.families.library_models import NO_LOOKUP, STREAMS, TransformersModel, config_class, model_class, save
from tests.families.parity import check_rows_of_one, compare, compare_rotary, compare_stem
from tests.families.published_models import PUBLISHED
from tests.families.stems import MODELS, ROWS
from tests.families.stems import save as save_stem
from tests.families.table import DOCUMENT, versions
from tests.families.tiny_models import head_class

# The scale of an ESM depends on its mask tokens; tiny models of Funnel do not run whole; others take several streams,
# or inputs of each layer.
NOT_DISCOVERED = {"esm", "funnel", *STREAMS, *(f"gemma{end}" for end in ("3n/text", "3n_text", "4/text", "4_text"))}
SAMPLED = 5
"""Edits of each family; `make discover-fuzz` tries all of them."""


@dataclass(frozen=True)
class Row:
    """A row of the table, the folder of its tiny model, and every value of the model's config."""

    name: str
    folder: Path
    config: dict[str, Any]

    @property
    def side(self) -> str | None:
        return self.name.partition("/")[2] or None


@pytest.fixture(scope="module", params=PUBLISHED)
def row(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Row:
    folder = tmp_path_factory.mktemp("family") / "checkpoint"
    return Row(request.param, folder, save_whole(request.param, folder))


def test_every_row_of_a_table_has_an_oracle() -> None:
    assert sorted(PUBLISHED) == sorted(FAMILIES)
    assert sorted(ROWS.values()) == sorted(STEMS)


def test_family_document_matches_table_and_versions() -> None:
    document = DOCUMENT.read_text(encoding="utf-8")
    rows = [line.split("`")[1] for line in document.splitlines() if line.startswith("| `")]
    assert rows == [*FAMILIES, *ROWS.values()]
    assert versions() in document


def test_family_matches_transformers(row: Row, tmp_path: Path) -> None:
    name, artifact = row.name, tmp_path
    frontend = FrontEnd.from_data(read_frontend(row.folder, row.side)).eval()
    config = frontend.config
    write_graphs(frontend.data(), artifact)
    check_standard(artifact, config.indices)
    if "project" not in {step.kind for step in config.steps} and config.per_layer is None:
        check_rows_of_one(artifact, config)
    for reference in (NumpyReference(frontend.data()), TorchReference(frontend)):
        prove_artifact(reference, artifact, CPU, lambda _: None)
    model = TransformersModel.load(name, row.folder)
    for case in compare(model, artifact, config):
        assert case.max_ulp <= (0.0 if config.exact else 8.0), case

    assert bool(config.rotary) == bool(PUBLISHED[name].rotary) == (FAMILIES[name].rotary is not None and name != "esm")
    if config.rotary:
        for case in compare_rotary(model, artifact):
            assert case.max_ulp <= ROTARY_ULP, case

    if name not in NO_LOOKUP:
        ids = np.random.default_rng(2).choice(np.setdiff1d(np.arange(3, 90), config.refused_ids), (2, 8))
        session = onnxruntime.InferenceSession(
            artifact / ("token.onnx" if (artifact / "token.onnx").exists() else GRAPH)
        )
        feeds = {"input_ids": ids, "offset": np.zeros(1, np.int64), "attention_mask": ids * 0 + 1}
        tokens = session.run(None, {node.name: feeds[node.name] for node in session.get_inputs()})[0]
        entered = model.first_block_input(None, inputs_embeds=tokens)
        allowed = 0.0 if config.exact else 8.0
        assert difference(entered, model.first_block_input(ids))[1] <= allowed


def test_discovery_matches_family_table(row: Row) -> None:
    if row.name in NOT_DISCOVERED:
        return
    frontend = FrontEnd.from_data(read_frontend(row.folder, row.side)).eval()
    found = discover(row.folder, json.loads((row.folder / "config.json").read_text()), row.side).frontend
    assert [step.kind for step in found.config.steps] == [step.kind for step in frontend.config.steps]
    assert found.config.counts == frontend.config.counts
    if found.config.consumer_scales is not None:  # None if the library does not run on `inputs_embeds` alone
        given = found.config.lookup, found.config.consumer_scales
        assert given == (frontend.config.lookup, frontend.config.consumer_scales)
    ids = torch.arange(3, 11).unsqueeze(0)
    with torch.inference_mode():
        assert torch.equal(found(ids), frontend(ids))


def test_sampled_config_edits_never_give_wrong_vectors(row: Row, tmp_path: Path) -> None:
    for number, edit in enumerate(random.Random(row.name).sample(list(edits_of(row.config)), SAMPLED)):
        outcome = try_edit(row.name, row.folder, row.config, edit, tmp_path / str(number))
        assert outcome.kind not in WRONG, (edit, outcome)


class Recorded(Config):
    """Records every requested default."""

    def __init__(self, values: dict[str, Any]) -> None:
        super().__init__(values)
        self.defaults: dict[str, Any] = {}

    def __call__(self, key: str, default: Any = None) -> Any:
        if default is not None:
            self.defaults[key] = default
        return super().__call__(key, default)


@pytest.mark.parametrize("name", FAMILIES)
def test_family_defaults_match_transformers(name: str) -> None:
    family = FAMILIES[name]
    library = section_of(CONFIG_MAPPING[name.partition("/")[0]]().to_dict(), family.sections)
    # Files always state keys without a default in the library, and keys unrelated to a front-end.
    stated = {"hidden_size": 32, "d_model": 32, "pad_token_id": library.get("pad_token_id") or 1}
    same = {key: stated[alias] for key, alias in ALIASES.items() if key in library and alias in stated}
    assert family.padding in (None, library.get("pad_token_id"))
    for values in (stated, {**library, **stated, **same}):
        config = Recorded(values)
        family.steps(config)
        family.lookup(config)
        family.longest_input(config)
        for key, default in config.defaults.items():
            # These follow from hidden_size where the file leaves them out.
            if library.get(key) is not None and key not in ("embedding_size", "word_embed_proj_dim"):
                assert default == library[key], key


@pytest.mark.parametrize("name", [name for name in PUBLISHED if name != "gemma3n/text"])  # the library needs timm
def test_tied_names_and_default_match_transformers(name: str) -> None:
    family = FAMILIES[name]
    for stated in ({}, {"tie_word_embeddings": True}, {"tie_word_embeddings": False}):
        config = config_class(name)(**PUBLISHED[name].config | stated)
        with torch.device("meta"):
            model = head_class(name.partition("/")[0])(config)
        document = {key: value for key, value in config.to_dict().items() if key != "tie_word_embeddings"} | stated
        steps = family.steps(Config(section_of(document, family.sections)))
        assert isinstance(steps[0], Tokens)
        shared = "shared.weight" in steps[0].weight  # those rows name the tied tables themselves
        untied = steps[0].weight[:2] if shared else steps[0].weight
        own = {prefix + key for prefix in ("", family.prefix) for key in untied}
        tied = [target for target, source in model.all_tied_weights_keys.items() if source in own and target not in own]
        tokens = family.with_head(steps, Config(document))[0]
        assert isinstance(tokens, Tokens)
        assert tokens.weight == (*untied, *(key.removeprefix(family.prefix) for key in tied)), stated


# One family for each way of composing: norms, scales cast and not cast, tables derived and stored, projections.
# The target type is one number in the nodes of a rounding graph: two compositions cover the other type.
CASES = [
    *((name, torch.bfloat16) for name in ("bert", "gpt2", "ctrl", "opt", "xglm", "bart/encoder", "marian/decoder")),
    *((name, torch.bfloat16) for name in ("m2m_100/encoder", "granite", "gemma")),
    *((name, torch.float16) for name in ("bert", "gemma")),
]


@pytest.mark.parametrize(("name", "dtype"), CASES, ids=str)
def test_float16_and_bfloat16_checkpoints_match_transformers(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    save(name, tmp_path, dtype)
    kind = model_class(name)
    for arithmetic, loaded in (("float32", torch.float32), ("source", dtype)):
        data = read_frontend(tmp_path, name.partition("/")[2] or None, arithmetic)  # type: ignore[arg-type]
        artifact = tmp_path / arithmetic
        artifact.mkdir()
        write_graphs(data, artifact)
        check_standard(artifact, data.config.indices)
        model = TransformersModel(name, kind.from_pretrained(tmp_path, dtype=loaded).eval())
        allowed = 0.0 if data.config.exact or arithmetic == "source" else 8.0
        for case in compare(model, artifact, data.config):
            assert case.max_ulp <= allowed, case


@pytest.mark.parametrize("name", ROWS)
def test_stem_matches_transformers(name: str, tmp_path: Path) -> None:
    checkpoint, side = save_stem(name, tmp_path / "checkpoint"), MODELS[name][2]
    exported = export(str(checkpoint), "stem", tmp_path / "repository", side=side)
    allowed = allowed_ulp(read_stem(checkpoint, side).signature)
    for case in compare_stem(name, exported.folder):
        assert case.max_ulp <= allowed, case
    assert verify(exported.folder) == exported.parity


def test_stem_files_needed_are_shards_of_its_tensors(tmp_path: Path) -> None:
    save_stem("whisper", tmp_path / "whole")
    assert stem_files_needed(tmp_path / "whole", "encoder") == ["model.safetensors"]
    save_stem("whisper", tmp_path / "shards", max_shard_size="2kB")
    needed = stem_files_needed(tmp_path / "shards", "encoder")
    assert 0 < len(needed) < len(list((tmp_path / "shards").glob("*.safetensors")))
    for file in (tmp_path / "shards").glob("*.safetensors"):
        if file.name not in needed:
            file.unlink()
    read_stem(tmp_path / "shards", "encoder")
