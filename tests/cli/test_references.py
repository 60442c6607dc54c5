"""Commands on artifacts with tables outside."""

from pathlib import Path

from tests.cli.command_line import failing, run
from tests.export.qwen4 import save_qwen4
from tests.support.references import SHARD, make_referenced


def test_check_needs_the_folder_of_the_tables(tmp_path: Path) -> None:
    root, shard = tmp_path / "repository", tmp_path / "checkpoint" / SHARD
    make_referenced(root, shard.parent)
    outside = f"ngrams/1/references {shard} is outside the folders of the setting reference_roots: "
    assert failing("check", "--repository", root, code=1) == f"{outside}no folder"
    roots = str(tmp_path / "other")
    assert failing("check", "--repository", root, code=1, PREBLOCK_REFERENCE_ROOTS=roots) == f"{outside}{roots}"
    assert failing("check", "--repository", root, "--reference-roots", "here", code=2).startswith(
        "--reference-roots: got here, expected comma-separated absolute folders"
    )
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
