"""The family tables: how published models name and compose their front-end, by lineage.

A family is a row, named by `model_type` in its `config.json`, and by its side where it has two. Its steps name the
tensors of a checkpoint as a base model's file has them. Read from transformers 5.24, and checked against it.
"""

from preblock.models.families.bart import BART
from preblock.models.families.bert import BERT
from preblock.models.families.deepseek import DEEPSEEK
from preblock.models.families.family import Family, StemFamily
from preblock.models.families.gemma import GEMMA
from preblock.models.families.glm import GLM
from preblock.models.families.gpt import GPT
from preblock.models.families.granite import GRANITE
from preblock.models.families.llama import LLAMA
from preblock.models.families.mamba import MAMBA
from preblock.models.families.qwen import QWEN
from preblock.models.families.speech import SPEECH, SPEECH_STEMS
from preblock.models.families.t5 import T5
from preblock.models.families.vision import CLIP, IMAGE_STEMS

TEXTS = (BERT, CLIP, GPT, LLAMA, GRANITE, GEMMA, QWEN, GLM, DEEPSEEK, MAMBA, BART, SPEECH, T5)
FAMILIES: dict[str, Family] = {name: row for rows in TEXTS for name, row in rows.items()}
STEMS: dict[str, StemFamily] = IMAGE_STEMS | SPEECH_STEMS
