"""How consumers of `inputs_embeds` read them: with or without the embedding scale, by their version.

Each reading was found in the consumer's source; `source` names the release or the commit. Those of transformers are
compared with the library in `tests/families/test_consumers.py`.
"""

from dataclasses import dataclass
from typing import Literal

TRANSFORMERS = "transformers"
READ_VERSION = "5.24.0"
"""Release of transformers behind the family table."""


@dataclass(frozen=True, kw_only=True)
class Reading:
    """The scale that a consumer expects of given vectors.

    Args:
        engine: name of the consumer.
        versions: versions in the form of a requirement; a commit where the source was read; "" for every one.
        scale: "applied" for vectors with the embedding scale, "none" for vectors that the consumer scales itself.
        source: releases, a pull request, or a file of the commit, as read.

    """

    engine: str
    versions: str
    scale: Literal["applied", "none"]
    source: str


def transformers_reading(scale: Literal["applied", "none"], version: str = READ_VERSION) -> Reading:
    """Return the scale that a version of transformers expects, by its own source."""
    return Reading(engine=TRANSFORMERS, versions=f"=={version}", scale=scale, source=version)


GENAI = Reading(
    engine="onnxruntime-genai",
    versions="a0c04eb",
    scale="applied",
    source="src/python/py/models/builders/base.py: exclude_embeds leaves the scale out with the table",
)
SGLANG_SCALES = Reading(engine="sglang", versions=">=0.5.9", scale="none", source="0.5.9 and 0.5.23")
SGLANG_TAKES_SCALED = Reading(engine="sglang", versions=">=0.5.9", scale="applied", source="0.5.9 and 0.5.23")
VLLM_SCALES = Reading(engine="vllm", versions=">=0.17", scale="none", source="0.17.1, 0.18.0 and 0.33.0")
