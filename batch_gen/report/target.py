"""Where a report is written: below `report/` of the output root, or in a folder of its own.

Everything but the pages is named by its content, so that a rebuild writes only what changed, and a page never meets
data of another build. Pages come last; what only the last build used is removed after them.
"""

from __future__ import annotations

import hashlib
import json
import mimetypes
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Final

from batch_gen.report.source import at_once

if TYPE_CHECKING:
    from batch_gen.storage.base import Store

REPORT_PREFIX: Final = "report/"
INVENTORY: Final = "files.json"
_TYPES: Final = {".js": "text/javascript; charset=utf-8", ".html": "text/html; charset=utf-8", ".css": "text/css"}


@dataclass(slots=True)
class Target:
    """The files of one report.

    Args:
        store: Where it is written.
        prefix: Of its keys, "" or ending with `/`.
        used: Names that this build refers to.
    """

    store: Store
    prefix: str
    used: dict[str, int] = field(default_factory=dict)
    _there: frozenset[str] | None = None

    def names(self, prefix: str = "") -> set[str]:
        """Names that were there when the build began."""
        if self._there is None:
            keys = (listed.key for listed in self.store.list(self.prefix))
            self._there = frozenset(key.removeprefix(self.prefix) for key in keys)
        return {name for name in self._there if name.startswith(prefix)}

    def put(self, name: str, body: bytes) -> None:
        """Write a file."""
        suffix = PurePosixPath(name).suffix
        content_type = _TYPES.get(suffix) or mimetypes.types_map.get(suffix) or "application/octet-stream"
        self.store.put(self.prefix + name, body, content_type=content_type)

    def put_all(self, files: dict[str, bytes]) -> dict[str, str]:
        """Write files under names that hold a hash of their content; name -> name as written."""
        named = {name: _hashed(name, body) for name, body in files.items()}
        self.used |= {named[name]: len(body) for name, body in files.items()}
        missing = [name for name in files if named[name] not in self.names()]
        at_once(lambda name: self.put(named[name], files[name]), missing)
        return named

    def close(self, pages: dict[str, bytes]) -> None:
        """Write the pages, then remove what only the last build used."""
        last = self._inventory()
        self.used |= {name: len(body) for name, body in pages.items()}
        for name, body in pages.items():
            self.put(name, body)
        self.put(INVENTORY, json.dumps(self.used, indent=0, sort_keys=True).encode())
        at_once(lambda name: self.store.delete(self.prefix + name), sorted(last - self.used.keys()))

    def _inventory(self) -> set[str]:
        blob = self.store.get(self.prefix + INVENTORY)
        try:
            return set(json.loads(blob.body)) if blob is not None else set()
        except ValueError:
            return set()


def _hashed(name: str, body: bytes) -> str:
    stem, dot, suffix = name.rpartition(".")
    return f"{stem}-{hashlib.sha256(body).hexdigest()[:10]}{dot}{suffix}"
