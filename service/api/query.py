"""Query parameters."""

from starlette.datastructures import QueryParams

from incipit.service.errors import Invalid


def single_values(parameters: QueryParams) -> dict[str, str]:
    """Return the parameters by name.

    Raises:
        Invalid: one is given more than once.

    """
    for name in parameters:
        if len(parameters.getlist(name)) > 1:
            raise Invalid(name, f"{len(parameters.getlist(name))} times in the query", "once; a list is written [1,2]")
    return dict(parameters)
