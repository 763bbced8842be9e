"""Stores behind one interface: a folder, S3, and memory for tests."""
