"""`preblock verify --provider cuda` for every artifact: each family, stem, stored type and output."""

import json
import os
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

PROCESSES = min(16, os.cpu_count() or 1)


def main(work: Path, artifacts: Path, minutes: float) -> dict[str, Any]:
    """Verify each artifact, and return the largest difference of each output, or the error."""
    del minutes
    partial = work / "results" / "parity.jsonl"
    lines = partial.read_text().splitlines() if partial.exists() else []
    found: dict[str, Any] = dict(json.loads(line) for line in lines)
    left = [name for name in names(artifacts) if name not in found]
    with partial.open("a") as file, ProcessPoolExecutor(PROCESSES, get_context("spawn")) as pool:
        for name, result in zip(left, pool.map(verify_one, [artifacts] * len(left), left), strict=True):
            found[name] = result
            if "error" not in result:
                file.write(json.dumps((name, result)) + "\n")
                file.flush()
    errors = {name: result["error"] for name, result in found.items() if "error" in result}
    for name, error in errors.items():
        print(f"{name}: {error}", flush=True)
    print(f"{len(found)} artifacts, {len(errors)} refused or different", flush=True)
    if errors:
        raise SystemExit(f"refused or different: {', '.join(errors)}")
    return found


def names(artifacts: Path) -> Iterator[str]:
    """Yield the names of the artifacts, all of version 1."""
    yield from sorted(folder.name for folder in artifacts.iterdir() if (folder / "1" / "manifest.json").exists())


def verify_one(artifacts: Path, name: str) -> dict[str, Any]:
    """Run the command in this process, and return the CUDA section of the parity report in short."""
    from click.testing import CliRunner

    from preblock.cli import app

    command = ["verify", name, "--repository", str(artifacts), "--provider", "cuda"]
    done = CliRunner().invoke(app, command, standalone_mode=False)
    if done.exit_code:
        return {"error": " ".join(done.output.split())[-400:] + repr(done.exception)}
    report = json.loads((artifacts / name / "1" / "parity.json").read_text())
    outputs = report["providers"]["CUDAExecutionProvider"]["outputs"]
    return {name: [len(output["cases"]), output["max_ulp"], output["max_abs"]] for name, output in outputs.items()}
