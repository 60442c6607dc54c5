"""LangChain, in an environment of its own: embeds texts with and without the documented argument."""

import json
import sys

import tiktoken
import tiktoken.model
from langchain_openai import OpenAIEmbeddings

TEXTS = ["Hello, world!", "the quick brown fox"]
# OpenAI's tokenizers are downloads; this one has a token for each byte, and stands for any tokenizer of others.
BYTES = {bytes([value]): value + 1000 for value in range(256)}
tiktoken.model.MODEL_TO_ENCODING["wordllama"] = "bytes"
tiktoken.registry.ENCODING_CONSTRUCTORS = {
    "bytes": lambda: {"name": "bytes", "pat_str": r"(?s:.)", "mergeable_ranks": BYTES, "special_tokens": {}}
}

options = {"model": "wordllama", "base_url": f"{sys.argv[1]}/v1", "api_key": "none"}
found = {
    "texts": TEXTS,
    "documented": OpenAIEmbeddings(**options, check_embedding_ctx_length=False).embed_documents(TEXTS),
    "default": OpenAIEmbeddings(**options).embed_documents(TEXTS),
}
json.dump(found, sys.stdout)
