"""`preblock list`, `inspect`, `remove` and `families`."""

import hashlib
import json
import os
import re
import shutil
from pathlib import Path

import httpx
import pytest

from preblock.export.progress import format_bytes
from preblock.models.checkpoints.family_lookup import known
from preblock.service.artifacts.manifest import Manifest
from tests.cli.command_line import failing, run, run_installed
from tests.support.artifacts import copy_artifact
from tests.support.servers import Server


@pytest.fixture
def copy(tiny_repository: Path, tmp_path: Path) -> Path:
    """The tiny repository, to change."""
    return shutil.copytree(tiny_repository, tmp_path / "repository")


def test_random_weights_of_preset_are_stated_everywhere(model_repository: Path, model_server: Server) -> None:
    def random(line: str) -> bool:
        return "random weights" in line

    rows = {line.split()[0]: random(line) for line in run("list", "--repository", model_repository).stdout.splitlines()}
    printed = {line.split(":")[0].strip(): random(line) for line in model_server.banner.splitlines() if "width" in line}
    checked = run("check", "--repository", model_repository).stdout
    listed = {model["name"]: model["random_weights"] for model in httpx.get(f"{model_server.address}/models").json()}
    expected = {"gpt2-small": True, "minilm": False, "transformer-base": True, "wordllama": False}
    assert printed == listed == {name: rows[name] for name in expected} == expected
    for name, is_random in expected.items():
        assert httpx.get(f"{model_server.address}/models/{name}").json()["random_weights"] is is_random
        page = run("inspect", name, "--repository", model_repository).stdout
        assert random(page) is random(next(line for line in checked.splitlines() if name in line)) is is_random


def paragraphs(page: str) -> dict[str, dict[str, str]]:
    """Return the rows of each part of a page by the title of the part."""
    found = {}
    for part in page.rstrip("\n").split("\n\n"):
        title, *rows = part.splitlines()
        found[title] = dict(re.split(r"  +", row.strip(), maxsplit=1) for row in rows)
    return found


def test_list_has_line_per_version(tiny_repository: Path) -> None:
    done = run("list", "--repository", tiny_repository)
    assert (done.returncode, done.stderr) == (0, "")
    rows = [re.split(r"  +", line) for line in done.stdout.splitlines()]
    assert rows[0] == ["NAME", "VERSION", "FAMILY", "SIZE", "PARITY"]
    assert [row[:3] for row in rows[1:]] == [["bert", "1", "bert"], ["bert", "2", "bert"], ["gpt", "1", "gpt2"]]
    assert all(re.fullmatch(r"[\d.]+ kB", row[3]) for row in rows[1:])
    assert rows[3][4] == "bit for bit equal on CPU"


def test_list_shows_error_of_damaged_artifact(copy: Path) -> None:
    (copy / "bert" / "2" / "manifest.json").write_text("{}")
    rows = run("list", "--repository", copy).stdout.splitlines()
    assert re.match(r"bert +2 +damaged +[\d.]+ kB +manifest.json family: got nothing, expected a value", rows[2])
    assert rows[3].startswith("gpt")


def test_list_shows_error_of_unreadable_artifact(copy: Path) -> None:
    (copy / "gpt/1/model.onnx.data").unlink()
    (copy / "gpt/1/model.onnx.data").symlink_to("model.onnx.data")
    done = run("list", "--repository", copy)
    assert done.returncode == 0
    assert re.split(r"  +", done.stdout.splitlines()[3])[2:] == ["unreadable", "-", "too many levels of symbolic links"]


def test_missing_data_file_is_named(copy: Path) -> None:
    file = copy / "gpt/1/model.onnx.data"
    file.unlink()
    assert failing("inspect", "gpt", "--repository", copy, code=1) == f"{file}: no such file or directory"


def test_path_outside_utf8_is_rejected(copy: Path) -> None:
    other = copy.rename(os.fsdecode(os.fsencode(copy) + b"\xff"))
    done = run_installed("check", "--repository", other)
    assert (done.returncode, done.stdout) == (1, "")
    expected = r"preblock: bert/1/model\.onnx: got the path '/.+, expected a path in UTF-8\n"
    assert re.fullmatch(expected, done.stderr), done.stderr


def test_inspect_shows_limits_outputs_weights_and_parity(tiny_repository: Path) -> None:
    done = run("inspect", "gpt", "--repository", tiny_repository)
    assert (done.returncode, done.stderr) == (0, "")
    title, page = done.stdout.split("\n\n", 1)[0], paragraphs(done.stdout)
    folder = tiny_repository / "gpt" / "1"
    assert title.startswith("gpt version 1")
    canonical = json.dumps(json.loads((folder / "manifest.json").read_text()), sort_keys=True, separators=(",", ":"))
    assert page["gpt version 1"]["identity"] == hashlib.sha256(canonical.encode()).hexdigest()
    assert page["Inputs"] == {"input_ids": "0 to 6", "offset + tokens": "at most 6"}
    assert page["Outputs"] == {
        "embeddings": "(batch, length, 4): the input of block 0; not inputs_embeds: the model would apply its "
        "front-end twice",
        "token_embeddings": "(batch, length, 4): inputs_embeds or prompt_embeds of a model",
    }
    weights = page["Weights"]
    assert (weights["parameters"], weights["tokens.weight"], weights["positions.weight"]) == ("52", "28", "24")
    assert weights["memory"].startswith(format_bytes((folder / "model.onnx.data").stat().st_size))
    parity = page["Parity with a reference"]
    assert re.fullmatch(r"torch \d.*", parity["reference on CPUExecutionProvider"])
    assert re.fullmatch(r"\d+ cases bit for bit equal", parity["embeddings on CPUExecutionProvider"])
    assert page["Files"].keys() == {entry.name for entry in folder.iterdir()}


def test_inspect_shows_resized_limit_without_method(copy: Path) -> None:
    file = copy / "gpt" / "1" / "manifest.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"resized": {"from_max_len": 64, "method": None}}))
    page = paragraphs(run("inspect", "gpt", "--repository", copy).stdout)
    assert page["Inputs"]["offset + tokens"] == "at most 6, resized from 64"


def test_list_without_parity_cases_shows_not_proven(copy: Path) -> None:
    (copy / "gpt" / "1" / "parity.json").write_text('{"providers": {}}')
    assert run("list", "--repository", copy).stdout.splitlines()[3].endswith("  not proven")


@pytest.mark.parametrize("name", ["manifest.json", "parity.json", "model.onnx"])
def test_inspect_of_broken_artifact_names_file(copy: Path, name: str) -> None:
    (copy / "gpt" / "1" / name).write_text("garbage")
    assert failing("inspect", "gpt", "--repository", copy, code=1).startswith(name)


def test_inspect_of_manifest_without_output_names_it(copy: Path) -> None:
    file = copy / "gpt" / "1" / "manifest.json"
    manifest = json.loads(file.read_text())
    del manifest["graphs"]["token.onnx"]
    file.write_text(json.dumps(manifest))
    message = failing("inspect", "gpt", "--repository", copy, code=1)
    assert message == "manifest.json graphs: got embeddings, expected also token_embeddings"


def test_inspect_shows_the_context_of_ngrams(tmp_path: Path) -> None:
    copy_artifact("ngrams", tmp_path)
    page = paragraphs(run("inspect", "ngrams", "--repository", tmp_path).stdout)
    assert page["Inputs"]["context"] == "2 ids before each row, for ngram_embeddings; id 2 for a new row"
    assert page["Outputs"]["ngram_embeddings"].startswith("(batch, length, 2, 64): n-gram embeddings of some layers")


def test_inspect_shows_requested_or_newest_version(tiny_repository: Path) -> None:
    assert run("inspect", "bert@1", "--repository", tiny_repository).stdout.startswith("bert version 1\n")
    assert run("inspect", "bert", "--repository", tiny_repository).stdout.startswith("bert version 2\n")


def test_inspect_as_json_has_manifest_and_parity(tiny_repository: Path) -> None:
    document = json.loads(run("inspect", "gpt", "--json", "--repository", tiny_repository).stdout)
    folder = tiny_repository / "gpt" / "1"
    assert (document["name"], document["version"]) == ("gpt", 1)
    stored = Manifest.model_validate_json((folder / "manifest.json").read_bytes())
    assert Manifest.model_validate(document["manifest"]) == stored
    assert document["parity"] == json.loads((folder / "parity.json").read_text()) | {"storage": {}}


@pytest.mark.parametrize(
    ("artifact", "part", "row", "text"),
    [
        ("vit", "Inputs", "pixel_values", "float32 (batch, 3, height, width)"),
        ("vit", "Weights", "parameters", "440"),
        ("llama", "Outputs", "rotary_cos", "rotation of queries and keys in attention, layout half"),
        ("llama", "Outputs", "embeddings", "also inputs_embeds or prompt_embeds of a model"),
        ("t5", "Outputs", "bias", "added in attention, from /bias"),
        ("t5", "Weights", "bias.weight", "24"),
        ("segments", "Inputs", "token_type_ids", "required"),
        ("counts-mask", "Inputs", "positions count", "tokens with attention_mask 1"),
        ("counts-ids", "Inputs", "positions count", "tokens with another id than"),
    ],
)
def test_inspect_shows_details_of_every_model_kind(
    artifact: str, part: str, row: str, text: str, tmp_path: Path
) -> None:
    copy_artifact(artifact, tmp_path, "m")
    assert text in paragraphs(run("inspect", "m", "--repository", tmp_path).stdout)[part][row]


def test_unknown_version_fails_and_lists_known_versions(tiny_repository: Path) -> None:
    for command in ("inspect", "verify", "remove"):
        message = failing(command, "bert@3", "--repository", tiny_repository, code=1)
        assert message == "bert has no version 3; it has 1, 2"


def test_misspelt_model_name_gets_suggestion(tiny_repository: Path) -> None:
    message = failing("inspect", "bret", "--repository", tiny_repository, code=1)
    assert message == f"the repository {tiny_repository} has no model 'bret'; did you mean bert?"


def test_remove_with_version_deletes_only_it(copy: Path) -> None:
    done = run("remove", "bert@1", "--yes", "--repository", copy)
    assert (done.returncode, done.stdout, done.stderr) == (0, "removed bert version 1\n", "")
    assert [entry.name for entry in (copy / "bert").iterdir()] == ["2"]


def test_remove_without_version_deletes_all_versions(copy: Path) -> None:
    assert run("convert", "bert", "--layout", "triton", "--repository", copy).returncode == 0
    done = run("remove", "bert", "--yes", "--repository", copy)
    assert done.stdout.splitlines() == ["removed bert version 1", "removed bert version 2"]
    assert [entry.name for entry in copy.iterdir()] == ["gpt"]


def test_remove_updates_triton_config(copy: Path) -> None:
    assert run("convert", "bert@1", "--layout", "triton", "--repository", copy).returncode == 0
    assert run("remove", "bert@2", "--yes", "--repository", copy).returncode == 0
    assert "versions: [1]" in (copy / "bert" / "config.pbtxt").read_text()


def test_failed_remove_deletes_nothing(copy: Path) -> None:
    """Only the configuration of Triton reads the version that stays, and it is damaged."""
    assert run("convert", "bert", "--layout", "triton", "--repository", copy).returncode == 0
    (copy / "bert" / "1" / "manifest.json").write_text("{}")
    before = {path: path.stat().st_ino for path in copy.rglob("*")}
    assert "manifest.json" in failing("remove", "bert@2", "--yes", "--repository", copy, code=1)
    assert {path: path.stat().st_ino for path in copy.rglob("*")} == before


def test_remove_and_convert_keep_triton_config_of_user(copy: Path) -> None:
    file = copy / "bert" / "config.pbtxt"
    file.write_text('name: "bert"\n')
    message = failing("convert", "bert", "--layout", "triton", "--repository", copy, code=1)
    assert message == f"{file} exists, and was not written by preblock; remove it, or keep it as it is"
    assert run("remove", "bert", "--yes", "--repository", copy).returncode == 0
    assert [(path.name, path.read_text()) for path in file.parent.iterdir()] == [(file.name, 'name: "bert"\n')]


def test_remove_without_confirmation_deletes_nothing(copy: Path) -> None:
    done = run("remove", "bert", "--repository", copy)  # nobody answers
    assert done.returncode == 1
    assert done.stdout.splitlines()[-1].startswith("Remove bert versions 1, 2? [y/N]")
    assert done.stderr == "preblock: nothing was removed; --yes removes without asking\n"
    assert (copy / "bert" / "1").is_dir()


def test_remove_keeps_folder_with_foreign_files(copy: Path) -> None:
    (copy / "bert" / "2" / "notes.txt").touch()
    message = failing("remove", "bert", "--yes", "--repository", copy, code=1)
    assert message == f"{copy / 'bert' / '2'} holds notes.txt, which is no file of the artifact, and stays"
    assert (copy / "bert" / "1" / "manifest.json").is_file()  # nothing was removed before the check


def test_remove_keeps_folder_without_manifest(copy: Path) -> None:
    (copy / "gpt" / "1" / "manifest.json").unlink()
    message = failing("remove", "gpt", "--yes", "--repository", copy, code=1)
    assert message.startswith(f"{copy / 'gpt' / '1'} is not an artifact, and stays: manifest.json")


def test_remove_rejects_symlink_and_keeps_target(copy: Path, tmp_path: Path) -> None:
    shutil.move(copy / "gpt" / "1", tmp_path / "elsewhere")
    (copy / "gpt" / "1").symlink_to(tmp_path / "elsewhere")
    message = failing("remove", "gpt", "--yes", "--repository", copy, code=1)
    assert message == f"{copy / 'gpt' / '1'} is a link, not an artifact; remove the link yourself"
    assert (tmp_path / "elsewhere" / "manifest.json").is_file()


def test_families_lists_presets_and_every_model_type() -> None:
    done = run("families")
    assert (done.returncode, done.stderr) == (0, "")
    presets, table = done.stdout.split("\n\n")
    assert presets == "Presets with random weights, to try without a checkpoint: gpt2-small, transformer-base"
    rows = table.splitlines()
    assert {row.split()[0] for row in rows[1:]} == set(known())
    assert any(re.fullmatch(r"bert +tokens segments positions norm", row) for row in rows)
    assert any(re.fullmatch(r"gptj +tokens \(--segments\) +rotary", row) for row in rows)
    assert any(re.fullmatch(r"t5 +encoder +tokens +bias", row) for row in rows)


def test_inspect_for_consumer_names_output(tmp_path: Path) -> None:
    copy_artifact("gemma", tmp_path, "m")
    copy_artifact("gpt", tmp_path, "plain")
    rows = [
        re.split(r"  +", line)
        for line in run("inspect", "m", "--for", "vllm", "--repository", tmp_path).stdout.splitlines()
    ]
    assert [row[:2] for row in rows] == [
        ["vllm >=0.18", "token_embeddings"],
        ["vllm <0.18", "unscaled_token_embeddings"],
    ]
    assert "vllm applies it" in rows[1][2]
    plain = run("inspect", "plain", "--for", "llama.cpp", "--repository", tmp_path).stdout
    assert plain == "every version: token_embeddings; the model has no embedding scale\n"


def test_inspect_for_unusable_consumer_is_rejected(tmp_path: Path) -> None:
    copy_artifact("gemma", tmp_path, "m")
    copy_artifact("vit", tmp_path, "image")
    at = "--repository", tmp_path
    message = failing("inspect", "m", "--for", "openvino-genai", *at, code=1)
    assert "unknown whether openvino-genai scales the inputs_embeds of a gemma, by 2.5" in message
    assert "has no token embeddings" in failing("inspect", "image", "--for", "vllm", *at, code=1)
    assert "exclude each other" in failing("inspect", "m", "--for", "vllm", "--json", *at, code=2)
    assert "'trt'" in failing("inspect", "m", "--for", "trt", *at, code=2)
