"""`preblock convert`: its files, and wrong arguments."""

import shutil
from pathlib import Path

from preblock.cli.convert import convert
from preblock.export.layouts.conversion import LAYOUTS
from tests.cli.command_line import failing, printed


def test_convert_prints_written_files(tiny_repository: Path, tmp_path: Path) -> None:
    copy, output = shutil.copytree(tiny_repository, tmp_path / "repository"), tmp_path / "output"
    told = printed("convert", "gpt", "--layout", "openvino", "--output", output, "--repository", copy)
    names = ("openvino_text_embeddings_model.bin", "openvino_text_embeddings_model.xml")
    assert told.splitlines() == [str(output / name) for name in names]
    assert printed("convert", "gpt", "--layout", "triton", "--repository", copy) == f"{copy}/gpt/config.pbtxt\n"


def test_convert_offers_every_layout() -> None:
    (option,) = [option for option in convert.params if option.name == "layout"]
    assert [*getattr(option.type, "choices")] == [*LAYOUTS, "triton"]  # noqa: B009 - no attribute of all types
    assert [name for name, layout in LAYOUTS.items() if layout.write_images] == ["ort-genai"]


def test_convert_rejects_wrong_arguments(tiny_repository: Path) -> None:
    image = ["--image-token-id", "3"]
    for layout, options, message in (
        ("openvino", [], "--output: got nothing with openvino, expected a folder"),
        (
            "triton",
            ["--output", "x"],
            "--output: got x with triton, expected nothing, as the file belongs beside the versions of the model",
        ),
        ("edgellm", ["--output", "x", *image], "--image-token-id: got 3 with edgellm, expected the layout ort-genai"),
        ("triton", image, "--image-token-id: got 3 with triton, expected the layout ort-genai"),
    ):
        arguments = ("convert", "gpt", "--layout", layout, *options, "--repository", tiny_repository)
        assert failing(*arguments, code=2).endswith(message)
