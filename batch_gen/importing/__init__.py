"""`batch-gen import`: other people's prompt lists and job files -> a canonical manifest.

sources -> names -> convert -> grid -> write
records    columns  cells      sweeps  Parquet
"""
