"""ONNX Runtime GenAI, in an environment of its own: runs a model on a prompt, and generates two tokens.

The arguments are the folder of the model, the ids of the prompt, and for a model with images the image features.
"""

import json
import sys

import numpy as np
import onnxruntime_genai as genai

folder, ids, *images = sys.argv[1:]
model = genai.Model(folder)
options = genai.GeneratorParams(model)
options.set_search_options(max_length=16, do_sample=False)
generator = genai.Generator(model, options)
if images:
    features = np.array(json.loads(images[0]), np.float32)
    inputs = genai.NamedTensors()
    inputs["pixel_values"] = features[None]
    inputs["num_image_tokens"] = np.array([len(features)])
    generator.set_inputs(inputs)
steps = []
generator.append_tokens(np.array([json.loads(ids)], np.int32))
for tokens in (0, 2):  # the decoder runs for a generated token when the next one is generated
    for _ in range(tokens):
        generator.generate_next_token()
    logits = generator.get_output("logits")
    steps.append([logits.shape, logits.tobytes().hex()])
json.dump({"steps": steps, "ids": generator.get_sequence(0).tolist()}, sys.stdout)
