"""Static embedding models: wordllama as published, and small ones in the layouts of other libraries."""

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from model2vec import StaticModel
from numpy.typing import NDArray
from safetensors.numpy import save_file
from tokenizers.models import WordPiece
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing

from tests.support.paths import CHECKPOINTS

LETTERS = "abcdefghij"
WORDS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", *LETTERS, *(f"##{letter}" for letter in LETTERS), "hello", "world")
VOCABULARY, WIDTH, ROWS = len(WORDS), 8, 9


def load_wordllama() -> Any:
    """Return the model of the package wordllama, loaded by its library. It finds the tokenizer in its cache only."""
    root = logging.getLogger()
    level, handlers = root.level, root.handlers[:]
    from wordllama import WordLlama  # configures the root logger

    root.setLevel(level)
    root.handlers = handlers
    return WordLlama.load(cache_dir=CHECKPOINTS / "wordllama", disable_download=True)


def make_tokenizer() -> tokenizers.Tokenizer:
    """Return a tokenizer of 26 tokens that puts `[CLS]` and `[SEP]` around words; unknown words become `[UNK]`."""
    tokenizer = tokenizers.Tokenizer(WordPiece({word: index for index, word in enumerate(WORDS)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.post_processor = TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)])
    return tokenizer


def make_table(rows: int = VOCABULARY) -> NDArray[np.float32]:
    """Return random vectors, float32 (rows, WIDTH)."""
    return np.random.default_rng(0).standard_normal((rows, WIDTH)).astype(np.float32)


def save_plain(folder: Path, dtype: str = "float32", **options: Any) -> Path:
    """Save a model of model2vec with a row for each token; `options` are arguments of `StaticModel`."""
    table = (make_table() * 20).astype(dtype) if dtype == "int8" else make_table().astype(dtype)
    options = {"config": {"model_type": "model2vec"}, "max_length": None, **options}
    StaticModel(table, make_tokenizer(), **options).save_pretrained(folder)
    return folder


def save_mapped(folder: Path) -> Path:
    """Save a model of model2vec with a mapping, weights in float64 and normalized vectors, for 8 tokens."""
    generator = np.random.default_rng(1)
    StaticModel(
        make_table(ROWS),
        make_tokenizer(),
        config={"model_type": "model2vec"},
        normalize=True,
        weights=generator.random(VOCABULARY),
        token_mapping=generator.integers(0, ROWS, VOCABULARY),
        max_length=8,
    ).save_pretrained(folder)
    return folder


def save_bag(folder: Path, *further: str, part: str = "0_StaticEmbedding", **settings: Any) -> Path:
    """Save a model in the layout of sentence-transformers; `further` are the classes of its other modules."""
    (folder / part).mkdir(parents=True, exist_ok=True)
    save_file({"embedding.weight": make_table()}, folder / part / "model.safetensors")
    make_tokenizer().save(str(folder / part / "tokenizer.json"))
    modules = [("sentence_transformers.sentence_transformer.modules.static_embedding.StaticEmbedding", part)]
    modules += [(f"sentence_transformers.models.{kind}", f"{index}_{kind}") for index, kind in enumerate(further, 1)]
    document = [
        {"idx": index, "name": str(index), "path": path, "type": of} for index, (of, path) in enumerate(modules)
    ]
    (folder / "modules.json").write_text(json.dumps(document))
    (folder / "config_sentence_transformers.json").write_text(json.dumps({"default_prompt_name": None, **settings}))
    return folder
