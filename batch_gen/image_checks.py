"""Every image of a manifest, looked at before anything is rendered: faults by row, sizes for `--resize fit`."""

from __future__ import annotations

import dataclasses
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

from batch_gen.errors import Fault, ManifestError
from batch_gen.images import COLUMNS, ImageFault, ImageReader, ResizeRule, decode, fitted_size
from batch_gen.layout import image_key
from batch_gen.rule_checks import shown
from batch_gen.storage.base import AlreadyExists

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from batch_gen.manifest import Location, Manifest
    from batch_gen.request import RenderRequest
    from batch_gen.storage.base import Store

Size: TypeAlias = "tuple[int, int]"  # width, height in pixels, upright
Verdict: TypeAlias = "Size | str"  # or why the image is not taken

_THREADS = 8
MAX_SHOWN = 56


@dataclass(frozen=True, slots=True)
class ImageTable:
    """What was found out about the images of a manifest.

    Attributes:
        rule: How they get a clip's size.
        multiple: Of a clip's width and height.
        sizes: Size by source.
    """

    rule: ResizeRule = "crop"
    multiple: int = 1
    sizes: Mapping[str, Size] = field(default_factory=dict)

    def placed(self, request: RenderRequest) -> RenderRequest:
        """The request with the size that its first image gives it under `fit`; else as it is."""
        size = None if request.image is None else self.sizes.get(request.image)
        if self.rule != "fit" or size is None:
            return request
        width, height = fitted_size(size, (request.width, request.height), self.multiple)
        return dataclasses.replace(request, width=width, height=height)


def check_images(manifest: Manifest, reader: ImageReader, rule: ResizeRule) -> ImageTable:
    """Read every image of the wanted clips once, whole.

    Raises:
        ManifestError: With every image that is missing, broken or of the wrong size, by row.
        StoreError: S3 cannot be reached.
    """
    multiple = manifest.limits.size_multiple
    if all(bucket.conditioning == "text" for bucket in manifest.survey.buckets):
        return ImageTable(rule, multiple)
    verdicts: dict[str, Verdict] = {source: judge(body) for source, body in manifest.iter_image_bytes()}
    named = {source: None for _, request in manifest.iter_located_requests() for _, source in _sources(request)}
    missing = [source for source in named if source not in verdicts]
    with ThreadPoolExecutor(_THREADS, "image") as pool:
        verdicts |= zip(missing, pool.map(lambda source: _read(reader, source), missing), strict=True)
    faults = list(_faults(manifest, verdicts, rule))
    if faults:
        raise ManifestError(faults)
    return ImageTable(rule, multiple, {source: size for source, size in verdicts.items() if not isinstance(size, str)})


def judge(body: bytes) -> Verdict:
    """Size of an image, or why it is not taken."""
    try:
        height, width, _ = decode(body).shape
    except ImageFault as fault:
        return str(fault)
    return width, height


def _read(reader: ImageReader, source: str) -> Verdict:
    try:
        return judge(reader.read(source))
    except ImageFault as fault:
        return str(fault)


def _sources(request: RenderRequest) -> Iterator[tuple[str, str]]:
    for column in COLUMNS:
        source = getattr(request, column)
        if source is not None:
            yield column, source


def _faults(manifest: Manifest, verdicts: Mapping[str, Verdict], rule: ResizeRule) -> Iterator[Fault]:
    last: Location | None = None
    for location, request in manifest.iter_located_requests():
        if location == last:
            continue  # another sample of the row
        last = location
        file = manifest.files[location.file_index].source.name
        for column, source in _sources(request):
            message = _message(verdicts[source], request, rule)
            if message is not None:
                yield Fault(file, location.row, column, shown(_tail(source)), message)


def _tail(source: str) -> str:
    """The end of a long path, which holds the name."""
    return source if len(source) <= MAX_SHOWN else f"...{source[3 - MAX_SHOWN :]}"


def _message(verdict: Verdict, request: RenderRequest, rule: ResizeRule) -> str | None:
    if isinstance(verdict, str):
        return verdict
    size = (request.width, request.height)
    if rule == "exact" and verdict != size:
        found, wanted = (f"{width}x{height}" for width, height in (verdict, size))
        return f"has {found} pixels, the clip {wanted}; --resize crop or fit scales it"
    return None


def keep_images(store: Store, manifest: Manifest) -> None:
    """Put the bytes of binary cells into the output root, each once, under its SHA-256.

    The plan names them by digest alone, and a worker that resumes may not have the manifest.
    """
    for source, body in manifest.iter_image_bytes():
        key = image_key(source.removeprefix("bytes:"))
        if store.head(key) is not None:
            continue
        try:
            store.create(key, body)
        except AlreadyExists:
            continue  # another worker was first, with the same bytes
