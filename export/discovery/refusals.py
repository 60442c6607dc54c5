"""Reasons of model types outside the steps of a front-end, for people: the search itself names operations only."""

from collections.abc import Mapping
from typing import Any

from preblock.export.discovery.errors import DiscoveryError

_BOXES = "it adds the places of tokens on a page (bbox)"
_RECURRENT = "it is a recurrent decoder, without blocks"
_LAYERS = "each layer takes an input of its own, computed from the token vectors"
_CHANNELS = "it takes several channels of audio codes"
_IMAGE = "it needs an image beside the token ids"
REASONS: Mapping[str, str] = {
    "bark": "it is three models, one for each stage of sound, and the library runs none of them on token ids alone",
    "blt": "its vectors depend on hashes of neighbouring bytes",
    "bros": _BOXES,
    "canine": "its vectors depend on hashes of characters",
    "cpmant": "it puts trained prompt tokens before the ids",
    "dia/decoder": _CHANNELS,
    "embedding_gemma2/text": _LAYERS,
    "embedding_gemma2_text": _LAYERS,
    "florence2/decoder": "the library has no module for its decoder alone",
    "fsmt/decoder": "the library runs its decoder only with the masks of its encoder",
    "hrm_text": "it adds a state vector to every token",
    "idefics": _IMAGE,
    "kosmos-2.5/text": "it adds a trained vector for text or for image to the position of every token",
    "kyutai_speech_to_text": "it takes audio codes beside each text token",
    "layoutlm": _BOXES,
    "layoutlmv3": _BOXES,
    "lilt": "its blocks take a second stream beside the tokens, from their places on a page (bbox)",
    "lxmert": _IMAGE,
    "markuplm": "it adds the path of each token in a document's markup (xpath_tags_seq)",
    "mobilebert": "a vector depends on the tokens beside it",
    "molmo2_text": "its token table is stored in two tensors",
    **dict.fromkeys(("musicgen/decoder", "musicgen_decoder"), _CHANNELS),
    **dict.fromkeys(("musicgen_melody/decoder", "musicgen_melody_decoder"), _CHANNELS),
    "nemotron3_5_asr/decoder": _RECURRENT,
    "nemotron_asr_streaming/decoder": _RECURRENT,
    "parakeet_rnnt/decoder": _RECURRENT,
    "parakeet_tdt/decoder": _RECURRENT,
    "perceiver": "its blocks take latent vectors, which read the tokens by attention",
    "pi0": "it takes the state of a robot beside the token ids",
    "prophetnet/decoder": "its blocks take further streams of predicted tokens",
    "reformer": "it has axial positions",
    "roc_bert": "it adds shapes and pronunciations of characters",
    "shieldgemma2/text": "it classifies images",
    **dict.fromkeys(("speecht5/encoder", "speecht5/decoder"), "its parts take text and sound alike, as input_values"),
    "tapas": "it adds rows, columns and ranks of table cells",
    "tvp": "it needs a video beside the token ids",
    "udop/encoder": _BOXES,
    "videoprism/text": "it adds a vector of its own to the tokens of a row",
    "vilt": _IMAGE,
    "zaya": "it adds trained vectors to every token, and multiplies by others",
}
"""Model type, and side if it has several -> why no list of steps describes it."""


NGRAMS_TYPE, NGRAMS_KEY = "longcat_flash_ngram", "ngram_vocab_size_ratio"
"""Model type, and a key of `config.json`, of n-gram embeddings unknown to the library."""


def refuse_ngrams(document: Mapping[str, Any]) -> None:
    """Raise DiscoveryError for n-gram embeddings without a model in the library: it would leave them out."""
    model_type = document.get("model_type")
    if model_type == NGRAMS_TYPE or document.get(NGRAMS_KEY) is not None:
        ratio = f" with {NGRAMS_KEY} {document[NGRAMS_KEY]!r}" if NGRAMS_KEY in document else ""
        raise DiscoveryError(
            f"config.json: {model_type!r}{ratio} is not supported: its vectors "
            "depend on the ids before each token, and transformers has no model with these n-gram embeddings"
        )


def explain(name: str, error: DiscoveryError) -> DiscoveryError:
    """Return `error` with the reason of the model type `name`, if it is known."""
    reason = REASONS.get(name)
    return error if reason is None else DiscoveryError(f"{name!r} is not supported: {reason} ({error.cause})")
