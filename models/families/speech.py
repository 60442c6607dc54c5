"""Rows of Whisper and Speech2Text: encoders of spectrograms, and decoders of texts."""

from dataclasses import replace

from preblock import models
from preblock.models.families.family import TIED, Family, StemFamily, Tied, absolute
from preblock.models.families.named_steps import (
    count_lookup_steps,
    counted_sinusoid_step,
    learned_position_step,
    root_scale,
    token_step,
    when,
)

_WHISPER = absolute(
    # `scale_embedding` is read by the library, and never used.
    lambda _: [token_step("decoder.embed_tokens"), learned_position_step("decoder.embed_positions")],
    "model.",
    Tied(True, "proj_out.weight"),
)

SPEECH: dict[str, Family] = {
    "speech_to_text/decoder": replace(
        _WHISPER,
        steps=lambda c: [
            token_step("decoder.embed_tokens"),
            *when(c("scale_embedding", True), root_scale(c, 256, "d_model")),
            counted_sinusoid_step(c, "max_target_positions"),
        ],
        tied=TIED,
        padding=1,
        lookup=count_lookup_steps(True),
    ),
    "whisper/decoder": _WHISPER,
}
SPEECH_STEMS: dict[str, StemFamily] = {
    "whisper/encoder": StemFamily(
        config=lambda name, c: models.AudioConfig(
            family=name,
            width=c("d_model", 384),
            channels=c("num_mel_bins", 80),
            positions=c("max_source_positions", 1500),
        ),
        keys={
            "conv1.weight": "conv1.weight",
            "conv1.bias": "conv1.bias",
            "conv2.weight": "conv2.weight",
            "conv2.bias": "conv2.bias",
            "positions": "embed_positions.weight",
        },
        prefixes=("encoder.", "model.encoder."),
    )
}
