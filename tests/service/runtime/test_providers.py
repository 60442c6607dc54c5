"""The provider of a model."""

from preblock.service.artifacts.io import read_with_identity
from preblock.service.runtime.providers import CPU, CUDA, ProviderChoice
from tests.support.artifacts import STORED


def test_provider_for_exact_rows_is_cpu_with_auto() -> None:
    for stored, requested, provider in (
        ("gpt", "auto", CPU),
        ("bert", "auto", CPU),
        ("projected", "auto", CUDA),
        ("vit", "auto", CUDA),
        ("gpt", "cuda", CUDA),
    ):
        manifest, _ = read_with_identity(STORED / stored)
        found = ProviderChoice(requested, CUDA, CUDA, None).for_model(manifest)
        assert (found.active, found.reason is None) == (provider, provider == CUDA), stored
        assert ProviderChoice("auto", CPU, None, "no driver").for_model(manifest).active == CPU, stored
