"""Programs that write source files; no package contains them."""
