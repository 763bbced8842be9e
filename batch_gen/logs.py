"""Structured logs: JSON lines on stderr, quiet by default."""

from __future__ import annotations

import json
import logging
import sys
import time


class JsonLines(logging.Formatter):
    """One JSON object a line: time, level, logger, message and what `extra={"fields": {...}}` adds."""

    def format(self, record: logging.LogRecord) -> str:
        """The record as one line of JSON."""
        body = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(record.created)),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            body["traceback"] = self.formatException(record.exc_info)
        return json.dumps(body, ensure_ascii=False)


def configure(level: int) -> None:
    """Send the product's own log records to stderr."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines())
    logger = logging.getLogger("batch_gen")
    logger.handlers = [handler]
    logger.setLevel(level)
    logger.propagate = False
