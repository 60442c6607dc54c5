"""`preblock list`, `inspect`, `remove`, `convert` and `families`, also for tables that lie outside."""

import hashlib
import json
import os
import re
import shutil
from pathlib import Path

import httpx

from preblock.export.progress import format_bytes
from preblock.export.publication import DRAFT
from preblock.models.checkpoints.family_lookup import known
from preblock.service.artifacts.manifest import Manifest
from tests.cli.command_line import failing, printed, run, run_installed
from tests.export.qwen4 import save_qwen4
from tests.support.artifacts import copy_artifact, make_repository
from tests.support.references import SHARD, make_referenced
from tests.support.servers import Server


def test_random_weights_of_preset_are_stated_everywhere(model_repository: Path, model_server: Server) -> None:
    at = "--repository", model_repository
    tables = printed("list", *at), printed("check", *at), model_server.banner
    listed = {model["name"]: model["random_weights"] for model in httpx.get(f"{model_server.address}/models").json()}
    for name, expected in {"gpt2-small": True, "minilm": False}.items():
        rows = [row for table in tables for row in table.splitlines() if row.strip().startswith(name)]
        told = ["random weights" in text for text in (*rows, printed("inspect", name, *at))]
        assert [listed[name], *told] == [expected] * 5


def paragraphs(page: str) -> dict[str, dict[str, str]]:
    """Return the rows of each part of a page by the title of the part."""
    found = {}
    for part in page.rstrip("\n").split("\n\n"):
        title, *rows = part.splitlines()
        found[title] = dict(re.split(r"  +", row.strip(), maxsplit=1) for row in rows)
    return found


def list_rows(repository: Path) -> list[list[str]]:
    return [re.split(r"  +", line) for line in printed("list", "--repository", repository).splitlines()]


def test_list_has_line_per_version(tiny_repository: Path) -> None:
    rows = list_rows(tiny_repository)
    assert rows[0] == ["NAME", "VERSION", "FAMILY", "SIZE", "PARITY"]
    assert [row[:3] for row in rows[1:]] == [["bert", "1", "bert"], ["bert", "2", "bert"], ["gpt", "1", "gpt2"]]
    assert all(re.fullmatch(r"[\d.]+ kB", row[3]) for row in rows[1:])
    assert rows[3][4] == "bit for bit equal on CPU"


def test_list_shows_state_of_each_damaged_version(copy: Path) -> None:
    (copy / "bert/1/parity.json").write_text('{"providers": {}}')
    (copy / "bert/2/manifest.json").write_text("{}")
    (copy / "gpt/1/model.onnx.data").unlink()
    (copy / "gpt/1/model.onnx.data").symlink_to("model.onnx.data")
    unproven, damaged, unreadable = list_rows(copy)[1:]
    assert unproven[-1] == "not proven"
    assert (damaged[2], damaged[4]) == ("damaged", "manifest.json family: got nothing, expected a value")
    assert unreadable[2:] == ["unreadable", "-", "too many levels of symbolic links"]


def test_path_outside_utf8_is_rejected(copy: Path) -> None:
    other = copy.rename(os.fsdecode(os.fsencode(copy) + b"\xff"))
    done = run_installed("check", "--repository", other)
    assert (done.returncode, done.stdout) == (1, "")
    expected = r"preblock: bert/1/model\.onnx: got the path '/.+, expected a path in UTF-8\n"
    assert re.fullmatch(expected, done.stderr), done.stderr


def test_inspect_shows_limits_outputs_weights_and_parity(tiny_repository: Path) -> None:
    page = paragraphs(printed("inspect", "gpt", "--repository", tiny_repository))
    folder = tiny_repository / "gpt" / "1"
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


def test_inspect_shows_details_of_every_model_kind(tmp_path: Path) -> None:
    cases = (
        ("vit", "Inputs", "pixel_values", "float32 (batch, 3, height, width)"),
        ("vit", "Weights", "parameters", "440"),
        ("llama", "Outputs", "rotary_cos", "rotation of queries and keys in attention, layout half"),
        ("llama", "Outputs", "embeddings", "also inputs_embeds or prompt_embeds of a model"),
        ("t5", "Outputs", "bias", "added in attention, from /bias"),
        ("t5", "Weights", "bias.weight", "24"),
        ("segments", "Inputs", "token_type_ids", "required"),
        ("counts-mask", "Inputs", "positions count", "tokens with attention_mask 1"),
        ("counts-ids", "Inputs", "positions count", "tokens with another id than"),
        ("ngrams", "Inputs", "context", "2 ids before each row, for ngram_embeddings; id 2 for a new row"),
        ("ngrams", "Outputs", "ngram_embeddings", "(batch, length, 2, 64): n-gram embeddings of some layers"),
        ("gpt", "Inputs", "offset + tokens", "at most 6, resized from 64"),
    )
    make_repository(tmp_path, **{artifact: artifact for artifact, *_ in cases})
    file = tmp_path / "gpt/1/manifest.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"resized": {"from_max_len": 64, "method": None}}))
    for artifact, part, row, text in cases:
        assert text in paragraphs(printed("inspect", artifact, "--repository", tmp_path))[part][row], artifact


def test_inspect_shows_requested_or_newest_version(tiny_repository: Path) -> None:
    for name, version in (("bert@1", 1), ("bert", 2)):
        assert printed("inspect", name, "--repository", tiny_repository).startswith(f"bert version {version}\n")


def test_inspect_as_json_has_manifest_and_parity(tiny_repository: Path) -> None:
    document = json.loads(printed("inspect", "gpt", "--json", "--repository", tiny_repository))
    folder = tiny_repository / "gpt" / "1"
    assert (document["name"], document["version"]) == ("gpt", 1)
    stored = Manifest.model_validate_json((folder / "manifest.json").read_bytes())
    assert Manifest.model_validate(document["manifest"]) == stored
    assert document["parity"] == json.loads((folder / "parity.json").read_text()) | {"storage": {}}


def test_unknown_model_or_version_is_named_with_known_ones(tiny_repository: Path, tmp_path: Path) -> None:
    output = "--output", str(tmp_path / "out.svg")
    writing = ["convert", "--layout", "openvino", *output], ["plot", "pca", *output]
    for command, *options in (["inspect"], ["verify"], ["remove"], *writing):
        for name, message in (
            ("bret", f"the repository {tiny_repository} has no model 'bret'; did you mean bert?"),
            ("nope", f"the repository {tiny_repository} has no model 'nope'; it has bert, gpt"),
            ("bert@3", "bert has no version 3; it has 1, 2"),
        ):
            told = failing(command, name, *options, "--repository", tiny_repository, code=1)
            assert told.endswith(message), command
    assert not list(tmp_path.iterdir())


def test_remove_with_version_deletes_only_it(copy: Path) -> None:
    assert run("convert", "bert@1", "--layout", "triton", "--repository", copy).returncode == 0
    assert printed("remove", "bert@2", "--yes", "--repository", copy) == "removed bert version 2\n"
    assert sorted(entry.name for entry in (copy / "bert").iterdir()) == ["1", "config.pbtxt"]
    assert "versions: [1]" in (copy / "bert" / "config.pbtxt").read_text()


def test_remove_without_version_deletes_all_versions(copy: Path) -> None:
    assert run("convert", "bert", "--layout", "triton", "--repository", copy).returncode == 0
    removed = printed("remove", "bert", "--yes", "--repository", copy)
    assert removed.splitlines() == ["removed bert version 1", "removed bert version 2"]
    assert [entry.name for entry in copy.iterdir()] == ["gpt"]


def test_remove_sweeps_the_draft_of_a_killed_verify(copy: Path) -> None:
    (copy / "gpt/1" / f"{DRAFT}{'0' * 16}").mkdir()
    assert printed("remove", "gpt", "--yes", "--repository", copy) == "removed gpt version 1\n"
    assert not (copy / "gpt").exists()


def test_remove_and_convert_keep_triton_config_of_user(copy: Path) -> None:
    file = copy / "bert" / "config.pbtxt"
    file.write_text('name: "bert"\n')
    message = failing("convert", "bert", "--layout", "triton", "--repository", copy, code=1)
    assert message == f"{file} exists, and was not written by preblock; remove it, or keep it as it is"
    printed("remove", "bert", "--yes", "--repository", copy)
    assert [(path.name, path.read_text()) for path in file.parent.iterdir()] == [(file.name, 'name: "bert"\n')]


def test_refused_remove_deletes_nothing(copy: Path, tmp_path: Path) -> None:
    run("convert", "bert", "--layout", "triton", "--repository", copy)
    # Only the configuration of Triton reads the version that stays, and it is damaged.
    (copy / "bert/1/manifest.json").write_text("{}")
    make_repository(copy, foreign="gpt", headless="gpt", linked="gpt")
    (copy / "foreign/1/notes.txt").touch()
    (copy / "headless/1/manifest.json").unlink()
    shutil.move(copy / "linked/1", tmp_path / "elsewhere")
    (copy / "linked/1").symlink_to(tmp_path / "elsewhere")
    before = {path: path.lstat().st_ino for path in tmp_path.rglob("*")}
    for name, message in (
        ("bert@2", "manifest.json family: "),
        ("foreign", f"{copy}/foreign/1 holds notes.txt, which is no file of the artifact, and stays"),
        ("headless", f"{copy}/headless/1 is not an artifact, and stays: manifest.json"),
        ("linked", f"{copy}/linked/1 is a link, not an artifact; remove the link yourself"),
    ):
        assert message in failing("remove", name, "--yes", "--repository", copy, code=1)
    unanswered = run("remove", "gpt", "--repository", copy)
    assert (unanswered.returncode, unanswered.stdout.splitlines()[-1][:30]) == (1, "Remove gpt version 1? [y/N]: ")
    assert unanswered.stderr == "preblock: nothing was removed; --yes removes without asking\n"
    assert {path: path.lstat().st_ino for path in tmp_path.rglob("*")} == before


def test_families_lists_presets_and_every_model_type() -> None:
    presets, table = printed("families").split("\n\n")
    assert presets == "Presets with random weights, to try without a checkpoint: gpt2-small, transformer-base"
    rows = table.splitlines()
    assert {row.split()[0] for row in rows[1:]} == set(known())
    for row in (r"bert +tokens segments positions norm", r"gptj +tokens \(--segments\) +rotary"):
        assert any(re.fullmatch(row, line) for line in rows), row
    assert any(re.fullmatch(r"t5 +encoder +tokens +bias", row) for row in rows)


def test_inspect_for_consumer_names_output(tmp_path: Path) -> None:
    make_repository(tmp_path, m="gemma", plain="gpt")
    told = printed("inspect", "m", "--for", "vllm", "--repository", tmp_path)
    rows = [re.split(r"  +", line) for line in told.splitlines()]
    assert [row[:2] for row in rows] == [
        ["vllm >=0.18", "token_embeddings"],
        ["vllm <0.18", "unscaled_token_embeddings"],
    ]
    assert "vllm applies it" in rows[1][2]
    plain = printed("inspect", "plain", "--for", "llama.cpp", "--repository", tmp_path)
    assert plain == "every version: token_embeddings; the model has no embedding scale\n"


def test_inspect_for_unusable_consumer_is_rejected(tmp_path: Path) -> None:
    copy_artifact("gemma", tmp_path, "m")
    copy_artifact("vit", tmp_path, "image")
    unknown = "unknown whether openvino-genai scales the inputs_embeds of a gemma, by 2.5"
    for name, options, code, message in (
        ("m", ["openvino-genai"], 1, unknown),
        ("image", ["vllm"], 1, "has no token embeddings"),
        ("m", ["vllm", "--json"], 2, "exclude each other"),
        ("m", ["trt"], 2, "'trt'"),
    ):
        assert message in failing("inspect", name, "--for", *options, "--repository", tmp_path, code=code)


def test_convert_prints_written_files(tiny_repository: Path, tmp_path: Path) -> None:
    copy, output = shutil.copytree(tiny_repository, tmp_path / "repository"), tmp_path / "output"
    told = printed("convert", "gpt", "--layout", "openvino", "--output", output, "--repository", copy)
    names = ("openvino_text_embeddings_model.bin", "openvino_text_embeddings_model.xml")
    assert told.splitlines() == [str(output / name) for name in names]
    assert printed("convert", "gpt", "--layout", "triton", "--repository", copy) == f"{copy}/gpt/config.pbtxt\n"


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
        told = failing("convert", "gpt", "--layout", layout, *options, "--repository", tiny_repository, code=2)
        assert told.endswith(message)


def test_check_needs_the_folder_of_the_tables(tmp_path: Path) -> None:
    root, shard = tmp_path / "repository", tmp_path / "checkpoint" / SHARD
    make_referenced(root, shard.parent)
    outside = f"ngrams/1/references {shard} is outside the folders of the setting reference_roots: "
    assert failing("check", "--repository", root, code=1) == f"{outside}no folder"
    assert run("check", "--repository", root, "--reference-roots", tmp_path).stdout.startswith("ngrams 1: runs on CPU")


def test_export_and_verify_name_the_files(tmp_path: Path) -> None:
    folder, root = save_qwen4(tmp_path / "model"), tmp_path / "repository"
    exported = run("export", folder, "--name", "m", "--repository", root, "--reference").stdout
    assert "  refers to 1 files of " in exported
    assert exported.endswith(f"preblock serve --repository {root} --reference-roots {folder}\n")
    page = run("inspect", "m", "--repository", root).stdout
    assert "checked: headers, not yet by verify" in page
    assert "  ngrams.tables.1.weight" in page
    assert str(folder / "model.safetensors") in page
    refused = run("verify", "m", "--repository", root)
    assert (refused.returncode, refused.stdout) == (1, "")
    assert refused.stderr.endswith("reference_roots: no folder\n")
    verified = run("verify", "m", "--repository", root, "--reference-roots", folder).stdout
    assert "1 referenced files hashed" in verified
    assert "checked: whole files" in run("inspect", "m", "--repository", root).stdout
