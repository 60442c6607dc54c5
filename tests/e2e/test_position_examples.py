"""The guide to positions, and the examples of positions and modules."""

import re
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from tests.e2e.test_examples import load
from tests.support.paths import ROOT

EXAMPLES = ROOT / "examples"
SHORT = """

class Short(nn.Embedding):
    def __init__(self, width):
        super().__init__(20, width)

    def forward(self, x):
        return x + super().forward(torch.arange(x.shape[1]))
"""
"""A module for too few positions."""
GUIDE = (ROOT / "docs/positions.md").read_text(encoding="utf-8")


def test_guide_states_parameter_shares() -> None:
    for max_len, share in ((512, "1.6%"), (2048, "6.0%")):
        assert f"{100 * max_len * 768 / ((32000 + max_len) * 768):.1f}%" == share
        assert share in GUIDE


def test_position_experiment_learns_order_and_ends_at_table(tmp_path: Path) -> None:
    experiment = load(EXAMPLES / "choose_positions.py")
    found = experiment.run(400, {kind: experiment.KINDS[kind] for kind in ("none", "learned", "ALiBi")})
    trained = experiment.TESTED_LENGTHS.index(experiment.TRAINED_LENGTH)
    assert 0.4 < found["none"][trained] < 0.6
    assert found["learned"][trained] > 0.9
    assert found["ALiBi"][trained] > 0.9
    assert found["learned"][trained + 1 :] == [None] * (len(experiment.TESTED_LENGTHS) - trained - 1)
    assert None not in found["ALiBi"]
    pictures = [tmp_path / "first.svg", tmp_path / "second.svg"]
    for picture in pictures:
        experiment.save(experiment.plot(found), picture)
    assert pictures[0].read_bytes() == pictures[1].read_bytes()


def test_experiment_compares_encoding_of_the_guide(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    experiment = load(EXAMPLES / "choose_positions.py")
    (code,) = re.findall(r"^```python\n(# mine\.py\n.*?)^```$", GUIDE, re.MULTILINE | re.DOTALL)
    (tmp_path / "mine.py").write_text(code)
    (command,) = re.findall(r"^\.venv/bin/python (examples/choose_positions\.py --encoding .*)$", GUIDE, re.MULTILINE)
    assert command.endswith(" mine.py:Ramp")
    picture = tmp_path / "positions.png"
    experiment.main(["--steps", "1", "-o", str(picture), "--encoding", f"{tmp_path}/mine.py:Ramp"])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[:-1]] == ["tokens", *experiment.KINDS, "Ramp"]
    assert lines[2].split()[3:] == ["refused"] * 4
    assert picture.is_file()
    with (tmp_path / "mine.py").open("a") as file:
        file.write(SHORT)
    for option, value, message in (
        ("--steps", "0", "expected 1 or more"),
        ("-o", "a.gif", "a.gif"),
        ("--encoding", "mine.py", "got mine.py, expected FILE:CLASS"),
        ("--encoding", "mine.py:Ramp", "there is no file mine.py"),
        ("--encoding", f"{tmp_path}/mine.py:Slope", "mine.py has no nn.Module Slope"),
        ("--encoding", f"{tmp_path}/mine.py:Short", "Short(32) fails for vectors (2, 24, 32): IndexError"),
    ):
        with pytest.raises(SystemExit) as ended:
            experiment.main([option, value])
        assert message in f"{ended.value.code} {capsys.readouterr().err}"


def test_module_example_artifact_matches_module(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    example = load(EXAMPLES / "module_to_vectors.py")
    example.main(["--repository", str(tmp_path)])
    example.main(["--repository", str(tmp_path)])
    assert [path.name for path in sorted((tmp_path / "mine").iterdir())] == ["1", "2"]
    assert capsys.readouterr().out.count("The artifact gives the bits of the module.") == 2


def test_position_comparison_matches_numpy_cosines(
    model_repository: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    example = load(EXAMPLES / "compare_positions.py")
    example.main(["--repository", str(model_repository), "-o", str(tmp_path / "both.svg")])
    _, learned, sinusoids, _ = capsys.readouterr().out.splitlines()
    graph = onnx.load(model_repository / "minilm" / "1" / "model.onnx")
    (table,) = (values for values in map(numpy_helper.to_array, graph.graph.initializer) if values.shape == (512, 384))
    angles = np.arange(128)[:, None] / 10000 ** (np.arange(0, 384, 2) / 384)
    for line, rows in ((learned, table[:128]), (sinusoids, np.hstack([np.sin(angles), np.cos(angles)]))):
        unit = rows / np.linalg.norm(rows, axis=1, keepdims=True)
        expected = [np.diag(unit @ unit.T, distance).mean() for distance in example.DISTANCES]
        assert np.allclose(list(map(float, line.split()[1:])), expected, atol=1e-3)
    assert (tmp_path / "both.svg").is_file()
    for option, value, message in (("--model", "gpt9", "--model: "), ("-o", "both.gif", "both.gif")):
        with pytest.raises(SystemExit) as ended:
            example.main(["--repository", str(model_repository), option, value])
        assert message in str(ended.value.code)
