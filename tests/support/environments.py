"""Environments of their own: the package installed from a distribution, with some extras and nothing else."""

import importlib.metadata
import os
import subprocess
import sys
import venv
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.support.paths import ROOT

ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
"""Variables of processes in such an environment."""


def build_wheel(folder: Path) -> Path:
    """Build the wheel of the tree in `folder`, and return its file."""
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(build, check=True, cwd=ROOT, capture_output=True)
    (wheel,) = folder.glob("*.whl")
    return wheel


def install(folder: Path, *extras: str, wheel: Path | None = None) -> Path:
    """Create an environment in `folder` with Preblock and `extras`, and return its interpreter.

    The requirements are linked from the environment of the tests, without a network. Without `wheel` one is built.
    """
    environment = folder / "environment"
    venv.create(environment)
    python = environment / "bin/python"
    wheel = wheel or build_wheel(folder / "wheels")
    options = ["--python", str(python), "install", "-q", "--no-deps", "--no-index", str(wheel)]
    subprocess.run([sys.executable, "-m", "pip", *options], check=True, capture_output=True, env=ENVIRONMENT)
    (packages,) = environment.glob("lib/*/site-packages")
    (preblock,) = importlib.metadata.distributions(name="preblock", path=[str(packages)])
    for distribution in find_requirements(preblock, set(extras)):
        for file in distribution.files or ():
            if file.suffix != ".pyc" and ".." not in file.parts:  # else a command, in another folder
                target = packages / file
                target.parent.mkdir(parents=True, exist_ok=True)
                target.symlink_to(Path(str(file.locate())).resolve())
    return python


def find_requirements(
    distribution: importlib.metadata.Distribution, extras: set[str]
) -> list[importlib.metadata.Distribution]:
    """Return the direct and indirect requirements of a distribution with `extras`, from this environment."""
    found = {canonicalize_name(distribution.name): distribution}
    seen: set[tuple[str, str]] = set()

    def follow(distribution: importlib.metadata.Distribution, extras: set[str]) -> None:
        for text in distribution.requires or ():
            requirement = Requirement(text)
            name = canonicalize_name(requirement.name)
            marker = requirement.marker
            if marker and not any(marker.evaluate({"extra": extra}) for extra in extras | {""}):
                continue
            if name not in found:
                found[name] = importlib.metadata.distribution(name)
            assert found[name].version in requirement.specifier, f"{distribution.name} requires {text}"
            new = {extra for extra in requirement.extras | {""} if (name, extra) not in seen}
            seen.update((name, extra) for extra in new)
            if new:
                follow(found[name], new)

    follow(distribution, extras)
    return [other for other in found.values() if other is not distribution]
