"""The page `docs/reference/coverage.md`: how it presents the front-end of every model type of transformers."""

from collections import Counter
from dataclasses import dataclass

from transformers.models.auto import modeling_auto

from preblock.export.discovery.library import library_version
from tests.support.paths import ROOT

DOCUMENT = ROOT / "docs/reference/coverage.md"
EXACT = ("row", "discovered")
TEXT_TABLES = (
    "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
    "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES",
)
"""Tables of text model types."""
HEAD = """# Coverage

This page lists the front-end of every model type of {library}: exact by a row of the family table, exact by
[discovery](../front-ends.md#discovery), or rejected. Each line is one side of a tiny random model. Types without token
ids are left out. LongCat-Flash-Lite (`longcat_flash_ngram`) is rejected: the library has no model of its n-gram
embeddings.

Of {built} front-ends of text model types that could be built, {exact} are exact ({share:.1f} %). All types: {counts}.

| reference | meaning |
|---|---|
| whole model | all weights, loaded by the library; the input of its first block |
| part with token ids | the same for a part, because the whole model needs an image or sound too |
| class without blocks | the comparison of discovery itself: the type is too large to save, or needs certain ids |

ULP: the largest difference, in units in the last place of the largest value of its row. `make discover` writes this
page. It continues an interrupted run; with `ARGS=--again` it starts anew."""
SECTIONS = (
    ("wrong", "Wrong", "| type | front-end |"),
    ("refused", "Rejected", "| type | reason |"),
    ("row", "Rows", "| type | front-end | ULP | reference |"),
    ("discovered", "Discovered", "| type | front-end | ULP | reference |"),
    ("not run", "Not run by the library on token ids alone", "| type | reason |"),
    ("not built", "Not built", "| type | reason |"),
)


@dataclass(frozen=True)
class Coverage:
    """The result of one front-end.

    Args:
        name: model type, and side if it has several.
        result: "row", "discovered", "refused", "not built", "not run", "no token ids" or "wrong".
        detail: steps, or the reason.
        largest: largest difference from the reference, in ULP of the largest value of a row.
        reference: "whole model" with all weights; "part with token ids" of one that needs other inputs too; "class
            without blocks", the comparison of discovery itself.

    """

    name: str
    result: str
    detail: str
    largest: float = 0.0
    reference: str = ""


def write_document(results: dict[str, list[Coverage]]) -> None:
    """Write `docs/reference/coverage.md`."""
    found = sorted((one for all_ in results.values() for one in all_), key=lambda one: one.name)
    text = {name for table in TEXT_TABLES for name in getattr(modeling_auto, table)}
    built = [one for one in found if one.name.partition("/")[0] in text and one.result in (*EXACT, "refused", "wrong")]
    exact = sum(one.result in EXACT for one in built)
    counts = Counter(one.result for one in found)
    lines = [
        HEAD.format(
            library=library_version(),
            exact=exact,
            built=len(built),
            share=100 * exact / max(1, len(built)),
            counts=", ".join(f"{counts[name]} {name}" for name in (*EXACT, "refused", "not run", "not built", "wrong")),
        )
    ]
    for result, title, head in SECTIONS:
        rows = [one for one in found if one.result == result]
        if not rows:
            continue
        lines += ["", f"## {title}", "", head, "|" + "---|" * (head.count("|") - 1)]
        lines += [_row(one) for one in rows]
    DOCUMENT.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _row(one: Coverage) -> str:
    detail = one.detail.replace("|", "/")
    if one.result in EXACT:
        return f"| `{one.name}` | {detail} | {one.largest:.1f} | {one.reference} |"
    return f"| `{one.name}` | {detail} |"
