"""Causal 3D video VAE. Import submodules; nothing is imported here."""
