"""The tokenizer of the tiny models."""

import json
from pathlib import Path

import tokenizers
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from tokenizers.processors import TemplateProcessing

WORDS = ("[PAD]", "[CLS]", "[SEP]", "[UNK]", "a", "b", "c", "d", "e", "f", "g")


def write_tokenizer(file: Path) -> None:
    """Write a tokenizer of 11 tokens that puts `[CLS]` and `[SEP]` around words, and states truncation and padding.

    `tokenizer_config.json` beside it names the class of transformers that reads all of it.
    """
    tokenizer = tokenizers.Tokenizer(WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.post_processor = TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 1), ("[SEP]", 2)])
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=6)
    tokenizer.save(str(file))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": None}
    (file.parent / "tokenizer_config.json").write_text(json.dumps(settings))
