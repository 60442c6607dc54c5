"""Names what a checkpoint holds in place of the expected files and tensors, and gives advice. Imports no torch."""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from preblock.models.frontend_file import INDEX, WEIGHTS

PICKLE = "a pickle, which can run any code when it is read"
TENSORFLOW = "weights of TensorFlow or Flax; convert them to safetensors with transformers 4"
_STATES = (
    "training_args",
    "optimizer",
    "*optim_states",
    "scheduler",
    "scaler",
    "sampler",
    "rng_state",
    "random_states",
)
TRAINING = tuple(f"{name}*.{ending}" for name in _STATES for ending in ("bin", "pt", "pth", "pkl", "safetensors"))
"""Patterns of the names of files that a training writes beside its weights."""
FORMATS: Mapping[str, str] = {
    "consolidated*.safetensors": "with the names of another library; export the files for transformers",
    "*-of-*.safetensors": "parts without their index; add model.safetensors.index.json",
    "*.safetensors": "under another name; rename it to model.safetensors if it is the whole model",
    "*.gguf": "a file for other engines, often quantised; export the model from which it was made",
    **dict.fromkeys(("*.h5", "*.msgpack", "*.ckpt*"), TENSORFLOW),
    "pytorch_model*.bin": (
        f"{PICKLE}; convert it to safetensors first: load it with transformers where you trust it, then "
        "save_pretrained()"
    ),
    "openvino_*.bin": "weights of OpenVINO; export the model from which they were made",
    **dict.fromkeys(("*.bin", "*.pth", "*.pt"), f"{PICKLE}; save its tensors as safetensors first"),
    **dict.fromkeys(TRAINING, "the state of a training, without weights; look for the weights in another folder"),
}
"""Pattern of the name of a file of weights -> what it is, and what to do; the first pattern with a file counts."""
WRAPPER = re.compile(
    r"(?:^|(?<=\.))(?:_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module|base_model\.model|module)\."
)
"""Parts of a name, added by torch.compile, FSDP, checkpointing, PEFT and DataParallel."""


def describe_other_weights(folder: Path) -> str:
    """Return the weights of other formats in `folder`, and what to do about them; empty without any, or beside ours."""
    if (folder / WEIGHTS).exists() or (folder / INDEX).exists():
        return ""
    for pattern, advice in FORMATS.items():
        found = folder.glob(pattern)
        names = sorted(file.name for file in found if pattern in TRAINING or not any(map(file.match, TRAINING)))
        if names:
            return f"only {', '.join(names[:2])}{', …' if len(names) > 2 else ''}, {advice}"
    return ""


def describe_model_folder(folder: Path, name: str) -> str:
    """Return the subfolder that holds the file `name`, as advice; empty without one."""
    parts = sorted(file.parent for file in folder.glob(f"*/{name}"))
    return f"; the model lies in {' or '.join(part.name for part in parts[:3])}: export {parts[0]}" if parts else ""


def describe_other_name(names: Iterable[str], expected: Iterable[str]) -> str:
    """Return the name of one of the `expected` tensors behind a prefix or a wrapper, as advice; empty without one."""
    wanted = {*expected}
    endings = tuple(f".{name}" for name in wanted)
    for name in sorted(names, key=lambda name: (len(name), name)):
        if WRAPPER.sub("", name) in wanted:
            extra = " and ".join(repr(part) for part in dict.fromkeys(WRAPPER.findall(name)))
        elif name.endswith(endings):
            extra = repr(name[: -max(len(ending) - 1 for ending in endings if name.endswith(ending))])
        else:
            continue
        return f"the files hold {name}; remove {extra} from the names of all tensors"
    return ""
