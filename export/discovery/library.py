"""The installed transformers: its configurations and model classes, without remote code and without network.

Each function imports transformers itself, because the export of a known family must not import it.
"""

import os
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from difflib import get_close_matches
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import nn

from preblock.export.discovery.errors import DiscoveryError
from preblock.export.discovery.refusals import refuse_ngrams
from preblock.models.checkpoints.family_lookup import known
from preblock.models.checkpoints.weight_files import one_line

LIBRARY = "transformers"
SILENT = 50
"""Level above every message of the library: they concern blocks, and those are not loaded."""
REMOTE_CODE = ("auto_map", "trust_remote_code")
"""Keys of `config.json` for code inside a checkpoint."""
CLASS_TABLES = (
    "MODEL_MAPPING",
    "MODEL_FOR_PRETRAINING_MAPPING",
    "MODEL_FOR_CAUSAL_LM_MAPPING",
    "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING",
    "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING",
    "MODEL_FOR_MULTIMODAL_LM_MAPPING",
    "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING",
    "MODEL_FOR_TEXT_TO_WAVEFORM_MAPPING",
)
"""Tables of model classes in transformers, the bare model first."""


def library_version() -> str:
    """Return the name and the version of the library: `transformers 5.24.0`."""
    return f"{LIBRARY} {version(LIBRARY)}"


@contextmanager
def quiet() -> Iterator[None]:
    """Keep the library offline, silent and without gradients."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    from huggingface_hub import constants
    from transformers.utils import logging

    offline, verbosity = constants.HF_HUB_OFFLINE, logging.get_verbosity()
    constants.HF_HUB_OFFLINE = True
    logging.set_verbosity(SILENT)
    try:
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")
            yield
    finally:
        constants.HF_HUB_OFFLINE = offline
        logging.set_verbosity(verbosity)


def check_document(document: Mapping[str, Any]) -> None:
    """Raise DiscoveryError for n-gram embeddings or remote code."""
    refuse_ngrams(document)
    for key in REMOTE_CODE:
        if document.get(key):
            raise DiscoveryError(
                f"config.json: {key} names code inside the checkpoint, which Preblock never runs; "
                f"remove the key to use the class of {LIBRARY} for {document.get('model_type')!r}"
            )


def read_config(folder: Path, model_type: str) -> Any:
    """Return the library's configuration of the checkpoint in `folder`.

    Raises:
        DiscoveryError: the model type is not known to the library, or the library rejects a value.

    """
    from transformers import CONFIG_MAPPING

    if model_type not in CONFIG_MAPPING:
        close = get_close_matches(model_type, {*known(), *CONFIG_MAPPING}, 1)
        hint = f"; did you mean {close[0]}?" if close else ""
        raise DiscoveryError(
            f"config.json: model_type is {model_type!r}, known neither to the family table nor to {library_version()}"
            f"{hint}"
        )
    try:
        return CONFIG_MAPPING[model_type].from_pretrained(folder, local_files_only=True)
    except Exception as error:  # the library's checks share no narrower parent
        raise DiscoveryError(f"config.json: {library_version()} rejects it: {one_line(error)}") from error


def model_classes(config: Any) -> list[type[nn.Module]]:
    """Return the library's model classes for `config`: the class named by the checkpoint, then the bare model.

    Raises:
        DiscoveryError: there is none.

    """
    import transformers
    from transformers.models.auto import modeling_auto

    named = [getattr(transformers, name, None) for name in config.architectures or () if isinstance(name, str)]
    tables = [getattr(modeling_auto, name) for name in CLASS_TABLES if hasattr(modeling_auto, name)]
    found = [table[type(config)] for table in tables if type(config) in table]
    bare = [kind[0] if isinstance(kind, tuple) else kind for kind in found]
    fitting = [kind for kind in named if isinstance(kind, type) and getattr(kind, "config_class", None) is type(config)]
    own = [kind for kind in bare if kind.config_class is type(config)] or bare  # some tables name the class of a part
    classes = list(dict.fromkeys([*fitting[:1], *own[:1]]))
    if not classes:
        raise DiscoveryError(f"config.json: {library_version()} has no model class for {config.model_type!r}")
    return classes


def build_model(kind: type[nn.Module], config: Any) -> nn.Module:
    """Return a model of the library in float32, with all tensors on the meta device and untied.

    Raises:
        DiscoveryError: the library cannot build it.

    """
    from transformers import initialization as init

    config._attn_implementation = "eager"
    config.dtype = torch.float32
    for name in config.sub_configs:
        if getattr(config, name, None) is not None:
            getattr(config, name).dtype = torch.float32
    try:
        with init.no_init_weights(), init.no_tie_weights(), torch.device("meta"), init.meta_device_safe_creation_ops():
            model = kind(config)
    except Exception as error:  # whatever a model's constructor raises
        raise DiscoveryError(f"{library_version()} cannot build {kind.__name__}: {one_line(error)}") from error
    return model.eval()
