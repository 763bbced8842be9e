"""What is written beside a clip: its record, the proof that the clip exists."""

from __future__ import annotations

from typing import Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field

RECORD_FORMAT: Final = 1


class Strict(BaseModel):
    """Base of everything that is read back from an output root: no unknown field passes unseen."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    def to_bytes(self) -> bytes:
        """The document as UTF-8 JSON with one field a line, for people who look into an output root."""
        return self.model_dump_json(indent=1).encode() + b"\n"


class FileEntry(Strict):
    """The clip's file: its key below the output root, length and SHA-256 in hex."""

    key: str
    bytes: int = Field(ge=0)
    sha256: str


class Record(Strict):
    """`<clip_id>.json`, written after the file; a clip without it does not exist.

    Attributes:
        request: The whole request, as `RenderRequest.to_json`; `reproduce` needs nothing else.
        request_digest: Digest of what decides the pixels.
        fingerprint: Of the run's settings; `numerics_key` of what else can change bits on this machine.
        frames_hash: SHA-256 of a header (frames, height, width, RGB24) and the raw frames.
        timings: Stage -> seconds.
        metrics: Everything else that was measured, and flags such as `truncated`.
        attempt: Which start of this clip made it, from 1; `epoch` is that of the lease.
        versions: Of code and libraries.
        extra: The row's columns that are not ours.
    """

    format: int = RECORD_FORMAT
    clip_id: str
    row_id: str
    sample: int = Field(ge=0)
    status: Literal["committed"] = "committed"
    request: dict[str, Any]
    request_digest: str
    fingerprint: str
    numerics_key: str
    frames_hash: str
    file: FileEntry
    timings: dict[str, float] = Field(default_factory=dict)
    metrics: dict[str, Any] = Field(default_factory=dict)
    attempt: int = Field(1, ge=1)
    epoch: int = Field(1, ge=1)
    worker: str = ""
    versions: dict[str, str] = Field(default_factory=dict)
    extra: dict[str, Any] = Field(default_factory=dict)


class Verdict(Strict):
    """How a clip ended: committed, or quarantined with the kind and retry class of its last failure.

    Attributes:
        attempts: Starts until then; 0 when an earlier owner of the chunk committed it.
    """

    status: Literal["committed", "quarantined"]
    kind: str = ""
    retry_class: str = ""
    message: str = ""
    attempts: int = Field(0, ge=0)
