"""Lets vLLM complete a prompt whose vectors, not ids, it is handed: `prompt_embeds`, as a running Preblock writes them.

    vllm serve openai-community/gpt2 --port 8001 --enable-prompt-embeds --dtype float32
    preblock export openai-community/gpt2 --name gpt2
    preblock serve --port 8000
    python examples/vllm_prompt_embeds.py http://127.0.0.1:8000 gpt2 http://127.0.0.1:8001 464 2068 7586

The field is the base64 of what torch saves: a tensor (tokens, width) of what the model's own lookup gives. vLLM adds
positions itself, and takes the tensor in the type that it runs in: name that type where it is not float32.
"""

import argparse

import httpx

import preblock


def complete(service: str, model: str, vllm: str, ids: list[int], dtype: str, tokens: int) -> list[str]:
    """Return what a vLLM completes the prompt with, first by the vectors of its ids, then by the ids themselves."""
    with preblock.connect(service) as client:
        (prompt,) = client.prompt_embeds(ids, model=model, dtype=dtype)
    with httpx.Client(base_url=vllm, timeout=300) as http:
        served = http.get("/v1/models").raise_for_status().json()["data"][0]["id"]
        options = {"model": served, "max_tokens": tokens, "temperature": 0}
        answers = [
            http.post("/v1/completions", json=options | given).raise_for_status().json()
            for given in ({"prompt": None, "prompt_embeds": prompt}, {"prompt": ids})
        ]
    return [answer["choices"][0]["text"] for answer in answers]


def main() -> None:
    """Complete a prompt in both ways, and compare."""
    parser = argparse.ArgumentParser(description="Feed vLLM with vectors of a running Preblock.")
    parser.add_argument("service", help="address of Preblock")
    parser.add_argument("model", help="its name there")
    parser.add_argument("vllm", help="address of a vLLM that serves the same model, with --enable-prompt-embeds")
    parser.add_argument("ids", type=int, nargs="+", help="the prompt")
    parser.add_argument("--dtype", default="float32", help="the type that vLLM runs in (default: float32)")
    parser.add_argument("--tokens", type=int, default=16, help="how many to complete (default: 16)")
    given = parser.parse_args()
    by_vectors, by_ids = complete(given.service, given.model, given.vllm, given.ids, given.dtype, given.tokens)
    print(repr(by_vectors))
    if by_vectors != by_ids:
        raise SystemExit(f"the ids are completed otherwise: {by_ids!r}")


if __name__ == "__main__":
    main()
