"""batch-gen: offline batch video rendering from a Parquet manifest."""

__version__ = "0.1.0"
