"""Request fields of engines that take vectors in place of token ids. Nothing here needs a network or torch.

Engines add positions themselves, so the vectors are `token_embeddings`.

Letters: T tokens of a row, D width.
"""

import numpy as np

from preblock.client.results import Embeddings


def chat_part(prompt: str) -> dict[str, str]:
    """Return a part of the content of a chat message for vLLM.

    Args:
        prompt: a value of `prompt_embeds`. vLLM puts the chat template around it, so embed the text of the message
            alone, with `special_tokens=False`.

    """
    return {"type": "prompt_embeds", "data": prompt}


def input_embeds(embeddings: Embeddings) -> list[list[list[float]]]:
    """Return the field `input_embeds` of SGLang's `/generate`: for each row T lists of D numbers.

    Every number is a float, also a whole one: SGLang counts the dimensions by the type of the first number.
    """
    return [row.astype(np.float32).tolist() for row in embeddings.rows()]
