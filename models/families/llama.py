"""Rows of LLaMA, and of decoders like it: the front-end is the token table."""

from preblock.models.families.decoders import decoder, text_side
from preblock.models.families.family import TIED, UNTIED, Family
from preblock.models.families.layer_kinds import FULL, alternating_kinds
from preblock.models.families.published_config import Config
from preblock.models.families.rotary import Rotary, part_of_head, theta, thetas_by_layer


def _rotary_share(c: Config) -> float:
    """Return the rotary share of MiniMax-M2, whose published files state the rotary width."""
    width = c("rotary_dim")
    if width is None:
        return 1.0
    head = c("head_dim", 128)
    if type(width) is not int or type(head) is not int or not 1 <= width <= head:
        raise ValueError(f"rotary_dim: got {width!r}, expected 1 to head_dim, {head!r}")
    return width / head


_PLAIN = Rotary(heads=32)
_HUNYUAN = decoder(2048, UNTIED, Rotary(heads=32, ntk_alpha=True))

LLAMA: dict[str, Family] = {
    "llama": decoder(2048, UNTIED, _PLAIN),
    "llama4_text": decoder(
        131072, UNTIED, Rotary(heads=40, head_dim=128, thetas=theta(500_000.0), layout="interleaved", strict=True)
    ),
    "mistral": decoder(131072, UNTIED, _PLAIN),
    "mixtral": decoder(131072, UNTIED, Rotary(heads=32, thetas=theta(1_000_000.0))),
    "cohere": decoder(8192, TIED, Rotary(heads=64, thetas=theta(500_000.0), layout="interleaved")),
    "cohere2": decoder(8192, TIED, Rotary(heads=64, layout="interleaved", strict=True)),
    "ernie4_5": decoder(131072, TIED, Rotary(heads=16, head_dim=128, thetas=theta(500_000.0), layout="interleaved")),
    "ernie4_5_moe": decoder(131072, TIED, Rotary(heads=20, thetas=theta(500_000.0), layout="interleaved")),
    "ernie4_5_vl_moe/text": text_side(
        131072,
        TIED,
        Rotary(
            heads=20,
            thetas=theta(500_000.0),
            types=("default",),
            layout="interleaved",
            sections=(22, 22, 20),
            order="time_last",
        ),
    ),
    # Published files have names from before the library's support.
    "exaone": decoder(4096, UNTIED, Rotary(heads=32, thetas=theta(500_000.0)), "embed_tokens", "transformer.wte"),
    "exaone4": decoder(2048, UNTIED, Rotary(heads=32, strict=True)),
    "hunyuan_v1_dense": _HUNYUAN,
    "hunyuan_v1_moe": _HUNYUAN,
    "minimax": decoder(131072, UNTIED, Rotary(heads=32, thetas=theta(1_000_000.0), strict=True)),
    "minimax_m2": decoder(
        196608, UNTIED, Rotary(heads=48, head_dim=128, share=part_of_head(_rotary_share), thetas=theta(5_000_000.0))
    ),
    "nemotron": decoder(4096, UNTIED, Rotary(heads=48, share=part_of_head(0.5))),
    "olmo": decoder(2048, UNTIED, _PLAIN),
    "olmo2": decoder(2048, UNTIED, _PLAIN),
    "olmo3": decoder(
        2048,
        UNTIED,
        Rotary(
            heads=32,
            thetas=thetas_by_layer(full=("rope_theta", 500_000.0), sliding=(None, 500_000.0)),
            scaled=(FULL,),
            layers=alternating_kinds(32, None, 4),
        ),
    ),
    "olmoe": decoder(4096, UNTIED, Rotary(heads=16)),
    "phi": decoder(2048, UNTIED, Rotary(heads=32, share=part_of_head(0.5))),
    "phi3": decoder(
        4096,
        UNTIED,
        Rotary(
            heads=32,
            share=part_of_head(1.0),
            types=("default", "longrope"),
            aliases={"su": "longrope", "yarn": "longrope"},
            original_len=4096,
        ),
    ),
    "phimoe": decoder(
        131072, UNTIED, Rotary(heads=32, thetas=theta(1_000_000.0), types=("default", "longrope"), mscales=True)
    ),
    "seed_oss": decoder(524288, UNTIED, Rotary(heads=80, head_dim=128)),
    "smollm3": decoder(32768, TIED, Rotary(heads=16, thetas=theta(2_000_000.0), strict=True)),
    "stablelm": decoder(4096, UNTIED, Rotary(heads=32, share=part_of_head(0.25))),
    "starcoder2": decoder(4096, TIED, Rotary(heads=24)),
}
