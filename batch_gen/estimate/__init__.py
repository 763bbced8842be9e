"""Know before you spend: memory, seconds and money of a run from published sizes; no weights, no torch."""
