"""Defaults for keys missing from an older config.json, against the defaults of the library."""

from typing import Any

import pytest
from transformers import CONFIG_MAPPING

from preblock.models.checkpoints.families import FAMILIES
from preblock.models.checkpoints.family import Config
from preblock.models.checkpoints.family_lookup import section_of


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
    whole = CONFIG_MAPPING[name.partition("/")[0]]().to_dict()
    library = section_of(whole, FAMILIES[name].sections)
    # Files always state keys without a default in the library, and keys unrelated to a front-end.
    stated = {"hidden_size": 32, "d_model": 32, "pad_token_id": library.get("pad_token_id") or 1}
    for values in (stated, {**library, **stated}):
        config, family = Recorded(values), FAMILIES[name]
        family.steps(config)
        family.lookup(config)
        family.longest_input(config)
        for key, default in config.defaults.items():
            # These follow from hidden_size where the file leaves them out.
            if library.get(key) is not None and key not in ("embedding_size", "word_embed_proj_dim"):
                assert default == library[key], key
