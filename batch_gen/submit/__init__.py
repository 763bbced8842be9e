"""AWS Batch: from a checked manifest to an array job. Import submodules; nothing is imported here."""
