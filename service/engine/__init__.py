"""From a request to its result: validate, plan, batch, run, decode."""
