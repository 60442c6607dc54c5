"""A PyTorch front-end as data, to be written."""

import ml_dtypes
import torch

from preblock.models.frontend import FrontEnd
from preblock.models.frontend_data import Array, FrontEndData


def data_of(frontend: FrontEnd) -> FrontEndData:
    """Return the config and the trained weights of `frontend`, without a copy of them."""
    tensors: dict[str, Array] = {}
    for name, weight in frontend.state_dict().items():
        if weight.dtype == torch.bfloat16:
            tensors[name] = weight.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
        else:
            tensors[name] = weight.numpy()
    return FrontEndData(frontend.config, tensors)
