"""The artifacts in the folder of a model repository: `<repository>/<name>/<version>/`."""

import re
from pathlib import Path

from preblock.service.artifacts.manifest import NAME
from preblock.service.core.errors import ArtifactError

VERSION = re.compile(r"[1-9][0-9]{0,8}")


def find_artifacts(root: Path) -> list[tuple[str, int, Path]]:
    """Return name, version and folder of every artifact in `root`, by name and version.

    Raises:
        ArtifactError: the folder does not exist, or has no artifact.

    """
    if not root.is_dir():
        message = f"the repository {root} does not exist; `preblock export` makes one"
        raise ArtifactError("repository", str(root), "an existing folder", message=message)
    found = [
        (folder.parent.name, int(folder.name), folder)
        for folder in root.glob("[!.]*/[1-9]*")
        if VERSION.fullmatch(folder.name) and folder.is_dir()
    ]
    for name, _, _ in found:
        if not re.fullmatch(NAME, name):
            raise ArtifactError("model", name, "a name of letters, digits, '.', '_' and '-'")
    if not found:
        message = f"the repository {root} holds no model; `preblock export` adds one"
        raise ArtifactError("repository", str(root), "a folder with a model", message=message)
    return sorted(found)
