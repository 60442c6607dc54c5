"""Profiles of hypothesis. Tests that use it import this module: the import of hypothesis takes half a second."""

import hypothesis

# The same few examples in every run. `make fuzz` and `make reliability` ask for more, and for others.
hypothesis.settings.register_profile("few", max_examples=20, derandomize=True, deadline=None, database=None)
hypothesis.settings.register_profile("fuzz", max_examples=200, deadline=None, database=None, print_blob=True)
hypothesis.settings.register_profile("reliability", max_examples=20_000, deadline=None, database=None, print_blob=True)
hypothesis.settings.load_profile("few")
