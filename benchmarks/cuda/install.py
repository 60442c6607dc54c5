"""An environment of the given wheels, over the packages of the running Python."""

import re
import subprocess
import sys
import sysconfig
from collections import defaultdict
from pathlib import Path

PART = re.compile(r"(.+\.whl)\.(\d+)of(\d+)")


def install(wheels: Path, environment: Path) -> Path:
    """Return the Python of an environment with all wheels of a folder; an existing one is used again.

    Raises:
        SystemExit: a part of a wheel is missing.

    """
    python = environment / "bin" / "python"
    if (stamp := environment / "installed").exists():
        return python
    files = [*wheels.glob("*.whl"), *join_parts(wheels, environment.parent / "joined")]
    subprocess.run([sys.executable, "-m", "venv", "--clear", environment], check=True)
    # The environment's own packages come first; those of this Python, such as torch for CUDA, fill the gaps.
    site = next((environment / "lib").glob("python*")) / "site-packages"
    outer = Path(sysconfig.get_path("purelib"))
    (site / "outer.pth").write_text(f"{outer}\n")
    if (outer / "nvidia").is_dir():  # onnxruntime searches CUDA's libraries beside itself
        (site / "nvidia").symlink_to(outer / "nvidia")
    pip = (python, "-m", "pip", "install", "-q", "--no-index", "--no-deps", "--no-compile", "--ignore-installed")
    subprocess.run([*pip, *files], check=True)
    stamp.touch()
    return python


def join_parts(wheels: Path, folder: Path) -> list[Path]:
    """Join the parts of wheels, and return their files.

    Raises:
        SystemExit: a part is missing.

    """
    parts: dict[tuple[str, int], dict[int, Path]] = defaultdict(dict)
    for file in wheels.iterdir():
        if found := PART.fullmatch(file.name):
            parts[found[1], int(found[3])][int(found[2])] = file
    folder.mkdir(parents=True, exist_ok=True)
    joined = []
    for (name, total), given in parts.items():
        if missing := sorted(set(range(1, total + 1)) - set(given)):
            raise SystemExit(f"{wheels}: {name}: got {len(given)} of {total} parts, expected also {missing}")
        joined.append(folder / name)
        joined[-1].write_bytes(b"".join(given[number].read_bytes() for number in sorted(given)))
    return joined
