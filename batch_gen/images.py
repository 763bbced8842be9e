"""Images of a manifest: where they come from, what is read, and how they get the clip's size.

Read: JPEG, PNG, WebP, AVIF, BMP, TIFF and single-frame GIF. EXIF orientation is applied; transparency is laid over
white; grey, palette and CMYK become RGB; 16 bits become 8 by rounding. Refused: animations and several pages, floating
point, what is broken or cut off, and more than 100 million pixels.
"""

from __future__ import annotations

import hashlib
import io
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from batch_gen.errors import ClipFailed, StoreError
from batch_gen.layout import image_key
from batch_gen.storage.base import StoreOptions, open_store

if TYPE_CHECKING:
    from collections.abc import Mapping

    from PIL.Image import Image

    from batch_gen.request import RenderRequest
    from batch_gen.storage.base import Store

Pixels: TypeAlias = "npt.NDArray[np.uint8]"
ResizeRule: TypeAlias = Literal["crop", "fit", "exact"]

MAX_PIXELS: Final = 100_000_000
MAX_BYTES: Final = 256 << 20
FORMATS: Final = ("JPEG", "PNG", "WEBP", "AVIF", "BMP", "TIFF", "GIF")
COLUMNS: Final = ("image", "last_image")
_BACKGROUND: Final = (255, 255, 255, 255)
_PER_8_BIT: Final = 257  # 65535 / 255


class ImageFault(ValueError):
    """An image that is not taken, and why; a message's end, such as `is animated (12 frames); ...`."""


@dataclass(frozen=True, slots=True)
class ImageReader:
    """Finds the bytes of an image.

    Attributes:
        root: The run's output root, which keeps the bytes of binary cells; None where there is none yet.
        options: How `s3://` is reached.
        cells: Bytes of binary cells at hand, by `bytes:<sha256>`; they need no root.
    """

    root: Store | None
    options: StoreOptions
    cells: Mapping[str, bytes] = field(default_factory=dict)

    def read(self, source: str) -> bytes:
        """The bytes behind a path, an s3:// URI or `bytes:<sha256>`.

        Raises:
            ImageFault: They are not there, or too many.
            StoreError: The store cannot be reached.
        """
        if source.startswith("bytes:"):
            body = self.cells.get(source) or self._kept(source)
        elif source.lower().startswith("s3://"):
            folder, _, name = source.rpartition("/")
            blob = open_store(folder, self.options).get(name)
            body = None if blob is None else blob.body
        else:
            body = _file(Path(source))
        if body is None:
            raise ImageFault("does not exist")
        if len(body) > MAX_BYTES:
            raise ImageFault(f"has {len(body):,} bytes; at most {MAX_BYTES:,} are read")
        return body

    def _kept(self, source: str) -> bytes | None:
        digest = source.removeprefix("bytes:")
        blob = None if self.root is None else self.root.get(image_key(digest))
        if blob is None:
            return None
        if hashlib.sha256(blob.body).hexdigest() != digest:
            raise ImageFault("is damaged in the output root: its bytes have another SHA-256")
        return blob.body


def _file(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ImageFault(f"cannot be read ({error.strerror})") from error


def decode(body: bytes) -> Pixels:
    """An image file as uint8 RGB [H, W, 3], upright.

    Raises:
        ImageFault: It is broken, animated, too large or of a kind that is not read.
    """
    from PIL import ImageOps

    image = _opened(body)
    frames = getattr(image, "n_frames", 1)
    if frames > 1 and image.format != "MPO":  # a phone's MPO holds the picture first, then what belongs to it
        raise ImageFault(f"is animated or has several pages ({frames}); save the one frame that is meant")
    width, height = image.size
    if width * height > MAX_PIXELS:
        raise ImageFault(f"has {width}x{height} pixels, above {MAX_PIXELS:,}; make it smaller")
    try:
        image.load()
        upright = ImageOps.exif_transpose(image)
        return np.ascontiguousarray(np.asarray(_rgb(upright)))
    except ImageFault:
        raise
    except Exception as error:  # parsers of foreign files raise anything
        raise ImageFault(f"is broken or cut off ({_reason(error)})") from error


def _opened(body: bytes) -> Image:
    from PIL import Image as Pil

    if not body:
        raise ImageFault("is an empty file")
    Pil.init()  # all formats are known after this, once per process
    try:
        return Pil.open(io.BytesIO(body), formats=FORMATS)
    except (Pil.DecompressionBombError, Pil.DecompressionBombWarning) as error:
        raise ImageFault(f"has more than {MAX_PIXELS:,} pixels; make it smaller") from error
    except Exception as error:  # parsers of foreign files raise anything
        raise ImageFault("is no image that is read here: JPEG, PNG, WebP, AVIF, BMP, TIFF or GIF, whole") from error


def _rgb(image: Image) -> Image:
    from PIL import Image as Pil

    if image.mode == "F":
        raise ImageFault("has floating point pixels; save it with 8 or 16 bits")
    if image.mode.startswith("I"):
        values = np.asarray(image).astype(np.int64)
        if values.min() < 0 or values.max() > np.iinfo(np.uint16).max:
            raise ImageFault("has more than 16 bits per pixel; save it with 8 or 16 bits")
        image = Pil.fromarray(((values + _PER_8_BIT // 2) // _PER_8_BIT).astype(np.uint8))
    if image.has_transparency_data:
        over = image.convert("RGBA")
        image = Pil.alpha_composite(Pil.new("RGBA", over.size, _BACKGROUND), over)
    return image.convert("RGB")


def _reason(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0][:120]


def fitted_size(image_px: tuple[int, int], clip_px: tuple[int, int], multiple: int) -> tuple[int, int]:
    """Width and height of a clip with the image's aspect and about the area of `clip_px`, in multiples.

    Source: diffusers' Wan image-to-video example, like the official code: both sides are rounded down.
    """
    (wide, tall), area = image_px, clip_px[0] * clip_px[1]
    sides = (round((area * wide / tall) ** 0.5), round((area * tall / wide) ** 0.5))
    width, height = (max(multiple, side // multiple * multiple) for side in sides)
    return width, height


def resize(pixels: Pixels, width: int, height: int, rule: ResizeRule) -> Pixels:
    """The image at the clip's size: [height, width, 3].

    crop, fit: scaled to cover the frame (Lanczos), the rest cut off evenly; exact: taken as it is.

    Raises:
        ImageFault: `exact`, and the size is another.
    """
    from PIL import Image as Pil

    tall, wide = pixels.shape[:2]
    if (wide, tall) == (width, height):
        return pixels
    if rule == "exact":
        raise ImageFault(f"has {wide}x{tall} pixels, the clip {width}x{height}; --resize crop or fit scales it")
    scale = min(wide / width, tall / height)
    left, top = (wide - width * scale) / 2, (tall - height * scale) / 2
    box = (left, top, left + width * scale, top + height * scale)
    scaled = Pil.fromarray(pixels).resize((width, height), Pil.Resampling.LANCZOS, box=box)
    return np.asarray(scaled)


def images_of(request: RenderRequest, reader: ImageReader, rule: ResizeRule) -> tuple[list[Pixels], list[Any]]:
    """The images of a request at its size, first then last, and what its record says of each.

    Raises:
        ClipFailed: An image is gone or not what it was at validation.
    """
    found: list[Pixels] = []
    told: list[Any] = []
    for column in COLUMNS:
        source = getattr(request, column)
        if source is None:
            continue
        try:
            body = reader.read(source)
            pixels = decode(body)
            found.append(resize(pixels, request.width, request.height, rule))
        except ImageFault as error:
            raise ClipFailed("input", f"clip {request.clip_id}: {column} {source} {error}") from error
        except StoreError as error:
            raise ClipFailed("store", f"clip {request.clip_id}: {column} {source}: {error.message}") from error
        size = [pixels.shape[1], pixels.shape[0]]
        told.append({"column": column, "sha256": hashlib.sha256(body).hexdigest(), "size_px": size, "resize": rule})
    return found, told
