"""Edits every key of every family's `config.json`, and compares Preblock with transformers.

`make discover-fuzz` runs it, and writes `docs/reference/parity-configs.md`. A second run continues an interrupted one.
`make discover-fuzz ARGS=gpt2` tries one family anew, and keeps the other rows.
"""

import json
import shutil
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Mapping
from pathlib import Path

import torch
import transformers

from tests.families.config_edits import edits_of, save_whole, try_edit
from tests.families.published_models import PUBLISHED
from tests.families.table import named_families, versions
from tests.support.paths import ROOT

DOCUMENT = ROOT / "docs/reference/parity-configs.md"
STATE = ROOT / "build/config-fuzzing.jsonl"
WRONG = ("different", "crashed")
HEAD = """# Parity of edited configurations

Each key of each family's `config.json` is removed, set to null, and set to other values: {count} edits. Transformers
and Preblock then read the same tiny random checkpoint. Where both accept it, the inputs of the first block must agree
for every id, for padded rows, for the longest input, and for `inputs_embeds`. Rotary outputs must agree too.

`make discover-fuzz` writes this page. Versions: {versions}.

| family | equal | different | refused by both | refused by Preblock alone | refused by transformers alone |
|---|---|---|---|---|---|
"""
ALONE = """
Preblock alone refuses some values of these keys. Most are sizes that differ from the tensors, or values without a
meaning for the front-end.

| family | keys |
|---|---|
"""


def main() -> int:
    """Try all edits, and write the report; return 1 if Preblock accepted an edit and gave other vectors."""
    page = DOCUMENT.read_text(encoding="utf-8")
    names = named_families("Edit every key of every family's config.json.", PUBLISHED, page)
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    transformers.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    with tempfile.TemporaryDirectory() as folder:
        state = Path(folder) / STATE.name if names else STATE
        state.parent.mkdir(parents=True, exist_ok=True)
        for name in names or PUBLISHED:
            try_family(name, state)
            sys.stderr.write(f"{name}\n")
        outcomes = _read(state)
    DOCUMENT.write_text(report(outcomes, page if names else ""), encoding="utf-8")
    wrong = [record for record in outcomes.values() if record["kind"] in WRONG]
    for record in wrong:
        sys.stderr.write(f"{record['family']}: {record['edit']}: {record['kind']}, {record['detail']}\n")
    return 1 if wrong else 0


def _read(state: Path) -> dict[tuple[str, str], dict[str, str]]:
    """Return the outcomes of these versions in `state`, by family and edit; an interrupted last line is none."""
    records, current = {}, versions()
    for line in state.read_text(encoding="utf-8").splitlines() if state.exists() else ():
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if record["versions"] == current:
            records[record["family"], record["edit"]] = record
    return records


def try_family(name: str, state: Path) -> None:
    """Try the edits of a family without an outcome in `state`, and add their outcomes."""
    done = _read(state)
    unfinished = state.exists() and not state.read_bytes().endswith(b"\n")
    with tempfile.TemporaryDirectory() as place, state.open("a", encoding="utf-8") as file:
        file.write("\n" * unfinished)
        source, folder = Path(place) / "source", Path(place) / "edited"
        config = save_whole(name, source)
        for edit in edits_of(config):
            if (name, str(edit)) in done:
                continue
            outcome = try_edit(name, source, config, edit, folder)
            shutil.rmtree(folder)
            record = {"family": name, "edit": str(edit), "kind": outcome.kind, "detail": outcome.detail}
            file.write(json.dumps(record | {"versions": versions()}) + "\n")
            file.flush()


def report(outcomes: Mapping[tuple[str, str], Mapping[str, str]], page: str) -> str:
    """Return the page: rows of the families in `outcomes`, and the rows of `page` for the others.

    Args:
        outcomes: all outcomes of each family, by family and edit.
        page: an earlier page; "" for none.

    """
    found = [line for line in page.splitlines() if line.startswith("| `")]
    counted, alone = ({line.split("`")[1]: line for line in found if line.count("|") == bars} for bars in (7, 3))
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    keys: dict[str, set[str]] = defaultdict(set)
    for (name, edit), record in outcomes.items():
        counts[name][record["kind"]] += 1
        if record["kind"] == "preblock refuses":
            keys[name].add(f"`{edit.partition(':')[0]}`")
    for name, count in counts.items():
        kinds = (count["equal"], sum(count[kind] for kind in WRONG), count["refused"])
        counted[name] = (
            f"| `{name}` | {' | '.join(map(str, kinds))} | {count['preblock refuses']} | "
            f"{count['transformers refuses']} |"
        )
        alone.pop(name, None)
        if keys[name]:
            alone[name] = f"| `{name}` | {', '.join(sorted(keys[name]))} |"
    rows, refusals = ([group[name] for name in PUBLISHED if name in group] for group in (counted, alone))
    edits = sum(int(cell) for row in rows for cell in row.split("|")[2:-1])
    head = HEAD.format(count=f"{edits:,}", versions=versions())
    return head + "\n".join(rows) + "\n" + ALONE + "\n".join(refusals) + "\n"


if __name__ == "__main__":
    sys.exit(main())
