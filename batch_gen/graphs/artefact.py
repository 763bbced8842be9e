"""What a packed set of compiled graphs is, how it is written, and what must be true before a file of it is used.

```
blobs/<2 hex>/<sha256>        the files of compiler caches, by content
artefacts/<sha256>.json       the files of one key: path, length, SHA-256 of each; named by its own content
keys/<key>.json               which artefact was built for a key (for `batch-gen compile` alone)
sets/<sha256>.json            key -> artefact, for one manifest; its SHA-256 is what a user hands to `run`
lease/<key>.json              who is building a key
```

A compiler cache holds machine code, and that of torch holds pickles: whoever can write them can run code on every
machine that reads them. So nothing in the store is believed. The user names one SHA-256; the set must have it, each
artefact must have the SHA-256 that the set names, each file the one that its artefact names. Only then is a file put
where a compiler finds it. Nothing here unpickles anything.
"""

from __future__ import annotations

import errno
import hashlib
import json
import re
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Final, TypeVar

from pydantic import Field, ValidationError

from batch_gen.errors import DiskFull, EnvironmentFault
from batch_gen.records import Strict
from batch_gen.storage.base import AlreadyExists, Store, sha256_of

FORMAT: Final = 1
MAX_FILES: Final = 1_000_000
MAX_NAME_BYTES: Final = 255  # of one part of a path, as file systems have it
MAX_PATH_BYTES: Final = 1024
NUM_LOOKS: Final = 16  # at blobs, at one time
_SHA256: Final = "^[0-9a-f]{64}$"
_NO_SPACE: Final = (errno.ENOSPC, errno.EDQUOT)
_AGAIN: Final = "run batch-gen compile again and use the digest that it prints"
# Files that a cache needs while it works, or that only its own machine can use.
_SKIPPED: Final = re.compile(r"\.(lock|tmp|part|pid)$|(^|/)(locks|precompiled_headers|\.git)/")
Document = TypeVar("Document", bound=Strict)


class ArtefactRefused(EnvironmentFault):
    """A packed file or document is missing, torn, of another key, or not what the user's digest says."""


class Packed(Strict):
    """One file of a compiler cache."""

    path: str
    size_bytes: int = Field(ge=0)
    sha256: str = Field(pattern=_SHA256)


class Artefact(Strict):
    """The compiler cache of one key.

    Attributes:
        facts: what the key is made of; see `keys.facts_of`.
        files: everything that was in the cache after all graphs of the key had been used.
        built: seconds, worker and versions; for people.
    """

    format: int = FORMAT
    key: str
    facts: dict[str, Any]
    files: tuple[Packed, ...] = Field(max_length=MAX_FILES)
    built: dict[str, Any] = Field(default_factory=dict)


class GraphSet(Strict):
    """Key -> SHA-256 of its artefact."""

    format: int = FORMAT
    artefacts: dict[str, Annotated[str, Field(pattern=_SHA256)]]


class Pointer(Strict):
    """`keys/<key>.json`: the artefact that somebody built for a key."""

    key: str
    artefact: str = Field(pattern=_SHA256)


@dataclass(frozen=True, slots=True)
class Written:
    """An artefact in the store: its digest, files and bytes, and how many of these bytes were new there."""

    digest: str
    num_files: int
    num_bytes: int
    new_bytes: int


def key_of(facts: Mapping[str, Any]) -> str:
    """32 hex digits of the SHA-256 over the facts as sorted JSON."""
    text = json.dumps(facts, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def pack(store: Store, folder: Path, facts: Mapping[str, Any], built: Mapping[str, Any]) -> Written:
    """Write a cache folder as the artefact of a key; blobs that the store has whole already are not sent again.

    Raises:
        EnvironmentFault: the folder is empty: nothing was compiled.
    """
    files, new_bytes = [], 0
    for path in cache_files(folder):
        packed = Packed(
            path=path.relative_to(folder).as_posix(), size_bytes=path.stat().st_size, sha256=sha256_of(path)
        )
        files.append(packed)
        new_bytes += packed.size_bytes if _send(store, packed, path) else 0
    if not files:
        raise EnvironmentFault(f"{folder}: the compiler left no file there; is its cache switched off?")
    artefact = Artefact(key=key_of(facts), facts=dict(facts), files=tuple(files), built=dict(built))
    digest = put_document(store, "artefacts", artefact)
    return Written(digest, len(files), sum(file.size_bytes for file in files), new_bytes)


def cache_files(folder: Path) -> Iterator[Path]:
    """The files of a compiler cache that another machine can use, in order of path; links are left out."""
    for path in sorted(folder.rglob("*")):
        if path.is_file() and not path.is_symlink() and not _SKIPPED.search(path.relative_to(folder).as_posix()):
            yield path


def put_document(store: Store, prefix: str, document: Strict) -> str:
    """Write a document under its own SHA-256, also over other bytes of that name; returns the SHA-256."""
    body = document.to_bytes()
    digest = hashlib.sha256(body).hexdigest()
    key = f"{prefix}/{digest}.json"
    try:
        store.create(key, body, content_type="application/json")
    except AlreadyExists:
        blob = store.get(key)
        if blob is None or blob.body != body:
            store.put(key, body, content_type="application/json")
    return digest


def get_document(store: Store, prefix: str, digest: str, kind: type[Document]) -> Document:
    """Read a document that must have this SHA-256.

    Raises:
        ArtefactRefused: it is missing, has other bytes, or is of another version.
    """
    place = f"{store.url}/{prefix}/{digest}.json"
    blob = store.get(f"{prefix}/{digest}.json")
    if blob is None:
        raise ArtefactRefused(f"{place}: missing; {_AGAIN}")
    found = hashlib.sha256(blob.body).hexdigest()
    if found != digest:
        raise ArtefactRefused(f"{place}: its SHA-256 is {found}: torn or changed, not used; {_AGAIN}")
    try:
        return kind.model_validate_json(blob.body)
    except ValidationError as error:
        raise ArtefactRefused(f"{place}: not a document of this version: {error}; {_AGAIN}") from error


def find_artefact(store: Store, digest: str, facts: Mapping[str, Any]) -> Artefact:
    """An artefact by its SHA-256, which must be of these facts.

    Raises:
        ArtefactRefused: torn, or foreign: built for something else, or with paths that lead elsewhere.
    """
    artefact = get_document(store, "artefacts", digest, Artefact)
    if artefact.key != key_of(facts) or artefact.facts != json.loads(json.dumps(dict(facts))):
        other = ", ".join(sorted(name for name in facts if artefact.facts.get(name) != facts[name])) or "key"
        raise ArtefactRefused(f"{store.url}/artefacts/{digest}.json is foreign: built for another {other}; not used")
    fault = path_fault([file.path for file in artefact.files])
    if fault is not None:
        raise ArtefactRefused(f"{store.url}/artefacts/{digest}.json is foreign or damaged: {fault}; not used; {_AGAIN}")
    return artefact


def path_fault(paths: Iterable[str]) -> str | None:
    """Why files of these relative paths cannot lie together in one folder, or None."""
    files: set[str] = set()
    folders: set[str] = set()
    for text in paths:
        path, shown = PurePosixPath(text), repr(text[:100])
        if not path.parts or path.is_absolute() or ".." in path.parts or "\\" in text:
            return f"path {shown} leads out of its folder"
        if path.as_posix() != text or not text.isprintable():
            return f"path {shown} is not written as a plain relative path"
        if max(len(part.encode()) for part in path.parts) > MAX_NAME_BYTES or len(text.encode()) > MAX_PATH_BYTES:
            return f"path {shown}... is longer than a file system takes"
        if text in files:
            return f"path {shown} stands there twice"
        files.add(text)
        folders.update(parent.as_posix() for parent in path.parents)
    both = sorted(files & folders)
    return f"path {both[0]!r} is a file and a folder" if both else None


def check_whole(store: Store, artefact: Artefact) -> None:
    """Look whether every file of an artefact is in the store with its own bytes.

    A store that keeps SHA-256 of its objects is asked for it; from any other the bytes are read.

    Raises:
        ArtefactRefused: with the first that is not.
    """
    files = {file.sha256: file for file in artefact.files}.values()
    with ThreadPoolExecutor(NUM_LOOKS, "graph-look") as pool:
        faults = pool.map(lambda file: blob_fault(store, file), files)
        fault = next((fault for fault in faults if fault is not None), None)
    if fault is not None:
        raise ArtefactRefused(f"{fault}; {_AGAIN}")


def blob_fault(store: Store, file: Packed) -> str | None:
    """What is wrong with a file's blob; None when it is whole."""
    key = blob_key(file.sha256)
    place = f"{store.url}/{key} ({file.path})"
    head = store.head(key)
    if head is None:
        return f"{place}: missing"
    if head.size_bytes != file.size_bytes:
        return f"{place}: torn, {head.size_bytes:,} bytes of {file.size_bytes:,}"
    found = head.sha256
    if found is None:
        with tempfile.TemporaryDirectory(prefix="batch-gen-look-") as folder:
            copy = Path(folder) / "blob"
            found = None if store.download(key, copy) is None else sha256_of(copy)
    return None if found == file.sha256 else f"{place}: changed, its SHA-256 is {found}"


def unpack(store: Store, artefact: Artefact, folder: Path) -> int:
    """Put the files of an artefact into a cache folder, each after its length and SHA-256 were found right.

    Returns:
        Bytes that were fetched; files that are there with the right content are not fetched again.

    Raises:
        ArtefactRefused: a file is missing or has other bytes, and never reaches the folder; or it has no place there.
        DiskFull: there is no space for it.
    """
    try:
        return _unpack(store, artefact, folder)
    except OSError as error:
        if error.errno in _NO_SPACE:
            raise DiskFull(f"{folder}: no space left for compiled graphs; free some, or set BATCH_GEN_CACHE") from error
        place = error.filename2 or error.filename or folder
        raise ArtefactRefused(
            f"{place}: {error.strerror or error}; the graphs cannot be put there, or their artefact is foreign or"
            f" damaged: remove {folder}, and if that does not help, {_AGAIN}"
        ) from error


def _unpack(store: Store, artefact: Artefact, folder: Path) -> int:
    folder.mkdir(parents=True, exist_ok=True)
    fetched = 0
    with tempfile.TemporaryDirectory(prefix=".fetch-", dir=folder.parent) as work:
        for file in artefact.files:
            target = folder / file.path
            if target.is_file() and target.stat().st_size == file.size_bytes and sha256_of(target) == file.sha256:
                continue
            arrived = Path(work) / file.sha256
            _fetch(store, file, arrived)
            target.parent.mkdir(parents=True, exist_ok=True)
            arrived.replace(target)
            fetched += file.size_bytes
    return fetched


def blob_key(sha256: str) -> str:
    """`blobs/<2 hex>/<sha256>`."""
    return f"blobs/{sha256[:2]}/{sha256}"


def _send(store: Store, file: Packed, path: Path) -> bool:
    """Store a file under its SHA-256; True when its bytes were sent: none were there, or damaged ones."""
    key = blob_key(file.sha256)
    try:
        store.create(key, path, sha256=file.sha256)
    except AlreadyExists:
        if blob_fault(store, file) is None:
            return False
        store.put(key, path)  # wrong bytes under the name of right ones: nobody can want them
    return True


def _fetch(store: Store, file: Packed, path: Path) -> None:
    key = blob_key(file.sha256)
    head = store.head(key)
    if head is None:
        raise ArtefactRefused(f"{store.url}/{key} ({file.path}): missing; {_AGAIN}")
    if head.size_bytes != file.size_bytes or store.download(key, path) is None or sha256_of(path) != file.sha256:
        raise ArtefactRefused(f"{store.url}/{key} ({file.path}): torn or changed, not used; {_AGAIN}")
