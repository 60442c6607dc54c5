"""Let vLLM complete a prompt from its vectors instead of its ids, with `prompt_embeds` of a running Preblock.

    vllm serve openai-community/gpt2 --port 8001 --enable-prompt-embeds
    preblock export hf:openai-community/gpt2 --name gpt2
    preblock serve --port 8000
    python examples/vllm_prompt_embeds.py http://127.0.0.1:8000 gpt2 http://127.0.0.1:8001 464 2068 7586

The field holds a tensor (tokens, width) of token embeddings, saved by torch, in base64. vLLM adds positions itself, and
casts the tensor to its own dtype.
"""

import argparse

try:
    import httpx

    import preblock
    from preblock.client.errors import ClientError
except ModuleNotFoundError as missing:
    raise SystemExit(
        f"This example needs {missing.name}. After `make serve`, run it with .venv/bin/python; "
        "elsewhere: pip install preblock"
    ) from None


def complete(service: str, model: str, vllm: str, ids: list[int], tokens: int) -> list[str]:
    """Return the completions of vLLM for the vectors of the ids, and for the ids."""
    with preblock.connect(service) as client:
        (prompt,) = client.prompt_embeds(ids, model=model)
    with httpx.Client(base_url=vllm, timeout=300) as http:
        served = http.get("/v1/models").raise_for_status().json()["data"][0]["id"]
        options = {"model": served, "max_tokens": tokens, "temperature": 0}
        answers = [
            http.post("/v1/completions", json=options | given).raise_for_status().json()
            for given in ({"prompt": None, "prompt_embeds": prompt}, {"prompt": ids})
        ]
    return [answer["choices"][0]["text"] for answer in answers]


def main() -> None:
    """Complete a prompt from vectors and from ids, and compare the texts."""
    parser = argparse.ArgumentParser(description="Complete a prompt in vLLM from vectors of a running Preblock.")
    parser.add_argument("service", help="address of Preblock")
    parser.add_argument("model", help="name of the model in Preblock")
    parser.add_argument("vllm", help="address of vLLM with the same model and --enable-prompt-embeds")
    parser.add_argument("ids", type=int, nargs="+", help="token ids of the prompt")
    parser.add_argument("--tokens", type=int, default=16, help="number of tokens to generate (default: 16)")
    given = parser.parse_args()
    try:
        by_vectors, by_ids = complete(given.service, given.model, given.vllm, given.ids, given.tokens)
    except ClientError as error:
        raise SystemExit(f"Preblock: {error}") from error
    except httpx.HTTPError as error:
        raise SystemExit(f"vLLM at {given.vllm}: {error}") from error
    print(repr(by_vectors))
    if by_vectors != by_ids:
        raise SystemExit(f"the completion from ids differs: {by_ids!r}")


if __name__ == "__main__":
    main()
