"""The provider of a model."""

import pytest

from preblock.service.artifacts.io import read_with_identity
from preblock.service.runtime.providers import CPU, CUDA, ProviderChoice
from tests.support.artifacts import STORED


@pytest.mark.parametrize(
    ("stored", "requested", "provider"),
    [
        ("gpt", "auto", CPU),
        ("sinusoid", "auto", CPU),
        ("llama", "auto", CPU),
        ("segments", "auto", CPU),
        ("bert", "auto", CPU),
        ("projected", "auto", CUDA),
        ("vit", "auto", CUDA),
        ("gpt", "cuda", CUDA),
        ("bert", "cuda", CUDA),
    ],
)
def test_provider_for_exact_rows_is_cpu_with_auto(stored: str, requested: str, provider: str) -> None:
    manifest, _ = read_with_identity(STORED / stored)
    assert ProviderChoice(requested, CUDA, CUDA, None).for_model(manifest).active == provider


@pytest.mark.parametrize("stored", ["gpt", "projected"])
def test_provider_for_model_without_cuda_is_cpu(stored: str) -> None:
    manifest, _ = read_with_identity(STORED / stored)
    assert ProviderChoice("auto", CPU, None, "no driver").for_model(manifest).active == CPU


def test_choice_for_exact_rows_names_the_reason() -> None:
    manifest, _ = read_with_identity(STORED / "gpt")
    found = ProviderChoice("auto", CUDA, CUDA, None).for_model(manifest)
    reason = "the model has no matrix product, and the CPU gives a vector the same bits in any call"
    assert found == ("auto", CPU, CUDA, reason)
