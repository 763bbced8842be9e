"""Model code of batch-gen: each package is one component. Import submodules; nothing is imported here."""
