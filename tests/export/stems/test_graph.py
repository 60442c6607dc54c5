"""The graph of a stem, in onnxruntime alone, and its proof."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from preblock.export.errors import ParityError
from preblock.export.stems.graph import allowed_ulp, export_stem, prove_stem, read_stem_weights
from preblock.models.modules.stems import AudioConfig, AudioStem, PatchConfig, PatchStem, Stem, from_tensors
from preblock.service.artifacts.parity import ParityCase
from preblock.service.runtime.session import Session
from tests.clients.client_matrix import check_standard
from tests.support.shared import Shared

D = 8


def filled(stem: Stem) -> Stem:
    """Give all parameters the same magnitude, so that an error in any is visible."""
    torch.manual_seed(3)
    for parameter in stem.parameters():
        nn.init.normal_(parameter)
    return stem.eval()


STEMS: dict[str, Stem] = {
    # 13 = 3 patches of 4 and a remainder.
    "vit": filled(PatchStem(PatchConfig(family="vit", width=D, channels=3, image_size=13, patch_size=4))),
    "clip": filled(
        PatchStem(
            PatchConfig(
                family="clip/vision", width=D, channels=1, image_size=8, patch_size=2, bias=False, norm_eps=1e-5
            )
        )
    ),
    "one patch": filled(PatchStem(PatchConfig(family="vit", width=D, channels=3, image_size=4, patch_size=4))),
    "whisper": filled(AudioStem(AudioConfig(family="whisper/encoder", width=D, channels=5, positions=6))),
}
KINDS = pytest.mark.parametrize("kind", STEMS)


@pytest.fixture(scope="module")
def graphs(shared: Shared) -> dict[str, Path]:
    """The folder of each stem's graph."""

    def fill(root: Path) -> dict[str, Path]:
        for kind, stem in STEMS.items():
            (root / kind).mkdir()
            export_stem(stem, root / kind)
        return {kind: root / kind for kind in STEMS}

    return shared.build("stem graphs", fill)


def arguments(case: ParityCase) -> tuple[int, ...]:
    shape: Any = case.arguments["shape"]
    return tuple(shape)


@KINDS
def test_stem_graph_matches_module_over_batches_and_sizes(graphs: dict[str, Path], kind: str) -> None:
    seen: list[tuple[int, int]] = []
    parity = prove_stem(STEMS[kind], Session(graphs[kind]), lambda done, of, _: seen.append((done, of)))
    shapes = [arguments(case) for case in parity.cases]
    assert {shape[0] for shape in shapes} == {1, 2, 5}
    assert len(set(shapes)) == len(shapes)
    assert seen == [(done, len(shapes)) for done in range(1, len(shapes) + 1)]
    assert 0 < parity.max_ulp <= parity.allowed_ulp < 72
    if kind == "vit":
        sizes = {shape[2:] for shape in shapes}
        assert sizes == {(13, 13), (16, 16), (12, 24), (28, 16), (4, 8)}
    check_standard(graphs[kind])
    config = STEMS[kind].config
    if isinstance(config, PatchConfig):
        check_standard(graphs[kind], height=config.image_size, width=config.image_size)
    again = from_tensors(config, read_stem_weights(graphs[kind], config))
    assert all(torch.equal(again.state_dict()[name], value) for name, value in STEMS[kind].state_dict().items())


def test_allowed_ulp_matches_documented_bound() -> None:
    vit, whisper = (STEMS[kind].signature for kind in ("vit", "whisper"))
    assert allowed_ulp(vit) == 8 + 4 * (48**0.5 + 3)
    assert allowed_ulp(whisper) == 8 + 4 * 24**0.5


@KINDS
def test_stem_graph_contains_no_local_paths(graphs: dict[str, Path], kind: str) -> None:
    content = (graphs[kind] / "model.onnx").read_bytes()
    machine = [Path.cwd(), Path.home(), Path(torch.__file__).parents[1], graphs[kind]]
    for text in [*map(str, machine), "site-packages", ".py", "Traceback", "File "]:
        assert text.encode() not in content, text


@pytest.mark.parametrize(
    ("kind", "name", "place"),
    [
        ("vit", "positions", (9, 7)),
        ("vit", "patches.weight", (7, 2, 3, 3)),
        ("clip", "norm.bias", (2,)),
        ("whisper", "positions", (5, 0)),
    ],
)
def test_stem_proof_detects_one_changed_weight(
    graphs: dict[str, Path], kind: str, name: str, place: tuple[int, ...]
) -> None:
    stem = STEMS[kind]
    tensors = {key: value.clone() for key, value in stem.state_dict().items()}
    tensors[name][place] += 1e-3
    with pytest.raises(ParityError, match=r"differs from its reference by .* ULP, expected .*\) at shape \["):
        prove_stem(from_tensors(stem.config, tensors), Session(graphs[kind]))


def test_stem_proof_of_failing_graph_names_shape(graphs: dict[str, Path]) -> None:
    with pytest.raises(ParityError, match=r"the graph of embeddings fails at shape \[1, 3, 13, 13\]: .*input_features"):
        prove_stem(STEMS["vit"], Session(graphs["whisper"]))
