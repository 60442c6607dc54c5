"""The manifest of a tiny model, where no artifact is needed."""

from incipit.service.manifest import Graph, Manifest, Rotary, Source, Tensor, TokenEmbeddings

OUTPUTS = {"model.onnx": "embeddings", "token.onnx": "token_embeddings"}


def tiny_manifest(segments: int = 2, rotary: tuple[Rotary, ...] = ()) -> Manifest:
    """Return one of 11 ids, 8 positions and vectors of width 4."""
    return Manifest(
        family="bert",
        vocab_size=11,
        width=4,
        max_len=8,
        indices={"token_type_ids": segments} if segments else {},
        needed=(),
        counts="slots",
        padding_id=None,
        refused_ids=(),
        dtype="float32",
        graphs={
            graph: Graph(inputs=(), outputs=(Tensor(name=name, dtype="float32", shape=("batch", "length", 4)),))
            for graph, name in OUTPUTS.items()
        },
        token_embeddings=TokenEmbeddings(output="token_embeddings", width=4, consumer_scales=None),
        rotary=rotary,
        resized=None,
        front_end={},
        files={},
        source=Source(kind="module"),
        versions={},
    )
