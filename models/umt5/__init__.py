"""UMT5 text encoder. Import submodules; nothing is imported here."""
