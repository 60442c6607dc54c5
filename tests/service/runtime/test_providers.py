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
        assert ProviderChoice(requested, CUDA, CUDA, None).for_model(manifest).active == provider, stored
        assert ProviderChoice("auto", CPU, None, "no driver").for_model(manifest).active == CPU, stored


def test_choice_for_exact_rows_names_the_reason() -> None:
    manifest, _ = read_with_identity(STORED / "gpt")
    found = ProviderChoice("auto", CUDA, CUDA, None).for_model(manifest)
    reason = "the model has no matrix product, and the CPU gives a vector the same bits in any call"
    assert found == ("auto", CPU, CUDA, reason)
