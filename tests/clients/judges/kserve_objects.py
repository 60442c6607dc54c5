"""KServe's models of its objects; run in an environment of its own with YAML files of objects."""

import json
import re
import sys
from pathlib import Path
from typing import Any

import kserve.models
import kubernetes.client.models
import yaml

MODULES = (kserve.models, kubernetes.client.models)


def read(value: Any, kind: str, place: str, unknown: list[str]) -> Any:
    """Return a value of YAML as the models of its type, which check the required fields; note the unknown ones."""
    if found := re.fullmatch(r"list\[(.+)\]", kind):
        return [read(item, found[1], f"{place}[]", unknown) for item in value]
    model: Any = next((getattr(module, kind) for module in MODULES if hasattr(module, kind)), None)
    if model is None:  # a type of JSON
        return value
    unknown += [f"{place}.{key}" for key in value if key not in model.attribute_map.values()]
    fields = {name: key for name, key in model.attribute_map.items() if key in value}
    return model(
        **{name: read(value[key], model.openapi_types[name], f"{place}.{key}", unknown) for name, key in fields.items()}
    )


def judge(file: str) -> dict[str, Any]:
    document = yaml.safe_load(Path(file).read_text())
    group, _, version = document["apiVersion"].rpartition("/")
    unknown: list[str] = []
    found = read(document, f"V{version[1:]}{document['kind']}", "", unknown)
    return {"group": group, "kind": type(found).__name__, "unknown": unknown}


print(json.dumps([judge(file) for file in sys.argv[1:]]))  # noqa: T201 - the output of a script
