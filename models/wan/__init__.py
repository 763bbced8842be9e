"""Wan2.2 diffusion transformer and its pipeline. Import submodules; nothing is imported here."""
