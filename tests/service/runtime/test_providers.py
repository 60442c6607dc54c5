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
        ("bert", "auto", CUDA),
        ("projected", "auto", CUDA),
        ("vit", "auto", CUDA),
        ("gpt", "cuda", CUDA),
    ],
)
def test_provider_of_added_rows_is_cpu_with_auto(stored: str, requested: str, provider: str) -> None:
    manifest, _ = read_with_identity(STORED / stored)
    assert ProviderChoice(requested, CUDA, CUDA, None).provider_of(manifest) == provider


@pytest.mark.parametrize("stored", ["gpt", "bert"])
def test_provider_of_model_without_cuda_is_cpu(stored: str) -> None:
    manifest, _ = read_with_identity(STORED / stored)
    assert ProviderChoice("auto", CPU, None, "no driver").provider_of(manifest) == CPU
