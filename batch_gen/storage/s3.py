"""A store on S3 or a server that speaks S3, through boto3's plain `put_object`.

Rules that public clients got wrong, kept here in one place:

- 409 is not "exists": somebody else's write was in the way. The same request goes again.
- A 412 after a retry of our own may be our own earlier write whose answer got lost; so may a timeout or a 5xx. Only the
  stored content tells: equal SHA-256 means that we won.
- A missing key under If-Match is 404 on AWS and 412 elsewhere: both are a conflict.
- A 403 for a missing key means that s3:ListBucket is not allowed: it is no permission to guess.
"""

from __future__ import annotations

import base64
import contextlib
import email.utils
import functools
import io
import random
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Final, TypeVar

import boto3
import botocore.loaders
import botocore.session
from botocore.config import Config
from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    FlexibleChecksumError,
    IncompleteReadError,
    NoCredentialsError,
    PartialCredentialsError,
    ReadTimeoutError,
    ResponseStreamingError,
)

from batch_gen.errors import EnvironmentFault, StoreError, UsageError
from batch_gen.storage.base import (
    COPY_BLOCK_BYTES,
    AlreadyExists,
    Blob,
    Body,
    ChecksumMismatch,
    Conflict,
    Head,
    ListedKey,
    StoreOptions,
    sha256_of,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from batch_gen.storage.base import OnBlock

NUM_TRIES_409: Final = 8
NUM_TRIES_READ: Final = 6
BASE_WAIT_S: Final = 0.05
MAX_WAIT_S: Final = 2.0
T = TypeVar("T")
_BROKEN_OFF: Final = (IncompleteReadError, ResponseStreamingError, ReadTimeoutError, FlexibleChecksumError)
_MISSING: Final = {"NoSuchKey", "404", "NotFound"}
_CHECKSUM_CODES: Final = {"BadDigest", "XAmzContentChecksumMismatch", "InvalidDigest", "XAmzContentSHA256Mismatch"}
_PERMANENT: Final = {
    "NoSuchBucket", "InvalidAccessKeyId", "SignatureDoesNotMatch", "RequestTimeTooSkewed", "InvalidBucketName"
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Write:
    """One put_object: the key below the root, its body and what goes with it."""

    key: str
    body: Body
    sha256: str
    arguments: Mapping[str, Any]
    on_block: OnBlock | None = None

    def open(self) -> BinaryIO:
        """The body as a seekable stream, so that botocore can send it again."""
        if not isinstance(self.body, Path):
            return io.BytesIO(self.body)
        if self.on_block is None:
            return self.body.open("rb")
        file = _Watched(self.body)
        file.on_block = self.on_block
        return file


class _Watched(io.FileIO):
    """A file that tells of each block that is read from it."""

    on_block: OnBlock

    def read(self, size: int | None = -1, /) -> bytes:
        """As a file."""
        self.on_block()
        return super().read(size)


class S3Store:
    """Objects below `s3://bucket/prefix`.

    Args:
        bucket: Name of the bucket.
        prefix: Everything before our keys, without slashes at the ends; may be empty.
        options: Endpoint, timeouts, retries, and whether the server keeps conditions.
        sleep: Waits between tries after a 409; tests pass their own.
    """

    def __init__(
        self, bucket: str, prefix: str, options: StoreOptions, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        self._bucket = bucket
        self._prefix = prefix.strip("/")
        self._options = options
        self._sleep = sleep
        session = _session()
        self._small = _client(session, options, options.small_read_timeout_s)
        self._large = _client(session, options, options.large_read_timeout_s)

    @classmethod
    def open(cls, path: str, options: StoreOptions) -> S3Store:
        """The store of `bucket/prefix` (a URL without its scheme)."""
        bucket, _, prefix = path.partition("/")
        if not bucket:
            raise UsageError(f"s3://{path}: no bucket; use s3://bucket/prefix")
        return cls(bucket, prefix, options)

    @property
    def url(self) -> str:
        """The root, as a user may type it."""
        return f"s3://{self._bucket}/{self._prefix}".rstrip("/")

    def get(self, key: str) -> Blob | None:
        """See `Store.get`."""

        def read() -> Blob:
            answer = self._small.get_object(Bucket=self._bucket, Key=self._full(key))
            return Blob(answer["Body"].read(), answer["ETag"])

        return self._read(key, read)

    def head(self, key: str) -> Head | None:
        """See `Store.head`."""

        def read() -> Head:
            return _head(self._small.head_object(Bucket=self._bucket, Key=self._full(key), ChecksumMode="ENABLED"))

        return self._read(key, read)

    def download(self, key: str, path: Path) -> Head | None:
        """See `Store.download`."""

        def read() -> Head:
            answer = self._large.get_object(Bucket=self._bucket, Key=self._full(key), ChecksumMode="ENABLED")
            with path.open("wb") as target:
                for block in answer["Body"].iter_chunks(COPY_BLOCK_BYTES):
                    target.write(block)
            return _head(answer)

        return self._read(key, read)

    def read_range(self, key: str, start: int, num_bytes: int) -> bytes | None:
        """See `Store.read_range`."""

        def read() -> bytes:
            span = f"bytes={start}-{start + num_bytes - 1}"
            body: bytes = self._large.get_object(Bucket=self._bucket, Key=self._full(key), Range=span)["Body"].read()
            return body

        return self._read(key, read)

    def create(
        self,
        key: str,
        body: Body,
        *,
        content_type: str = "application/octet-stream",
        metadata: Mapping[str, str] | None = None,
        sha256: str | None = None,
        on_block: OnBlock | None = None,
    ) -> str:
        """See `Store.create`; one put_object, so at most 5 GB."""
        arguments: dict[str, Any] = {"ContentType": content_type, "Metadata": dict(metadata or {})}
        if self._options.conditional:
            arguments["IfNoneMatch"] = "*"
        elif self.head(key) is not None:
            raise AlreadyExists(key)
        etag = self._write(_Write(key, body, sha256 or sha256_of(body), arguments, on_block))
        if etag is None:
            raise AlreadyExists(key)
        return etag

    def replace(self, key: str, body: bytes, etag: str) -> str:
        """See `Store.replace`."""
        arguments: dict[str, Any] = {"ContentType": "application/json"}
        if self._options.conditional:
            arguments["IfMatch"] = etag
        elif (head := self.head(key)) is None or head.etag != etag:
            raise Conflict(key)
        new_etag = self._write(_Write(key, body, sha256_of(body), arguments))
        if new_etag is None:
            raise Conflict(key)
        return new_etag

    def put(self, key: str, body: Body, *, content_type: str = "application/octet-stream") -> str:
        """See `Store.put`."""
        etag = self._write(_Write(key, body, sha256_of(body), {"ContentType": content_type}))
        if etag is None:
            raise StoreError(f"{self.url}/{key}: the server refused a write without condition as if it had one")
        return etag

    def list(self, prefix: str) -> Iterator[ListedKey]:
        """See `Store.list`."""
        skip = len(self._full(""))
        with self._explained(prefix):
            pages = self._small.get_paginator("list_objects_v2").paginate(
                Bucket=self._bucket, Prefix=self._full(prefix)
            )
            for page in pages:
                for entry in page.get("Contents", []):
                    yield ListedKey(entry["Key"][skip:], entry["Size"])

    def delete(self, key: str) -> None:
        """See `Store.delete`."""
        with self._explained(key):
            self._small.delete_object(Bucket=self._bucket, Key=self._full(key))

    def clock_offset_s(self) -> float | None:
        """See `Store.clock_offset_s`; from the Date header of one answer, to the second."""
        with self._explained(""):
            answer = self._small.list_objects_v2(Bucket=self._bucket, Prefix=self._full(".probe/"), MaxKeys=1)
        date = answer["ResponseMetadata"]["HTTPHeaders"].get("date")
        return None if date is None else email.utils.parsedate_to_datetime(date).timestamp() - time.time()

    def _full(self, key: str) -> str:
        return f"{self._prefix}/{key}" if self._prefix else key

    def _read(self, key: str, read: Callable[[], T]) -> T | None:
        """Read, None when the key is missing; botocore does not try again when an answer breaks off in its body."""
        for number in range(NUM_TRIES_READ):
            with self._explained(key):
                try:
                    return read()
                except ClientError as error:
                    if _code(error) in _MISSING:
                        return None
                    raise
                except _BROKEN_OFF:
                    if number == NUM_TRIES_READ - 1:
                        raise
            self._sleep(random.uniform(0.5, 1.0) * BASE_WAIT_S * 2**number)
        return None

    def _write(self, write: _Write) -> str | None:
        """Put an object; return its etag, None when the condition failed for good."""
        for number in range(NUM_TRIES_409):
            try:
                return self._send(write)
            except ClientError as error:
                if _status(error) != 409:
                    return self._refused(write, error, retried=number > 0 or _num_retries(error) > 0)
            except BotoCoreError as error:
                return self._unanswered(write, error)
            self._sleep(random.uniform(0.5, 1.0) * min(BASE_WAIT_S * 2**number, MAX_WAIT_S))
        raise StoreError(f"{self.url}/{write.key}: {NUM_TRIES_409} times in a row another write was in the way (409)")

    def _send(self, write: _Write) -> str:
        large = isinstance(write.body, Path)
        checksum = base64.b64encode(bytes.fromhex(write.sha256)).decode()
        with write.open() as stream:
            answer = (self._large if large else self._small).put_object(
                Bucket=self._bucket, Key=self._full(write.key), Body=stream, ChecksumSHA256=checksum, **write.arguments
            )
        if large and self._options.read_back and not self._is_ours(write):
            self.delete(write.key)
            raise ChecksumMismatch(f"{self.url}/{write.key}: what the server stored is not what was sent")
        return str(answer["ETag"])

    def _refused(self, write: _Write, error: ClientError, *, retried: bool) -> str | None:
        """An answer with an error: decide between lost, won after all, and broken."""
        status, code = _status(error), _code(error)
        if code in _CHECKSUM_CODES:
            raise ChecksumMismatch(f"{self.url}/{write.key}: {error}") from error
        if status == 412 or (status == 404 and code in _MISSING):
            return self._own_etag(write) if retried else None
        if status >= 500:
            return self._unanswered(write, error)
        raise _explain(f"{self.url}/{write.key}", error) from error

    def _unanswered(self, write: _Write, error: Exception) -> str:
        """No clear answer: the write may have happened all the same."""
        with contextlib.suppress(StoreError):
            if etag := self._own_etag(write):
                return etag
        raise _explain(f"{self.url}/{write.key}", error) from error

    def _own_etag(self, write: _Write) -> str | None:
        """The etag when what is stored is what we wrote."""
        head = self.head(write.key)
        return head.etag if head is not None and self._is_ours(write) else None

    def _is_ours(self, write: _Write) -> bool:
        head = self.head(write.key)
        if head is not None and head.sha256 is not None and not self._options.read_back:
            return head.sha256 == write.sha256
        blob = self.get(write.key)
        return blob is not None and sha256_of(blob.body) == write.sha256

    @contextlib.contextmanager
    def _explained(self, key: str) -> Iterator[None]:
        """Turn what boto3 raises into an error of the product."""
        place = f"{self.url}/{key}"
        try:
            yield
        except (ClientError, BotoCoreError, OSError) as error:
            raise _explain(place, error) from error


@functools.cache
def _loader() -> Any:
    """The reader of botocore's service descriptions, which take a fifth of a second to parse; kept for all stores."""
    return botocore.loaders.create_loader()


def _session() -> Any:
    """A session of its own for every store, so that credentials are found anew and refreshed by the provider chain."""
    core = botocore.session.get_session()
    core.register_component("data_loader", _loader())
    return boto3.session.Session(botocore_session=core)


def _client(session: Any, options: StoreOptions, read_timeout_s: float) -> Any:
    path_style = options.path_style if options.path_style is not None else options.endpoint_url is not None
    config = Config(
        connect_timeout=options.connect_timeout_s,
        read_timeout=read_timeout_s,
        retries={"mode": "standard", "max_attempts": options.max_attempts},
        max_pool_connections=options.max_connections,
        request_checksum_calculation=options.checksum,  # type: ignore[arg-type]
        response_checksum_validation=options.checksum,  # type: ignore[arg-type]
        s3={"addressing_style": "path" if path_style else "auto"},
    )
    client = session.client("s3", endpoint_url=options.endpoint_url, region_name=options.region, config=config)
    client.meta.events.register("provide-client-params.s3", functools.partial(_add_studio_params, options))
    return client


def _add_studio_params(options: StoreOptions, params: dict[str, Any], model: Any, **_: Any) -> dict[str, Any]:
    """What a studio's bucket wants of every request: owner, payer; and of every write: key, class, tags."""
    added = dict(params)
    if options.bucket_owner is not None:
        added["ExpectedBucketOwner"] = options.bucket_owner
    if options.requester_pays:
        added["RequestPayer"] = "requester"
    if model.name == "PutObject":
        if options.kms_key is not None:
            added |= {"ServerSideEncryption": "aws:kms", "SSEKMSKeyId": options.kms_key}
        if options.storage_class is not None:
            added["StorageClass"] = options.storage_class
        if options.tags is not None:
            added["Tagging"] = options.tags
    return added


def _head(answer: Mapping[str, Any]) -> Head:
    checksum = answer.get("ChecksumSHA256")
    sha256 = base64.b64decode(checksum).hex() if checksum and "-" not in checksum else None
    return Head(answer["ContentLength"], answer["ETag"], sha256, dict(answer.get("Metadata", {})))


def _status(error: ClientError) -> int:
    return int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))


def _code(error: ClientError) -> str:
    return str(error.response.get("Error", {}).get("Code", ""))


def _num_retries(error: ClientError) -> int:
    return int(error.response.get("ResponseMetadata", {}).get("RetryAttempts", 0))


def _explain(place: str, error: Exception) -> StoreError | EnvironmentFault:
    """What an error of boto3 means and what to do about it."""
    if isinstance(error, NoCredentialsError | PartialCredentialsError):
        hint = "set AWS_PROFILE, or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or run under a role"
        return EnvironmentFault(f"{place}: no AWS credentials; {hint}")
    if not isinstance(error, ClientError):
        return StoreError(f"{place}: {error}")
    if _code(error) in _PERMANENT:
        return EnvironmentFault(f"{place}: {error}")
    if _status(error) == 403:
        hint = "allow s3:GetObject, s3:PutObject, s3:DeleteObject and s3:ListBucket (without it a missing key is 403)"
        return EnvironmentFault(f"{place}: access denied ({_code(error)}); {hint}")
    return StoreError(f"{place}: {error}")
