"""Importers of third-party packages, and completeness of the documents. Directions: import-linter."""

import ast
import re
import subprocess
import sys
import tomllib
from collections import defaultdict
from collections.abc import Iterator
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.support.paths import ROOT

# Third-party packages, each with its importers.
HOMES = {
    "torch": ("models", "export", "client", "plots"),
    "safetensors": ("models", "export"),
    "onnx": ("export",),
    "huggingface_hub": ("export",),
    "onnxruntime": ("service.runtime",),
    "tokenizers": ("service.runtime", "export"),
    "fastapi": ("service.api", "service.app", "service.server"),
    "fastapi_offline": ("service.app",),
    "starlette": ("service.api", "service.server"),
    "uvicorn": ("service.server",),
    "uvloop": ("service.server", "bench"),
    "httptools": ("service.server", "bench"),
    "grpc": ("service.api.grpc", "bench"),
    "grpc_health": ("service.api.grpc",),
    "grpc_reflection": ("service.api.grpc",),
    "google": ("service.codecs", "service.artifacts", "export"),
    "opentelemetry": ("service.observability",),
    "orjson": ("service.codecs", "service.api", "bench"),
    "prometheus_client": ("service.observability", "service.runtime"),
    "click": ("cli",),
    "httpx": ("client", "bench"),
    "matplotlib": ("plots",),
    "websockets": ("client", "service.server", "bench"),
}
# Imports of a package inside functions only, and the exceptions.
WHEN_NEEDED: dict[str, dict[str, tuple[str, ...]]] = {
    "plots": {"torch": (), "preblock.models": ()},
    "bench": {"grpc": (), "preblock.service": ()},
    "client": {"torch": (), "ml_dtypes": (), "websockets": ("client.sockets",), "preblock.client.sockets": ()},
}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
# Extras whose packages a package may import, besides the packages of the base install; of others `service`.
EXTRAS_OF = {
    "client": (),
    "models": ("export", "torch"),
    "export": ("service", "export", "torch", "discover"),
    "service": ("service", "cpu", "tracing"),
    "plots": ("service", "plot", "torch"),
}
# Imports that the client makes only for a caller who has the package.
OPTIONAL = {("client.results", "torch"), ("client.results", "ml_dtypes")}
# Tests of code that needs no torch, and a run of pytest that cannot import it.
WITHOUT_TORCH = (
    "tests/service",
    "tests/client",
    "tests/bench",
    "tests/cli/test_serve_command.py",
    "tests/cli/test_help.py",
)
COLLECT = """
import sys
import pytest
sys.modules["torch"] = sys.modules["transformers"] = None
sys.exit(pytest.main(["-n0", "-q", "--collect-only", "-p", "no:cacheprovider", *sys.argv[1:]]))
"""
FILES = sorted(
    file
    for folder in ("models", "export", "service", "preblock")
    for file in (ROOT / folder).rglob("*.py")
    if file.name != "__init__.py"
)


def module_of(file: Path) -> str:
    return ".".join(file.relative_to(ROOT).with_suffix("").parts).removeprefix("preblock.")


def imports_of(file: Path) -> Iterator[tuple[str, bool]]:
    """Yield every imported module of `file`, and whether the import is at the top level."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    top = set(tree.body)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node in top) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file} imports relatively"
            # `from package import module` names the module; `from module import name` is found by its prefix.
            yield from ((f"{node.module}.{alias.name}", node in top) for alias in node.names)


@pytest.mark.parametrize("file", FILES, ids=module_of)
def test_packages_are_imported_in_their_homes_and_late(file: Path) -> None:
    module = module_of(file)
    late = WHEN_NEEDED.get(module.partition(".")[0], {})
    for name, at_once in imports_of(file):
        homes = HOMES.get(name.partition(".")[0], ("",))
        assert any(home == "" or f"{module}.".startswith(f"{home}.") for home in homes), f"{name} belongs to {homes}"
        package = next((package for package in late if f"{name}.".startswith(f"{package}.")), None)
        assert package is None or not at_once or module in late[package], f"{file} imports {name} at once"


def test_document_lists_every_error_kind() -> None:
    from preblock.service.core import errors

    document = (ROOT / "docs/http.md").read_text(encoding="utf-8")
    kinds = [kind.__name__ for parent in (errors.ClientFault, errors.ServerFault) for kind in parent.__subclasses__()]
    assert [kind for kind in kinds if f"| `{kind}` |" not in document] == []


def test_imported_packages_are_declared_in_extras() -> None:
    """A package that only another one requires may go away with its next version."""
    declared = {
        extra: {
            canonicalize_name(requirement.name)
            for requirement in map(Requirement, PROJECT["optional-dependencies"].get(extra, PROJECT["dependencies"]))
        }
        for extra in ("client", "service", "cpu", "export", "torch", "discover", "plot", "tracing")
    }
    distributions = packages_distributions()
    missing = set()
    for file in FILES:
        extras = EXTRAS_OF.get(module_of(file).partition(".")[0], ("service",))
        known = set.union(declared["client"], *(declared[extra] for extra in extras))
        for name in {name.partition(".")[0] for name, _ in imports_of(file)} - {"preblock", *sys.stdlib_module_names}:
            if known.isdisjoint(map(canonicalize_name, distributions[name])):
                missing.add((module_of(file), name))
    assert missing == OPTIONAL


def test_every_dependency_has_a_reason() -> None:
    page = (ROOT / "docs/dependencies.md").read_text(encoding="utf-8")
    reasons = dict(re.findall(r"^\| [^|]+ \| ([^|]+) \| (.+) \|$", page, re.MULTILINE))
    extras = (PROJECT["dependencies"], *PROJECT["optional-dependencies"].values())
    assert {re.split("[<>=;]", requirement)[0] for requirements in extras for requirement in requirements} <= {*reasons}


def test_fixture_of_several_modules_is_defined_once() -> None:
    """A second fixture of the same name would hide the first one below its folder."""
    found: dict[str, list[Path]] = defaultdict(list)
    for file in (ROOT / "tests").rglob("[a-z]*.py"):
        if "node_modules" not in file.parts:
            for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
                if isinstance(node, ast.FunctionDef) and "pytest.fixture" in map(decorator_of, node.decorator_list):
                    found[node.name].append(file.relative_to(ROOT))
    for name, files in found.items():
        assert len(files) == 1 or not any(file.stem in ("conftest", "fixtures") for file in files), (name, files)


def decorator_of(node: ast.expr) -> str:
    return ast.unparse(node.func if isinstance(node, ast.Call) else node)


def test_tests_of_service_and_client_need_no_torch() -> None:
    command = [sys.executable, "-c", COLLECT, *WITHOUT_TORCH]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:]


def test_front_ends_as_data_need_no_torch() -> None:
    names = ("config", "families", "frontend_data", "presets", "sinusoid_tables")
    imports = ", ".join(f"preblock.models.{name}" for name in names)
    script = f"import sys, {imports}; print({{'torch', 'transformers'}} & sys.modules.keys())"
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("set()\n", "")


MAX_LINES, MAX_POSITIONAL = 50, 7
MANY_ARGUMENTS = {
    "preblock.cli": "options of click",
    "preblock.models.embeddings": "constructors of modules",
    "preblock.service.runtime.repository": "a constructor",
    "preblock.service.api.http.dispatcher": "a constructor",
    "preblock.export.exporter": "the public function",
    "preblock.models.checkpoints.reader": "the public function",
    "preblock.models.checkpoints.step_tensors": "what a checkpoint may hold",
}
"""Modules with a function of more positional parameters, and why."""


def test_functions_are_short_and_take_few_arguments() -> None:
    for file in FILES:
        module = f"preblock.{module_of(file)}"
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                first = node.body[1] if ast.get_docstring(node) and len(node.body) > 1 else node.body[0]
                assert (node.end_lineno or 0) - first.lineno < MAX_LINES, (module, node.name)
                names = [argument.arg for argument in (*node.args.posonlyargs, *node.args.args)]
                allowed = MAX_POSITIONAL + (names[:1] in (["self"], ["cls"]))
                assert len(names) <= allowed or module.startswith(tuple(MANY_ARGUMENTS)), (module, node.name)
