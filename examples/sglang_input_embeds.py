"""Let SGLang complete prompts from their vectors, with `input_embeds` made by a running Preblock.

    python -m sglang.launch_server --model-path Qwen/Qwen3-0.6B --dtype bfloat16 --port 30000 --disable-radix-cache
    preblock export hf:Qwen/Qwen3-0.6B --name qwen3
    preblock serve --port 8000
    python examples/sglang_input_embeds.py http://127.0.0.1:8000 qwen3 http://127.0.0.1:30000 785 6722 315

SGLang takes the numbers as JSON: about 20 bytes for each number, so a long prompt is large. It rounds them to bfloat16.
Its radix cache compares token ids, and vectors have none: turn it off. Its GPT-2 takes no vectors.
"""

import argparse

try:
    import httpx

    import preblock
    from preblock.client.errors import ClientError
    from preblock.client.payloads import input_embeds
except ModuleNotFoundError as missing:
    raise SystemExit(f"This example needs {missing.name}: pip install preblock") from None


def main() -> None:
    """Print the completion of SGLang."""
    parser = argparse.ArgumentParser(description="Complete a prompt in SGLang from vectors of a running Preblock.")
    parser.add_argument("service", help="address of Preblock")
    parser.add_argument("model", help="name of the model in Preblock")
    parser.add_argument("sglang", help="address of SGLang with the same model")
    parser.add_argument("ids", type=int, nargs="+", help="token ids of the prompt")
    parser.add_argument("--tokens", type=int, default=16, help="number of tokens to generate (default: 16)")
    given = parser.parse_args()
    try:
        with preblock.connect(given.service) as client:
            embeddings = client.embed([given.ids], model=given.model, output="token_embeddings")
        request = {
            "input_embeds": input_embeds(embeddings),
            "sampling_params": {"max_new_tokens": given.tokens, "temperature": 0},
        }
        answer = httpx.post(f"{given.sglang}/generate", json=request, timeout=300).raise_for_status().json()
    except ClientError as error:
        raise SystemExit(f"Preblock: {error}") from error
    except httpx.HTTPError as error:
        raise SystemExit(f"SGLang at {given.sglang}: {error}") from error
    print(repr(answer[0]["text"]))


if __name__ == "__main__":
    main()
