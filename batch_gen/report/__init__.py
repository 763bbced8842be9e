"""The report: a folder of static HTML about a run, built from its parts, that works from disk and from S3."""
