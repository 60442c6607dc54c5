"""Front-ends as data, for the references of a proof."""

from preblock.models.frontend import FrontEnd
from preblock.models.frontend_data import FrontEndData


def data_of(frontend: FrontEnd) -> FrontEndData:
    """Return a front-end with float32 weights as data."""
    return FrontEndData(frontend.config, {name: weight.numpy() for name, weight in frontend.state_dict().items()})
