"""The models of the OpenAI API, through OpenAI's own client."""

from pathlib import Path

import openai
import pytest

from tests.clients.openai_api.responses import MEAN


def test_model_list_and_retrieve_describe_models(tiny_openai: openai.OpenAI, tiny_repository: Path) -> None:
    models = list(tiny_openai.models.list())
    assert [model.id for model in models] == ["bert", "gpt"]
    assert models[0] == tiny_openai.models.retrieve("bert")
    written = (tiny_repository / "bert" / "2" / "manifest.json").stat().st_mtime
    assert (models[0].object, models[0].owned_by, models[0].created) == ("model", "preblock", int(written))


def test_model_name_selects_version(tiny_openai: openai.OpenAI) -> None:
    found = {
        name: tiny_openai.embeddings.create(model=name, input="a", extra_body=MEAN)
        for name in ("bert", "bert:1", "bert:2")
    }
    assert [(response.model_extra or {})["version"] for response in found.values()] == [2, 1, 2]
    assert found["bert"].data == found["bert:2"].data != found["bert:1"].data
    assert tiny_openai.models.retrieve("bert:1").id == "bert:1"


def test_retrieve_of_unknown_model_raises_not_found(tiny_openai: openai.OpenAI) -> None:
    for name in ("nope", "bert:3", "bert:x"):
        with pytest.raises(openai.NotFoundError) as raised:
            tiny_openai.models.retrieve(name)
        assert raised.value.code == "model_not_found"
