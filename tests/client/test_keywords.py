"""A misspelt keyword is a TypeError that names the keyword meant."""

from functools import partial
from typing import Any

import pytest

import preblock
from tests.client.conftest import Connect


@pytest.mark.parametrize(
    ("method", "arguments", "keyword", "meant"),
    [
        ("embed", ([1],), "ofset", "offset"),
        ("embed", ([1],), "atention_mask", "attention_mask"),
        ("embed", ([1],), "token_type_id", "token_type_ids"),
        ("text", ("a",), "return_token", "return_tokens"),
        ("prompt_embeds", ([1],), "dtpye", "dtype"),
        ("bias", (1, 1), "query_ofset", "query_offset"),
        ("model", ("gpt",), "verison", "version"),
        ("decode", ("gpt",), "compagnions", "companions"),
    ],
)
def test_misspelt_keyword_gets_suggestion(
    connect: Connect, method: str, arguments: tuple[Any, ...], keyword: str, meant: str
) -> None:
    client = connect("http://127.0.0.1:1", retries=0)
    options: dict[str, Any] = {"model": "gpt"} if method in ("embed", "text", "prompt_embeds", "bias") else {}
    call = partial(getattr(client, method), *arguments, **options, **{keyword: 1})
    with pytest.raises(TypeError, match=rf"Client\.{method}\(\) got .* {keyword!r}; did you mean {meant!r}\?$"):
        call().__enter__()  # of a stream; any other call fails before


def test_unknown_keyword_lists_valid_keywords() -> None:
    with pytest.raises(TypeError, match="'colour'; its keywords are dtype, key_length, model, "):
        preblock.connect("http://127.0.0.1:1").bias(1, 1, model="gpt", colour=1)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="'timout'; did you mean 'timeout'"):
        preblock.connect("http://127.0.0.1:1", timout=1)  # type: ignore[call-arg]


def test_misspelt_keyword_of_step_gets_suggestion() -> None:
    stream = preblock.connect("http://127.0.0.1:1").decode("gpt")
    with pytest.raises(TypeError, match="'position_id'; did you mean 'position_ids'"):
        stream.step([1], position_id=[1])
