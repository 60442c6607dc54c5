"""Rows have every part of their family. Oracle: the default configurations of transformers."""

from transformers import CONFIG_MAPPING

from preblock.models.checkpoints.family_lookup import default_kinds, section_of
from preblock.models.families import FAMILIES, TEXTS
from preblock.models.families.published_config import Config

LENGTHS = {"max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "context_length", "max_target_positions"}


def test_no_type_has_rows_in_two_lineages() -> None:
    assert sum(map(len, TEXTS)) == len(FAMILIES)


def test_rows_have_the_parts_of_library_configs() -> None:
    for name, row in FAMILIES.items():
        document = CONFIG_MAPPING[name.partition("/")[0]]().to_dict()
        library, kinds = section_of(document, row.sections), default_kinds(row)
        turns = name == "roformer" or not library.keys().isdisjoint({"rope_parameters", "rope_theta", "rotary_dim"})
        assert (row.rotary is not None) == turns, name
        if row.rotary and row.rotary.layers:
            assert row.rotary.layers(Config({})) == library["layer_types"], name
        if row.limit:
            assert row.limit[1] == library[row.limit[0]], name
        else:
            assert "positions" in kinds or library.keys().isdisjoint(LENGTHS), name
        if not name.endswith(("/encoder", "/decoder")) and document.get("tie_word_embeddings"):
            assert row.tied, name
            assert row.tied.by_default, name
        if row.consumers:
            assert kinds[1] == "scale", name
            assert {"none": True, "applied": False}[row.consumers[0].scale] == row.consumer_scales, name
