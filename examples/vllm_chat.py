"""Send a chat message to vLLM as vectors, with `prompt_embeds` of a running Preblock.

    vllm serve Qwen/Qwen3-0.6B --port 8001 --enable-prompt-embeds
    preblock export hf:Qwen/Qwen3-0.6B --name qwen3
    preblock serve --port 8000
    python examples/vllm_chat.py http://127.0.0.1:8000 qwen3 http://127.0.0.1:8001 "What is the capital of France?"

vLLM puts its chat template around the part, so the vectors are those of the message alone, without special tokens. It
casts them to its own dtype.
"""

import argparse

try:
    import httpx

    import preblock
    from preblock.client.errors import ClientError
    from preblock.client.payloads import chat_part
except ModuleNotFoundError as missing:
    raise SystemExit(f"This example needs {missing.name}: pip install preblock") from None


def main() -> None:
    """Print the answer of vLLM to a message."""
    parser = argparse.ArgumentParser(description="Send a chat message to vLLM as vectors of a running Preblock.")
    parser.add_argument("service", help="address of Preblock")
    parser.add_argument("model", help="name of the model in Preblock")
    parser.add_argument("vllm", help="address of vLLM with the same model and --enable-prompt-embeds")
    parser.add_argument("message", help="text of the user's message")
    given = parser.parse_args()
    try:
        with preblock.connect(given.service) as client:
            (prompt,) = client.prompt_embeds(text=given.message, model=given.model, special_tokens=False)
        with httpx.Client(base_url=given.vllm, timeout=300) as http:
            served = http.get("/v1/models").raise_for_status().json()["data"][0]["id"]
            message = {"role": "user", "content": [chat_part(prompt)]}
            request = {"model": served, "messages": [message]}
            answer = http.post("/v1/chat/completions", json=request).raise_for_status().json()
    except ClientError as error:
        raise SystemExit(f"Preblock: {error}") from error
    except httpx.HTTPError as error:
        raise SystemExit(f"vLLM at {given.vllm}: {error}") from error
    print(answer["choices"][0]["message"]["content"])


if __name__ == "__main__":
    main()
