"""Names of tables that fill in a missing token table, against the tied names of transformers."""

import pytest
import torch

from preblock.models.checkpoints.families import FAMILIES
from preblock.models.checkpoints.family import Config
from preblock.models.checkpoints.family_lookup import section_of
from preblock.models.checkpoints.tied_tables import with_tied
from preblock.models.steps import Tokens
from tests.families.library_models import config_class
from tests.families.published_models import PUBLISHED
from tests.families.tiny_models import head_class

NAMES = [name for name in PUBLISHED if name != "gemma3n/text"]  # the library needs timm for it


@pytest.mark.parametrize("tied", [None, True, False])
@pytest.mark.parametrize("name", NAMES)
def test_tied_names_and_default_match_transformers(name: str, tied: bool | None) -> None:
    stated = {} if tied is None else {"tie_word_embeddings": tied}
    config = config_class(name)(**PUBLISHED[name].config | stated)
    with torch.device("meta"):
        model = head_class(name.partition("/")[0])(config)
    document = {key: value for key, value in config.to_dict().items() if key != "tie_word_embeddings"} | stated
    family = FAMILIES[name]
    steps = family.steps(Config(section_of(document, family.sections)))
    assert isinstance(steps[0], Tokens)
    own = {prefix + key for prefix in ("", family.prefix) for key in steps[0].weight}
    pairs = model.all_tied_weights_keys.items()
    expected = [target.removeprefix(family.prefix) for target, source in pairs if source in own and target not in own]
    tokens = with_tied(steps, name, Config(document))[0]
    assert isinstance(tokens, Tokens)
    assert tokens.weight == (*steps[0].weight, *expected)
