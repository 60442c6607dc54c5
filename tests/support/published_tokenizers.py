"""Small tokenizers in the layouts of published checkpoints."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

WORDS = ["the", "quick", "brown", "fox", "hello", "world", "a", "b", "don", "t", "##s", "##ick", "é", "É"]
WORDS += ["Hello", "The"]
CHARACTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789.,!?'`\"-éÉç東京日本"


def added(*tokens: str, first: int = 0, **fields: Any) -> list[dict[str, Any]]:
    """Return special tokens as `added_tokens` lists them."""
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return [{"id": first + index, "content": token, **plain, **fields} for index, token in enumerate(tokens)]


def document(model: Mapping[str, Any], **parts: Any) -> dict[str, Any]:
    """Return a `tokenizer.json` of a model and other parts."""
    names = ("truncation", "padding", "normalizer", "pre_tokenizer", "post_processor", "decoder")
    return {"version": "1.0", "added_tokens": [], **dict.fromkeys(names), "model": dict(model), **parts}


def template(before: str | None, after: str | None, ids: Mapping[str, int]) -> dict[str, Any]:
    """Return a post-processor that puts tokens around a text."""
    tokens = [{"SpecialToken": {"id": token, "type_id": 0}} for token in (before, after) if token]
    text = {"Sequence": {"id": "A", "type_id": 0}}
    single = [*tokens[: bool(before)], text, *tokens[bool(before) :]]
    known = {t: {"id": t, "ids": [ids[t]], "tokens": [t]} for t in (before, after) if t}
    pair = [*single, {"Sequence": {"id": "B", "type_id": 1}}]
    return {"type": "TemplateProcessing", "single": single, "pair": pair, "special_tokens": known}


def bert(**normalizer: Any) -> dict[str, Any]:
    """Return an uncased tokenizer of BERT; `normalizer` changes fields of its normalizer."""
    tokens = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
    words = dict.fromkeys((*tokens, *WORDS, *CHARACTERS, *(f"##{c}" for c in CHARACTERS)))
    vocabulary = {word: index for index, word in enumerate(words)}
    lower = {"clean_text": True, "handle_chinese_chars": True, "strip_accents": None, "lowercase": True}
    model = {"unk_token": "[UNK]", "continuing_subword_prefix": "##", "max_input_chars_per_word": 100}
    return document(
        {"type": "WordPiece", **model, "vocab": vocabulary},
        added_tokens=added(*tokens),
        normalizer={"type": "BertNormalizer", **lower, **normalizer},
        pre_tokenizer={"type": "BertPreTokenizer"},
        post_processor=template("[CLS]", "[SEP]", vocabulary),
        decoder={"type": "WordPiece", "prefix": "##", "cleanup": True},
    )


def _bytes() -> list[str]:
    from tokenizers.pre_tokenizers import ByteLevel

    return sorted(ByteLevel.alphabet())


def byte_level(*tokens: str, prefix: bool = False, **parts: Any) -> dict[str, Any]:
    """Return a byte-level BPE tokenizer, as GPT-2's, whose first ids are `tokens`."""
    merges = [["t", "h"], ["th", "e"], ["Ġ", "the"], ["h", "e"], ["l", "l"], ["Ġ", "a"], ["q", "u"], ["1", "2"]]
    words = dict.fromkeys((*tokens, *_bytes(), *("".join(pair) for pair in merges)))
    model = dict.fromkeys(("fuse_unk", "byte_fallback", "ignore_merges"), False) | dict.fromkeys(
        ("dropout", "unk_token")
    )
    model |= {"continuing_subword_prefix": "", "end_of_word_suffix": ""}
    level = {"type": "ByteLevel", "add_prefix_space": prefix, "trim_offsets": True, "use_regex": True}
    return document(
        {"type": "BPE", **model, "vocab": {word: index for index, word in enumerate(words)}, "merges": merges},
        **{"added_tokens": added(*tokens), "pre_tokenizer": level, "decoder": level, **parts},
    )


def gpt2(prefix: bool = False, **parts: Any) -> dict[str, Any]:
    """Return a tokenizer of GPT-2."""
    return byte_level("<|endoftext|>", prefix=prefix, **parts)


def roberta(**parts: Any) -> dict[str, Any]:
    """Return a tokenizer of RoBERTa."""
    tokens = ("<s>", "<pad>", "</s>", "<unk>", "<mask>")
    ids = {token: index for index, token in enumerate(tokens)}
    listed = added(*tokens[:4]) + added("<mask>", first=4, lstrip=True)
    return byte_level(*tokens, **{"added_tokens": listed, "post_processor": template("<s>", "</s>", ids), **parts})


def llama(
    *, legacy: bool = False, before: str | None = "<s>", after: str | None = None, **parts: Any
) -> dict[str, Any]:
    """Return a tokenizer of Llama 2; a `legacy` one has the normalizer of old conversions."""
    tokens = ("<unk>", "<s>", "</s>")
    merges = [["▁", "t"], ["h", "e"], ["▁t", "he"], ["▁", "a"], ["l", "l"], ["▁", "▁"]]
    pieces = dict.fromkeys((*tokens, *(f"<0x{i:02X}>" for i in range(256)), "▁", *CHARACTERS[:60]))
    pieces |= dict.fromkeys("".join(pair) for pair in merges)
    ids = {piece: index for index, piece in enumerate(pieces)}
    missing = ("dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix")
    model = {**dict.fromkeys(missing), "fuse_unk": True, "byte_fallback": True, "ignore_merges": False}
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    old = {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "▁"}, replace]}
    new = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": False}
    return document(
        {"type": "BPE", **model, "vocab": ids, "merges": merges},
        **{
            "added_tokens": added(*tokens),
            "normalizer": old if legacy else None,
            "pre_tokenizer": None if legacy else new,
            "post_processor": template(before, after, ids),
            **parts,
        },
    )


def unigram(
    tokens: tuple[str, ...], unknown: int, before: str | None, after: str | None, **parts: Any
) -> dict[str, Any]:
    """Return a Unigram tokenizer, as of T5 and XLM-RoBERTa."""
    pieces = [(token, 0.0) for token in tokens]
    pieces += [("▁the", -3.0), ("▁", -2.0), *((c, -4.0) for c in CHARACTERS), ("quick", -5.0)]
    ids = {token: index for index, token in enumerate(tokens)}
    space = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True}
    split = {"type": "Sequence", "pretokenizers": [{"type": "WhitespaceSplit"}, space]}
    model = {"type": "Unigram", "unk_id": unknown, "vocab": pieces, "byte_fallback": False}
    frame = template(before, after, ids)
    return document(
        model,
        **{"added_tokens": added(*tokens), "pre_tokenizer": split, "post_processor": frame, "decoder": space, **parts},
    )


def t5(**parts: Any) -> dict[str, Any]:
    """Return a tokenizer of T5 with one sentinel."""
    return unigram(("<pad>", "</s>", "<unk>"), 2, None, "</s>", **parts)


def xlm_roberta(**parts: Any) -> dict[str, Any]:
    """Return a tokenizer of XLM-RoBERTa."""
    tokens = ("<s>", "<pad>", "</s>", "<unk>", "<mask>")
    listed = added(*tokens[:4]) + added("<mask>", first=4, lstrip=True)
    return unigram(tokens, 3, "<s>", "</s>", **{"added_tokens": listed, **parts})


def decoder_of(tokenizer: Mapping[str, Any]) -> dict[str, Any]:
    """Return the `added_tokens_decoder` that the library saves for a tokenizer."""
    return {
        str(token["id"]): {name: value for name, value in token.items() if name != "id"}
        for token in tokenizer["added_tokens"]
    }


def write_folder(folder: Path, files: Mapping[str, Any]) -> Path:
    """Write JSON files, and return their folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))
    return folder
