"""Compiled graphs as artefacts: built once, packed into a store, fetched by runs that were told what to trust."""
