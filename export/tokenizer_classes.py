"""Tokenizer classes of transformers 5.24: the parts that each rebuilds in place of those in `tokenizer.json`.

Most of its classes read the vocabulary of the file only, and take the rest from `tokenizer_config.json` and defaults.
Version 4 read all of the file. `PLAIN` stands for the class `TokenizersBackend`, which still does.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

PLAIN = "TokenizersBackend"
Part = dict[str, Any] | None
"""A part of `tokenizer.json`."""
Settings = Mapping[str, Any]
"""`tokenizer_config.json`, with the defaults of the class."""

QWEN2_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN3_5_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CLIP_SPLIT = r"<\|startoftext\|>|<\|endoftext\|>|'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+"
MISTRAL_SPLIT = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""The pattern of Mistral's own tokenizers; many of its checkpoints were published with another one."""


def _additional(settings: Settings) -> list[Any]:
    return settings.get("additional_special_tokens") or []


@dataclass(frozen=True)
class TokenizerClass:
    """The parts that a class rebuilds.

    Args:
        model: its kind.
        tokens: default special tokens by attribute.
        parameters: those of the model, besides the vocabulary.
        normalizer: returns the normalizer from the settings and that of the file.
        pre_tokenizer: returns the pre-tokenizer from the settings.
        unknown: returns the id of the unknown token of a Unigram model.
        frame: attributes of the tokens before and after a text; None for the post-processor of the file.
        options: settings among `OPTIONS`.
        lstrip_mask: whether the mask token takes the spaces before it, if it is stated as text.
        adds_again: whether it adds its special tokens once more, by their texts alone.
        named: returns further tokens from the settings.

    """

    model: Literal["WordPiece", "BPE", "Unigram"]
    tokens: Mapping[str, str]
    parameters: Mapping[str, Any]
    pre_tokenizer: Callable[[Settings], Part]
    normalizer: Callable[[Settings, Part], Part] = lambda _settings, _file: None
    unknown: Callable[[Settings, list[Any]], int | None] = lambda _settings, _vocabulary: None
    frame: tuple[str | None, str | None] | None = None
    options: tuple[str, ...] = ()
    lstrip_mask: bool = False
    adds_again: bool = False
    named: Callable[[Settings], list[Any]] = _additional


def find_class(config: Settings, settings: Settings, byte_level: bool) -> str | None:
    """Return the class that AutoTokenizer builds for a folder with a `tokenizer.json`; None if it is not compared.

    Args:
        config: `config.json`.
        settings: `tokenizer_config.json`.
        byte_level: whether the text `"ByteLevel"` stands in `tokenizer.json`.

    """
    of_type = _TYPES.get(str(config.get("model_type")))
    stated = settings.get("tokenizer_class") or config.get("tokenizer_class")
    if not isinstance(stated, str):
        return _name(of_type) if of_type else PLAIN
    stated = stated.removesuffix("Fast")
    remote = settings.get("auto_map")
    if remote and not (isinstance(remote, Mapping) and not remote.get("AutoTokenizer")):
        return None if stated not in CLASSES and stated not in _ALIASES else _name(stated)
    if stated == "LlamaTokenizer" and byte_level and config.get("model_type") not in _OF_TYPE_ALWAYS:
        return PLAIN
    if of_type == PLAIN:
        return PLAIN
    return _name(str(of_type)) if config.get("model_type") in _OF_TYPE_ALWAYS else _name(stated)


def _name(stated: str) -> str | None:
    """Return the class with the name `stated`; an unknown name means the plain one."""
    name = _ALIASES.get(stated, stated)
    return None if name in _OTHER_CLASSES else name if name in CLASSES else PLAIN


def _list(names: str) -> list[str]:
    return names.split()


def _split(pattern: str, **further: Any) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False} | further


def _byte_level(settings: Settings, use_regex: bool = True) -> dict[str, Any]:
    prefix = bool(settings.get("add_prefix_space"))
    return {"type": "ByteLevel", "add_prefix_space": prefix, "trim_offsets": True, "use_regex": use_regex}


def _sequence(*parts: dict[str, Any]) -> dict[str, Any]:
    kind = "normalizers" if parts[0]["type"] in ("NFC", "Replace", "Lowercase") else "pretokenizers"
    return {"type": "Sequence", kind: list(parts)}


def _metaspace(scheme: str, split: bool = True) -> dict[str, Any]:
    return {"type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme, "split": split}


def _words(settings: Settings) -> Part:
    scheme = "always" if settings.get("add_prefix_space", True) else "never"
    return _sequence({"type": "WhitespaceSplit"}, _metaspace(scheme))


def _llama_words(settings: Settings) -> Part:
    prefix = settings.get("add_prefix_space")
    first = "always" if settings.get("legacy", False) else "first"
    return _metaspace("never" if prefix is not None and not prefix else first, split=False)


def _deberta_words(settings: Settings) -> Part:
    punctuation = [{"type": "Punctuation", "behavior": "Isolated"}] if settings.get("split_by_punct") else []
    return _sequence(*punctuation, _metaspace("always" if settings.get("add_prefix_space", True) else "first"))


def _bert_text(settings: Settings, _: Part) -> Part:
    return {
        "type": "BertNormalizer",
        "clean_text": True,
        "handle_chinese_chars": settings.get("tokenize_chinese_chars", True),
        "strip_accents": settings.get("strip_accents"),
        "lowercase": settings.get("do_lower_case", True),
    }


def _charsmap(_: Settings, file: Part) -> Part:
    """Return the first map of characters in the normalizer of the file."""
    parts = file.get("normalizers", [file]) if file else []
    return next((part for part in parts if part.get("type") == "Precompiled"), None)


def _replace(pattern: dict[str, str], content: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": pattern, "content": content}


def _albert_text(settings: Settings, file: Part) -> Part:
    parts = [_replace({"String": quotes}, '"') for quotes in ("``", "''")]
    parts += [] if settings.get("keep_accents") else [{"type": "NFKD"}, {"type": "StripAccents"}]
    parts += [{"type": "Lowercase"}] if settings.get("do_lower_case", True) else []
    charsmap = _charsmap(settings, file)
    return _sequence(*parts, *([charsmap] if charsmap else []))


def _deberta_text(settings: Settings, _: Part) -> Part:
    lower = [{"type": "Lowercase"}] if settings.get("do_lower_case") else []
    spaces = _replace({"Regex": r"\s{2,}|[\n\r\t]"}, " ")
    return _sequence(*lower, spaces, {"type": "NFC"}, {"type": "Strip", "strip_left": False, "strip_right": True})


def _index(vocabulary: list[Any], token: Any, default: int) -> int:
    return next((index for index, (piece, _) in enumerate(vocabulary) if piece == token), default)


def _deberta_unknown(settings: Settings, vocabulary: list[Any]) -> int:
    index = _index(vocabulary, settings["unk_token"], -1)
    stated: int = settings.get("unk_id", 1)
    return index if index >= 0 and vocabulary[index][1] == 0 else stated


def _sentinels(settings: Settings) -> list[Any]:
    """Return the additional tokens of T5, with its sentinels unless they have some."""
    given = _additional(settings)
    sentinels = [f"<extra_id_{index}>" for index in range(settings.get("extra_ids", 100))]
    return given if any("<extra_id_" in str(token) for token in given) else [*given, *sentinels]


def _bpe(**further: Any) -> dict[str, Any]:
    defaults = {"dropout": None, "unk_token": None, "continuing_subword_prefix": "", "end_of_word_suffix": ""}
    return {**defaults, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False, **further}


_UNK = "unk_token"
"""Stands for the unknown token of the settings among the parameters of a model."""
OPTIONS = {
    "do_lower_case": "lowercase",
    "strip_accents": "strip_accents",
    "tokenize_chinese_chars": "handle_chinese_chars",
    "add_prefix_space": "add_prefix_space",
}
"""Settings with their keys in a normalizer or pre-tokenizer."""
_BERT = {
    "unk_token": "[UNK]",
    "sep_token": "[SEP]",
    "pad_token": "[PAD]",
    "cls_token": "[CLS]",
    "mask_token": "[MASK]",
}
_ROBERTA = {
    "bos_token": "<s>",
    "eos_token": "</s>",
    "sep_token": "</s>",
    "cls_token": "<s>",
    "unk_token": "<unk>",
    "pad_token": "<pad>",
    "mask_token": "<mask>",
}
_DEBERTA = _BERT | {"bos_token": "[CLS]", "eos_token": "[SEP]"}
_GPT2 = dict.fromkeys(("unk_token", "bos_token", "eos_token"), "<|endoftext|>")
_QWEN2 = dict.fromkeys(("unk_token", "eos_token", "pad_token"), "<|endoftext|>")
_LLAMA = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
_CLS_SEP, _BOS_EOS = ("cls_token", "sep_token"), ("bos_token", "eos_token")
_NFC = {"type": "NFC"}


def _qwen(pattern: str) -> TokenizerClass:
    return replace(
        _GPT2_CLASS,
        tokens=_QWEN2,
        pre_tokenizer=lambda settings: _sequence(_split(pattern), _byte_level(settings, use_regex=False)),
        normalizer=lambda _settings, _file: _NFC,
    )


_BERT_CLASS = TokenizerClass(
    "WordPiece",
    _BERT,
    {"unk_token": _UNK, "continuing_subword_prefix": "##", "max_input_chars_per_word": 100},
    lambda _: {"type": "BertPreTokenizer"},
    _bert_text,
    frame=_CLS_SEP,
    options=("do_lower_case", "strip_accents", "tokenize_chinese_chars"),
)
_GPT2_CLASS = TokenizerClass("BPE", _GPT2, _bpe(), _byte_level, options=("add_prefix_space",))
_ROBERTA_CLASS = replace(_GPT2_CLASS, tokens=_ROBERTA, frame=_CLS_SEP)
_XLM_ROBERTA_CLASS = TokenizerClass(
    "Unigram",
    _ROBERTA,
    {"byte_fallback": False},
    _words,
    _charsmap,
    lambda _settings, _vocabulary: 3,
    frame=_BOS_EOS,
)
CLASSES: dict[str, TokenizerClass] = {
    "BertTokenizer": _BERT_CLASS,
    "MPNetTokenizer": replace(_BERT_CLASS, tokens=_ROBERTA | {"unk_token": "[UNK]"}, lstrip_mask=True),
    "GPT2Tokenizer": _GPT2_CLASS,
    "GPTNeoXTokenizer": replace(
        _GPT2_CLASS,
        tokens=_GPT2 | {"pad_token": "<|padding|>"},
        normalizer=lambda _settings, _file: _NFC,
        frame=(None, None),
    ),
    "RobertaTokenizer": _ROBERTA_CLASS,
    "DebertaTokenizer": replace(_ROBERTA_CLASS, tokens=_DEBERTA),
    "Qwen2Tokenizer": replace(_qwen(QWEN2_SPLIT), adds_again=True),
    "Qwen3_5Tokenizer": _qwen(QWEN3_5_SPLIT),
    "LlamaTokenizer": TokenizerClass("BPE", _LLAMA, _bpe(fuse_unk=True, byte_fallback=True), _llama_words),
    "GemmaTokenizer": TokenizerClass(
        "BPE",
        {
            "unk_token": "<unk>",
            "bos_token": "<bos>",
            "eos_token": "<eos>",
            "pad_token": "<pad>",
            "mask_token": "<mask>",
        },
        _bpe(unk_token=_UNK, fuse_unk=True, byte_fallback=True),
        lambda _: _split(" ", behavior="MergedWithPrevious"),
        lambda _settings, _file: _replace({"String": " "}, "▁"),
    ),
    "CohereTokenizer": replace(
        _GPT2_CLASS,
        tokens={
            "unk_token": "<UNK>",
            "bos_token": "<BOS_TOKEN>",
            "eos_token": "<|END_OF_TURN_TOKEN|>",
            "pad_token": "<PAD>",
            "cls_token": "<CLS>",
            "sep_token": "<SEP>",
            "mask_token": "<MASK_TOKEN>",
        },
        pre_tokenizer=lambda settings: _sequence({"type": "Digits", "individual_digits": True}, _byte_level(settings)),
        normalizer=lambda _settings, _file: _NFC,
        adds_again=True,
    ),
    "CLIPTokenizer": TokenizerClass(
        "BPE",
        _QWEN2 | {"bos_token": "<|startoftext|>"},
        _bpe(unk_token=_UNK, end_of_word_suffix="</w>"),
        lambda _: _sequence(_split(CLIP_SPLIT, behavior="Removed", invert=True), _byte_level({})),
        lambda _settings, _file: _sequence(_NFC, _replace({"Regex": r"\s+"}, " "), {"type": "Lowercase"}),
        frame=_BOS_EOS,
    ),
    "T5Tokenizer": replace(
        _XLM_ROBERTA_CLASS,
        tokens={"eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"},
        pre_tokenizer=lambda _: _words({}),
        unknown=lambda _settings, _vocabulary: 2,
        frame=(None, "eos_token"),
        named=_sentinels,
    ),
    "XLMRobertaTokenizer": _XLM_ROBERTA_CLASS,
    "CamembertTokenizer": replace(
        _XLM_ROBERTA_CLASS,
        unknown=lambda settings, vocabulary: _index(vocabulary, settings["unk_token"], 0),
        lstrip_mask=True,
        named=lambda settings: _additional(settings) or ["<s>NOTUSED", "</s>NOTUSED", "<unk>NOTUSED"],
    ),
    "AlbertTokenizer": replace(
        _XLM_ROBERTA_CLASS,
        tokens=_DEBERTA | {"unk_token": "<unk>", "pad_token": "<pad>"},
        normalizer=_albert_text,
        unknown=lambda _settings, _vocabulary: 1,
        frame=_CLS_SEP,
    ),
    "DebertaV2Tokenizer": replace(
        _XLM_ROBERTA_CLASS,
        tokens=_DEBERTA,
        pre_tokenizer=_deberta_words,
        normalizer=_deberta_text,
        unknown=_deberta_unknown,
        frame=_CLS_SEP,
    ),
}

_ALIASES = {
    **dict.fromkeys(("BartTokenizer", "LEDTokenizer", "LongformerTokenizer", "MvpTokenizer"), "RobertaTokenizer"),
    **dict.fromkeys(("DistilBertTokenizer", "ElectraTokenizer", "LayoutLMTokenizer"), "BertTokenizer"),
    **dict.fromkeys(("LxmertTokenizer", "MobileBertTokenizer", "SqueezeBertTokenizer"), "BertTokenizer"),
    "Phi3Tokenizer": "LlamaTokenizer",
}
_OTHER_CLASSES = frozenset(
    f"{name}Tokenizer"
    for name in _list(
        "Barthez Bartpho BertGeneration BertJapanese Bertweet BigBird BioGpt Blenderbot BlenderbotSmall ByT5 CTRL "
        "Canine Clvp CodeGen CodeLlama ConvBert Cpm CpmAnt DPRContextEncoder DPRQuestionEncoder DPRReader Dia Esm Esmc "
        "FNet FSMT FastSpeech2Conformer Flaubert Funnel GPTNeoXJapanese GPTSw3 Herbert Lasr LayoutLMv2 LayoutLMv3 "
        "LayoutXLM Luke M2M100 MBart MBart50 MLuke Marian MarkupLM Mgpstr MyT5 Nllb Nougat OpenAIGPT PLBart Parakeet "
        "Pegasus Perceiver Phobert Pop2Piano ProphetNet Rag Reformer RemBert RoCBert RoFormer SeamlessM4T Siglip "
        "Siglip2 Speech2Text SpeechT5 Splinter Tapas Tipsv2 Udop VideoPrism Vits Wav2Vec2CTC Wav2Vec2PhonemeCTC "
        "Whisper XGLM XLM XLNet"
    )
)
"""Classes that are not compared."""
_OF_TYPE_ALWAYS = frozenset(_list("hyperclovax_vision_v2 qwen2 qwen3_5 qwen3_5_moe qwen3_5_moe_text qwen4_exp siglip2"))
"""Model types whose class does not depend on `tokenizer_class`."""
_TYPES = {
    model_type: name
    for name, model_types in {
        "BertTokenizer": (
            "align bark bert blip bros chinese_clip convbert distilbert electra ernie flava git grounding-dino "
            "layoutlm lxmert megatron-bert mm-grounding-dino mobilebert nomic_bert "
            "squeezebert tvp vilt visual_bert"
        ),
        "MPNetTokenizer": "mpnet",
        "GPT2Tokenizer": (
            "blip-2 codegen dbrx emu3 gpt2 gpt_neo gptj hyperclovax_vision_v2 instructblip instructblipvideo "
            "jais2 opt phi starcoder2"
        ),
        "GPTNeoXTokenizer": "falcon_mamba gpt_neox mamba mamba2 mpt olmo olmoe rwkv xlstm",
        "RobertaTokenizer": (
            "bart bridgetower clap data2vec-text florence2 ibert led lilt longformer mra mvp roberta "
            "roberta-prelayernorm"
        ),
        "DebertaTokenizer": "deberta",
        "Qwen2Tokenizer": (
            "audioflamingo3 colqwen2 cosmos3_omni dots3_note fun_asr_nano hunyuan_vl internvl lighton_ocr "
            "moss_transcribe_diarize ovis2 qianfan_ocr qwen2 qwen2_5_omni qwen2_5_vl qwen2_audio qwen2_moe "
            "qwen2_vl qwen3 qwen3_asr qwen3_moe qwen3_next qwen3_omni_moe qwen3_vl qwen3_vl_moe vibevoice"
        ),
        "Qwen3_5Tokenizer": "qwen3_5 qwen3_5_moe qwen3_5_moe_text qwen3_5_text qwen4_exp",
        "LlamaTokenizer": "idefics idefics2",
        "GemmaTokenizer": (
            "diffusion_gemma gemma gemma2 gemma3 gemma3_text gemma3n gemma3n_text recurrent_gemma shieldgemma2 "
            "t5gemma zaya"
        ),
        "CohereTokenizer": "aya_vision cohere cohere2",
        "CLIPTokenizer": "aimv2 clip clipseg groupvit omdet-turbo oneformer owlv2 owlvit sam3 sam3_video xclip",
        "T5Tokenizer": "mt5 musicgen musicgen_melody switch_transformers t5",
        "XLMRobertaTokenizer": "gte jina_embeddings_v3 metaclip_2 trocr xlm-roberta xmod",
        "CamembertTokenizer": "camembert",
        "AlbertTokenizer": "albert yoso",
        "DebertaV2Tokenizer": "deberta-v2",
        PLAIN: (
            "EvollaModel aria beam bigbird_pegasus canary flex_olmo glm glm4 glm4_moe glm4_moe_lite glm4v "
            "glm4v_moe glm_image glmasr got_ocr2 gpt_bigcode gradium_phonon_tts granite granitemoe "
            "granitemoehybrid granitemoeshared kimi_k25 kimi_linear kosmos-2 mimo_v2_flash minicpm_ocr "
            "minicpmv4_6 minicpmv4_7 ministral ministral3 mistral mistral3 mistral_large4 mixtral nemo_speechlm "
            "nystromformer olmo2 olmo3 olmo_hybrid omniasr pegasus_x persimmon pix2struct pixtral pocket_tts "
            "stablelm umt5 voxtral voxtral_realtime xlm-roberta-xl cohere_asr iquestcoder paddleocr_vl chatlm "
            "jamba smolvlm arctic modernbert-decoder camembertv2-base openvla h2ovl_chat minimax_m2 hyperclovax "
            "vipllava molmo llava_next llava phimoe minicpm3 phi3 fuyu ernie4_5 internlm2 nvfp4 minicpmv "
            "internlm3 opencua modernbert step3_vl phi3_v ernie4_5_moe nemotron molmo2 hyperclovax_vlm"
        ),
        "XLNetTokenizer": (
            "bert-generation big_bird biogpt blenderbot blenderbot-small "
            "canine clvp cpmant ctrl data2vec-audio dia dpr esm esmc esmfold2 "
            "fastspeech2_conformer flaubert fnet fsmt funnel gpt-sw3 gpt_neox_japanese granite_speech5_ctc "
            "hubert lasr_ctc lasr_encoder layoutlmv2 layoutlmv3 layoutxlm luke m2m_100 marian markuplm "
            "mbart mgp-str nemotron3_5_asr nemotron_asr_streaming nllb-moe nougat "
            "omniasr_ctc openai-gpt parakeet_ctc parakeet_rnnt parakeet_tdt pegasus perceiver plbart "
            "pp_formulanet prophetnet rag reformer rembert roc_bert roformer seamless_m4t seamless_m4t_v2 siglip "
            "siglip2 speech_to_text speecht5 splinter tapas tipsv2 udop unispeech unispeech-sat videoprism vits "
            "wav2vec2 wav2vec2-bert wav2vec2-conformer whisper xglm xlm xlnet"
        ),
    }.items()
    for model_type in _list(model_types)
}
"""The class of each model type of the library; `XLNetTokenizer` stands for all classes that are not compared.

Without a configuration class, as for `retribert`, the library takes the plain class.
"""
