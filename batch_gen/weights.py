"""Weights that are not on this machine yet: from S3 by parallel ranged reads, or from a Hugging Face repository.

A cache folder per source, one download at a time per machine (a lock), resumable by blocks: what a killed download
left behind is taken up where it was. Nothing but configuration files, tokenizers and safetensors is fetched.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import filelock

from batch_gen.environment import cache_folder
from batch_gen.errors import CheckpointError, StoreError
from batch_gen.storage.base import Head, Store, StoreOptions, open_store, sha256_of

log = logging.getLogger(__name__)
BLOCK_BYTES = 16 << 20
NUM_READERS = 8
CONFIG_SUFFIXES = (".json", ".model", ".txt")
SUFFIXES = (*CONFIG_SUFFIXES, ".safetensors")
MAX_KEYS = 10_000
REPORT_EVERY_S = 10.0


@dataclass(slots=True)
class Transfer:
    """One file on its way: which blocks are there is kept beside the file, so that a killed download goes on."""

    store: Store
    key: str
    head: Head
    path: Path

    @property
    def part(self) -> Path:
        """The file in the making."""
        return self.path.with_name(self.path.name + ".part")

    @property
    def journal(self) -> Path:
        """Version of the source and the blocks that are complete."""
        return self.path.with_name(self.path.name + ".blocks")

    def missing(self) -> Iterator[int]:
        """Numbers of the blocks that are not there yet."""
        done = self._done_blocks()
        with self.part.open("r+b" if self.part.exists() else "w+b") as file:
            file.truncate(self.head.size_bytes)
        yield from (number for number in range(-(-self.head.size_bytes // BLOCK_BYTES)) if number not in done)

    def fetch(self, number: int) -> int:
        """Read one block into its place; returns its length.

        Raises:
            StoreError: the object vanished or is shorter than its head said.
        """
        start = number * BLOCK_BYTES
        wanted = min(BLOCK_BYTES, self.head.size_bytes - start)
        body = self.store.read_range(self.key, start, wanted)
        if body is None or len(body) != wanted:
            raise StoreError(f"{self.store.url}/{self.key}: block at {start} came back short; try again")
        with self.part.open("r+b") as file:
            os.pwrite(file.fileno(), body, start)
        with self.journal.open("a", encoding="utf-8") as journal:
            journal.write(f"{number}\n")
        return wanted

    def finish(self) -> None:
        """Check the whole file and give it its name.

        Raises:
            CheckpointError: its SHA-256 is not the one that the store knows.
        """
        if self.head.sha256 is not None and sha256_of(self.part) != self.head.sha256:
            self.part.unlink()
            self.journal.unlink()
            raise CheckpointError(f"{self.store.url}/{self.key}: the file that arrived has another SHA-256; try again")
        self.part.replace(self.path)
        self.journal.unlink(missing_ok=True)

    def _done_blocks(self) -> set[int]:
        version = f"{self.head.etag} {self.head.size_bytes} {BLOCK_BYTES}"
        try:
            lines = self.journal.read_text("utf-8").splitlines()
        except OSError:
            lines = []
        if not self.part.exists() or not lines or lines[0] != version:
            self.part.unlink(missing_ok=True)
            self.journal.write_text(version + "\n", "utf-8")
            return set()
        return {int(line) for line in lines[1:] if line.isdigit()}


def fetch_from_store(url: str, options: StoreOptions, *, weights: bool = True) -> Path:
    """Bring a checkpoint in diffusers layout from `s3://bucket/prefix` to the cache; returns its folder.

    Without `weights` only its configuration and tokenizer come, into a folder of their own.

    Raises:
        CheckpointError: there is no checkpoint, or a file does not arrive as it is in the store.
        StoreError: the store cannot be reached.
    """
    store = open_store(url, options)
    name = f"{_slug(url)}-{hashlib.sha256(url.encode()).hexdigest()[:12]}"
    folder = cache_folder() / "checkpoints" / (name if weights else f"{name}-config")
    folder.mkdir(parents=True, exist_ok=True)
    with filelock.FileLock(folder.with_suffix(".lock")):
        keys = _wanted_keys(store, SUFFIXES if weights else CONFIG_SUFFIXES)
        state = folder / ".fetched"
        known = _read_state(state)
        transfers = []
        for key in keys:
            head, path = store.head(key), folder / key
            if head is not None and (known.get(key) != head.etag or not path.exists()):
                path.parent.mkdir(parents=True, exist_ok=True)
                transfers.append(Transfer(store, key, head, path))
        for transfer in _transfer_all(transfers):  # noted one by one: a killed download keeps the files that are whole
            known[transfer.key] = transfer.head.etag
            _write_state(state, known)
        _drop_strangers(folder, set(keys))
        _write_state(state, {key: known[key] for key in keys if key in known})
    return folder


def fetch_from_hub(name: str, *, weights: bool = True) -> Path:
    """Bring a checkpoint from a Hugging Face repository `owner/name` to the cache; returns its folder.

    Raises:
        CheckpointError: no network, no such repository, or no permission.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    folder = cache_folder() / "checkpoints" / f"hub-{name.replace('/', '--')}{'' if weights else '-config'}"
    suffixes = SUFFIXES if weights else CONFIG_SUFFIXES
    try:
        snapshot_download(name, local_dir=folder, allow_patterns=[f"*{suffix}" for suffix in suffixes])
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError, ValueError) as error:
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise CheckpointError(
            f"--model {name}: neither a folder here nor to be had from the Hugging Face hub ({first});"
            " give a folder or an s3:// prefix, or check name, network and token"
        ) from error
    return folder


def _transfer_all(transfers: list[Transfer]) -> Iterator[Transfer]:
    """Fetch file after file; yields each when it is whole."""
    total = sum(transfer.head.size_bytes for transfer in transfers)
    if not transfers:
        return
    began = reported = time.monotonic()
    moved = 0
    with ThreadPoolExecutor(NUM_READERS, "weights") as pool:
        for transfer in transfers:
            for num_bytes in pool.map(transfer.fetch, list(transfer.missing())):
                moved += num_bytes
                if time.monotonic() - reported > REPORT_EVERY_S:
                    reported = time.monotonic()
                    log.warning("weights: %.1f of %.1f GB", moved / 1e9, total / 1e9)
            transfer.finish()
            yield transfer
    seconds = time.monotonic() - began
    log.info("weights fetched", extra={"fields": {"bytes": moved, "seconds": round(seconds, 2)}})


def _wanted_keys(store: Store, suffixes: tuple[str, ...]) -> list[str]:
    keys: list[str] = []
    for listed in store.list(""):
        if len(keys) >= MAX_KEYS:
            raise CheckpointError(f"{store.url}: more than {MAX_KEYS} files; is this a checkpoint?")
        if listed.key.endswith(suffixes) and ".." not in listed.key.split("/") and not listed.key.startswith("/"):
            keys.append(listed.key)
    if "model_index.json" not in keys:
        raise CheckpointError(f"{store.url}: no model_index.json; expected a checkpoint in diffusers layout")
    return keys


def _drop_strangers(folder: Path, keys: set[str]) -> None:
    for path in folder.rglob("*"):
        if path.is_file() and path.suffix in SUFFIXES and path.relative_to(folder).as_posix() not in keys:
            path.unlink()


def _read_state(path: Path) -> dict[str, str]:
    try:
        state = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    return state if isinstance(state, dict) else {}


def _write_state(path: Path, state: dict[str, str]) -> None:
    partial = path.with_suffix(".part")
    partial.write_text(json.dumps(state), "utf-8")
    partial.replace(path)


def _slug(name: str) -> str:
    return "".join(char if char.isalnum() or char in ".-" else "-" for char in name.removeprefix("s3://"))[:60]
