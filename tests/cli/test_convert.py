"""`preblock convert`: its files, and wrong arguments."""

import shutil
from pathlib import Path

import pytest

from preblock.cli.convert import convert
from preblock.export.layouts.conversion import LAYOUTS
from tests.cli.command_line import failing, run


@pytest.fixture
def copy(tiny_repository: Path, tmp_path: Path) -> Path:
    """The tiny repository, to change."""
    return shutil.copytree(tiny_repository, tmp_path / "repository")


def test_convert_prints_written_files(tiny_repository: Path, tmp_path: Path) -> None:
    done = run("convert", "gpt", "--layout", "openvino", "--output", tmp_path, "--repository", tiny_repository)
    names = ("openvino_text_embeddings_model.bin", "openvino_text_embeddings_model.xml")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == [str(tmp_path / name) for name in names]


def test_convert_to_triton_writes_config_into_repository(copy: Path) -> None:
    done = run("convert", "gpt", "--layout", "triton", "--repository", copy)
    assert (done.returncode, done.stdout) == (0, f"{copy / 'gpt' / 'config.pbtxt'}\n")


def test_convert_offers_every_layout() -> None:
    (option,) = [option for option in convert.params if option.name == "layout"]
    assert [*getattr(option.type, "choices")] == [*LAYOUTS, "triton"]  # noqa: B009 - no attribute of all types
    assert [name for name, layout in LAYOUTS.items() if layout.write_images] == ["ort-genai"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--layout", "openvino"], "--output: got nothing with openvino, expected a folder"),
        (
            ["--layout", "triton", "--output", "x"],
            "--output: got x with triton, expected nothing, as the file belongs beside the versions of the model",
        ),
        (
            ["--layout", "edgellm", "--output", "x", "--image-token-id", "3"],
            "--image-token-id: got 3 with edgellm, expected the layout ort-genai",
        ),
        (
            ["--layout", "triton", "--image-token-id", "3"],
            "--image-token-id: got 3 with triton, expected the layout ort-genai",
        ),
    ],
)
def test_convert_rejects_wrong_arguments(arguments: list[str], message: str, tiny_repository: Path) -> None:
    assert failing("convert", "gpt", *arguments, "--repository", tiny_repository, code=2).endswith(message)


def test_convert_rejects_unknown_model(tiny_repository: Path, tmp_path: Path) -> None:
    arguments = ["--layout", "openvino", "--output", str(tmp_path / "out"), "--repository", str(tiny_repository)]
    message = failing("convert", "gtp", *arguments, code=1)
    assert message == f"the repository {tiny_repository} has no model 'gtp'; did you mean gpt?"
    assert not (tmp_path / "out").exists()
