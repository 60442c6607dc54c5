"""The static table: libraries of static embedding models.

Such a model is a table of tokens. Its sentence embedding is the mean of their vectors. Read from model2vec 0.10,
sentence-transformers 6.2 and wordllama 0.4.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

MODULE = "StaticEmbedding"
"""The class of a model in sentence-transformers."""


@dataclass(frozen=True, kw_only=True)
class StaticFamily:
    """One row: a library of static embedding models.

    Args:
        tables: keys of the table in the file; the first one found is used.
        limit: most tokens of a text before the library cuts it, given `config.json` and `tokenizer.json`; None
            without a limit.
        drops_unknown: whether the mean leaves out the unknown token of the tokenizer.

    """

    tables: tuple[str, ...]
    limit: Callable[[Mapping[str, Any], Mapping[str, Any]], Any]
    drops_unknown: bool


STATICS: dict[str, StaticFamily] = {
    "model2vec": StaticFamily(
        tables=("embeddings", "embedding.weight"),
        limit=lambda config, _: config.get("max_length", 512),
        drops_unknown=True,
    ),
    MODULE: StaticFamily(
        tables=("embedding.weight", "embeddings"),
        limit=lambda _, tokenizer: (tokenizer.get("truncation") or {}).get("max_length"),
        drops_unknown=False,
    ),
    "wordllama": StaticFamily(
        tables=("embedding.weight",), limit=lambda _config, _tokenizer: None, drops_unknown=False
    ),
}
