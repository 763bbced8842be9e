"""Layouts, meshes and collectives. Import submodules; nothing is imported here."""
