"""Write a prompt of ids and vectors for TensorRT-LLM, with a table made by a running Preblock.

    trtllm-build --checkpoint_dir gpt2 --output_dir engine --max_prompt_embedding_table_size 128
    preblock export hf:openai-community/gpt2 --name gpt2
    preblock serve --port 8000
    python examples/tensorrt_llm_prompt_table.py http://127.0.0.1:8000 gpt2 464 +2068,7586 262
    python run.py --engine_dir engine --input_file input_ids.npy --prompt_table_path prompt_table.npy

A part is a list of token ids with commas. The ids of a part with a leading + become rows of the table, and fake ids
from the size of the vocabulary on. `run.py` is in the folder `examples` of TensorRT-LLM.
"""

import argparse

try:
    import numpy as np

    import preblock
    from preblock.client.errors import ClientError
    from preblock.client.payloads import prompt_table
except ModuleNotFoundError as missing:
    raise SystemExit(f"This example needs {missing.name}: pip install preblock") from None

LOOKUP = "token_embeddings"


def read_part(text: str) -> tuple[bool, list[int]]:
    """Return whether the ids of a part become vectors, and the ids."""
    return text.startswith("+"), [int(number) for number in text.removeprefix("+").split(",")]


def main() -> None:
    """Write `input_ids.npy` and `prompt_table.npy`, and print the ids."""
    parser = argparse.ArgumentParser(description="Write a prompt of ids and vectors for TensorRT-LLM.")
    parser.add_argument("service", help="address of Preblock")
    parser.add_argument("model", help="name of the model in Preblock")
    parser.add_argument(
        "parts", nargs="+", type=read_part, help="token ids with commas; with a leading +, their vectors"
    )
    given = parser.parse_args()
    try:
        with preblock.connect(given.service) as client:
            size = client.model(given.model).vocab_size
            if size is None:
                raise SystemExit(f"{given.model} takes no token ids")
            parts = [
                client.embed(ids, model=given.model, output=LOOKUP).vectors[0] if vectors else ids
                for vectors, ids in given.parts
            ]
        prompt = prompt_table(parts, size)
    except ClientError as error:
        raise SystemExit(f"Preblock: {error}") from error
    np.save("input_ids.npy", prompt.input_ids[None])
    np.save("prompt_table.npy", prompt.table)
    print(*prompt.input_ids)


if __name__ == "__main__":
    main()
