"""Writes `docs/reference/coverage.md`: the front-end of every model type of transformers.

`make discover` runs it. An interrupted run continues; `--again` starts anew.
"""

import json
import signal
import sys
import tempfile
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig
from transformers.models.auto import modeling_auto
from transformers.utils import logging

from preblock.export.discovery.calls import pad
from preblock.export.discovery.discovery import discover
from preblock.export.discovery.errors import DiscoveryError
from preblock.export.discovery.library import SILENT, library_version
from preblock.export.discovery.model import BlockInput, CapturedInput, find_part, is_block_list, sides_of
from preblock.export.parity import allowed_ulp, difference
from preblock.models.checkpoints.reader import read_frontend
from preblock.models.checkpoints.weight_files import CheckpointError
from preblock.models.families import FAMILIES
from preblock.models.frontend import FrontEnd
from tests.families import tiny_models
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


RESULTS = ROOT / ".discover.jsonl"
MAX_SECONDS = 90


def cover(model_type: str) -> Iterator[Coverage]:
    """Yield the result of each side of a model type."""
    found: dict[str, Coverage] = {}
    reasons: list[str] = []
    for attempt in ATTEMPTS:
        with tempfile.TemporaryDirectory() as name:
            folder, whole = Path(name), attempt is not tiny_models.save_without_blocks
            try:
                attempt(model_type, folder)
            except Exception as error:
                reasons.append(f"{type(error).__name__}: {' '.join(str(error).split())}")
                continue
            document = json.loads((folder / "config.json").read_text())
            for side in sides_of(AutoConfig.from_pretrained(folder)) or (None,):
                name = f"{model_type}/{side}" if side else model_type
                one = _cover_side(name, folder, document, side, whole)
                failed = ("refused", "not run")
                if name not in found or (found[name].result in failed and one.result not in failed):
                    found[name] = one
        # Small sizes may not fit together: other sizes tell.
        if not any(part in one.detail for one in found.values() for part in ("fails before", "mrope_section")):
            break
    yield from found.values() or [Coverage(model_type, "not built", reasons[0][:160])]


ATTEMPTS: tuple[Callable[[str, Path], None], ...] = (
    tiny_models.save_whole,
    partial(tiny_models.save_whole, sizes=tiny_models.EQUAL_HEADS),
    partial(tiny_models.save_whole, complete=True),
    partial(tiny_models.save_whole, sizes=tiny_models.EQUAL_HEADS, complete=True),
    partial(tiny_models.save_whole, rope=tiny_models.MULTIMODAL_ROPE),
    partial(tiny_models.save_whole, rope=tiny_models.MULTIMODAL_ROPE, sizes=tiny_models.EQUAL_HEADS),
    partial(tiny_models.save_whole, rope=tiny_models.MULTIMODAL_ROPE, complete=True),
    partial(tiny_models.save_whole, rope=tiny_models.HALF_ROPE),
    tiny_models.save_without_blocks,
)


def _cover_side(name: str, folder: Path, document: dict[str, Any], side: str | None, whole: bool) -> Coverage:
    try:
        if name in FAMILIES:
            frontend, result = FrontEnd.from_data(read_frontend(folder, side)).eval(), "row"
        else:
            frontend, result = discover(folder, document, side).frontend, "discovered"
    except CheckpointError as error:
        reason = str(error).replace(str(folder), "")[:200]
        if "takes no input_ids" in reason:
            return Coverage(name, "no token ids", reason)
        fails = any(part in reason for part in ("fails before block 0", "runs no list of blocks"))
        return Coverage(name, "not run" if fails and whole and not _runs(folder, document, side) else "refused", reason)
    steps = " + ".join(step.kind for step in frontend.config.steps)
    if not whole:
        return Coverage(name, result, steps, 0.0, "class without blocks")
    model = tiny_models.head_class(document["model_type"]).from_pretrained(folder).eval()
    part = find_part(model, model.config, side)
    for reference, module in (("whole model", model), ("part with token ids", part)):
        try:
            largest = max(differences(module, side, frontend))
        except Exception as error:  # some models need an image too, or a certain id
            sys.stderr.write(f"{name}, {reference}: {type(error).__name__}: {error}\n")
            continue
        return Coverage(name, result if largest <= allowed_ulp(frontend) else "wrong", steps, largest, reference)
    return Coverage(name, result, steps, 0.0, "class without blocks")


def _runs(folder: Path, document: dict[str, Any], side: str | None) -> bool:
    """Return whether the library's own model, or the part of the side, runs on token ids up to a block."""
    try:
        model = tiny_models.head_class(document["model_type"]).from_pretrained(folder).eval()
        parts = (model, find_part(model, model.config, side))
    except Exception as error:
        sys.stderr.write(f"{folder}: {error}\n")
        return False
    for part in parts:
        try:
            _entering_block_0(part, side, torch.tensor([[3, 4, 5]]), None)
        except Exception as error:
            sys.stderr.write(f"{folder}: {error}\n")
            continue
        return True
    return False


def differences(model: Any, side: str | None, frontend: FrontEnd) -> Iterator[float]:
    """Yield the largest difference of a front-end from a whole model, or from a part, for each call in ULP."""
    config = frontend.config
    legal = torch.tensor([i for i in range(config.tokens.rows) if i not in (*config.refused_ids, config.padding_idx)])
    length = min(11, config.max_len or 11)
    rows = torch.cat((legal, legal[: -len(legal) % length])).reshape(-1, length)
    random = legal[torch.randint(len(legal), (3, length), generator=torch.Generator().manual_seed(7))]
    padded, mask = pad(random, config.padding_idx, "left")
    longest = legal[torch.arange(min(config.max_len or 64, 64)) % len(legal)].unsqueeze(0)
    for ids, given in ((rows, None), (random, None), (padded, mask), (longest, None)):
        expected = _entering_block_0(model, side, ids, given)[:, : ids.shape[1]]
        found = frontend(ids, attention_mask=given if config.needs_mask else None)
        yield difference(found.detach().numpy(), expected.detach().float().numpy())[1]


def _entering_block_0(model: Any, side: str | None, ids: Tensor, mask: Tensor | None) -> Tensor:
    """Return the input of the first block of a whole model, without the model's own pass beyond it."""

    def stop(*arguments: Any, **keywords: Any) -> None:
        vectors = keywords["hidden_states"] if "hidden_states" in keywords else arguments[0]
        if vectors.ndim == 4:  # several streams, equal ones beside each other
            vectors = vectors[:, :, 0] if bool((vectors == vectors[:, :, :1]).all()) else vectors[0]
        streams = getattr(model.config.get_text_config(), "hc_count", 1)
        if vectors.shape[-1] == streams * getattr(model.config.get_text_config(), "hidden_size", 0):  # side by side
            vectors = vectors.unflatten(-1, (streams, -1))[:, :, 0]
        raise CapturedInput(BlockInput("", vectors))

    blocks: list[Any] = [
        module[0] for module in model.modules() if isinstance(module, nn.ModuleList) and is_block_list(module)
    ]
    for block in blocks:
        block.forward = stop  # no hook, because some models call the method itself
    given: dict[str, Any] = {"input_ids": ids} | ({} if mask is None else {"attention_mask": mask})
    part = model
    if side == "encoder":
        given["decoder_input_ids"] = ids
    elif side == "decoder":
        part = model.get_decoder()
        config = part.config
        width = getattr(config, "d_model", None) or config.hidden_size
        given["encoder_hidden_states"] = torch.zeros(len(ids), 3, width)
    for module in model.modules():
        if hasattr(module, "config"):
            module.config.use_cache = False  # some caches cannot be made for tiny models
    try:
        part(**given)
    except CapturedInput as captured:
        vectors = captured.given.vectors
        if tuple(vectors.shape[:2]) == tuple(ids.t().shape) != tuple(ids.shape):
            vectors = vectors.transpose(0, 1)
        return vectors.transpose(1, 2) if vectors.shape[-1] == ids.shape[1] != vectors.shape[1] else vectors
    finally:
        for block in blocks:
            vars(block).pop("forward", None)
    raise DiscoveryError("no block ran")


def _results() -> dict[str, list[Coverage]]:
    found: dict[str, list[Coverage]] = {}
    if RESULTS.exists():
        for line in RESULTS.read_text().splitlines():
            record = json.loads(line)
            if record["library"] == library_version():
                found[record["model_type"]] = [Coverage(**one) for one in record["results"]]
    return found


def run(model_types: list[str]) -> dict[str, list[Coverage]]:
    """Return the results of all model types, and keep each as it is found."""
    done = _results()
    signal.signal(signal.SIGPROF, _too_slow)  # of CPU time, because other processes may slow this one
    for model_type in model_types:
        if model_type in done:
            continue
        signal.setitimer(signal.ITIMER_PROF, MAX_SECONDS)
        try:
            results = list(cover(model_type))
        except Exception as error:
            results = [
                Coverage(model_type, "not built", f"{type(error).__name__}: {' '.join(str(error).split())[:160]}")
            ]
            traceback.print_exc()
        signal.setitimer(signal.ITIMER_PROF, 0)
        done[model_type] = results
        record = {"library": library_version(), "model_type": model_type, "results": [asdict(one) for one in results]}
        with RESULTS.open("a") as file:
            file.write(json.dumps(record) + "\n")
        for one in results:
            sys.stderr.write(f"{one.name}: {one.result}: {one.detail} {one.largest}\n")
    return done


def _too_slow(*_: Any) -> None:
    raise TimeoutError(f"took longer than {MAX_SECONDS} s of CPU time")


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    logging.set_verbosity(SILENT)
    torch.set_grad_enabled(False)
    if sys.argv[1:] == ["--again"]:
        RESULTS.unlink(missing_ok=True)
    write_document(run(tiny_models.model_types()))
