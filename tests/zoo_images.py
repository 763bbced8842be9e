"""Image files of every kind that turns up in a manifest, made here: good ones with what they show, bad ones with why."""

from __future__ import annotations

import io
import struct
import zlib
from typing import TYPE_CHECKING

import numpy as np
from PIL import Image

if TYPE_CHECKING:
    from collections.abc import Callable

WIDTH, HEIGHT = 60, 40


def picture() -> np.ndarray:
    """[40, 60, 3]: quarters of red, green, blue and grey, so that every turn and mirror shows."""
    pixels = np.zeros((HEIGHT, WIDTH, 3), np.uint8)
    pixels[:20, :30], pixels[:20, 30:] = (220, 20, 20), (20, 220, 20)
    pixels[20:, :30], pixels[20:, 30:] = (20, 20, 220), (128, 128, 128)
    return pixels


def grey() -> np.ndarray:
    """[40, 60] uint8: a ramp."""
    return np.broadcast_to(np.linspace(0, 255, WIDTH).round().astype(np.uint8), (HEIGHT, WIDTH)).copy()


def saved(image: Image.Image, kind: str, **options: object) -> bytes:
    """The bytes of a file."""
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def colour(kind: str, **options: object) -> bytes:
    """The picture as a file of some kind."""
    return saved(Image.fromarray(picture()), kind, **options)


def turned(orientation: int) -> bytes:
    """A PNG whose pixels are stored turned, with the EXIF mark that turns them upright."""
    undo = {3: Image.Transpose.ROTATE_180, 6: Image.Transpose.ROTATE_90, 8: Image.Transpose.ROTATE_270}
    exif = Image.Exif()
    exif[0x0112] = orientation
    return saved(Image.fromarray(picture()).transpose(undo[orientation]), "PNG", exif=exif)


def see_through() -> bytes:
    """The picture in RGBA; its left half is invisible, though it has colours."""
    alpha = np.where(np.arange(WIDTH) < 30, 0, 255).astype(np.uint8)
    layers = np.dstack([picture(), np.broadcast_to(alpha, (HEIGHT, WIDTH))])
    return saved(Image.fromarray(layers), "PNG")


def over_white() -> np.ndarray:
    """What `see_through` shows."""
    pixels = picture()
    pixels[:, :30] = 255
    return pixels


def palette(*, transparent: bool) -> bytes:
    """The picture with 8 colours; with `transparent` the first pixel's colour is none."""
    image = Image.fromarray(picture()).convert("P", palette=Image.Palette.ADAPTIVE, colors=8)
    return saved(image, "PNG", **({"transparency": image.getpixel((0, 0))} if transparent else {}))


def palette_gif() -> bytes:
    """The picture, whose four colours fit a GIF."""
    return saved(Image.fromarray(picture()).convert("P", palette=Image.Palette.ADAPTIVE, colors=4), "GIF")


def deep_grey() -> bytes:
    """16 bits: the ramp, 257 times as large and a little less than half a step off."""
    values = grey().astype(np.uint16) * 257
    return saved(Image.fromarray(np.where(values < 65000, values + 100, values).astype(np.uint16)), "PNG")


def deep_colour() -> bytes:
    """A PNG with 16 bits per channel, written by hand: Pillow does not."""
    rows = picture().astype(">u2") * 257
    raw = b"".join(b"\0" + row.tobytes() for row in rows)

    def chunk(name: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))

    head = struct.pack(">IIBBBBB", WIDTH, HEIGHT, 16, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(raw)) + chunk(b"IEND", b"")


def animated(kind: str) -> bytes:
    """Three frames."""
    first, *rest = (Image.fromarray(np.roll(picture(), 9 * k, axis=1)) for k in range(3))
    return saved(first, kind, save_all=True, append_images=rest)


def huge() -> bytes:
    """A PNG whose head promises 30,000 x 30,000 pixels."""
    body = bytearray(colour("PNG"))
    body[16:24] = struct.pack(">II", 30_000, 30_000)
    body[29:33] = struct.pack(">I", zlib.crc32(bytes(body[12:29])))
    return bytes(body)


def damaged() -> bytes:
    """A PNG with one wrong byte in its pixels."""
    body = bytearray(colour("PNG"))
    middle = body.index(b"IDAT") + 12
    body[middle] ^= 0xFF
    return bytes(body)


def _same(pixels: np.ndarray) -> Callable[[np.ndarray], bool]:
    return lambda found: bool(np.array_equal(found, pixels))


def _near(pixels: np.ndarray, levels: float = 4.0) -> Callable[[np.ndarray], bool]:
    """Equal but for what lossy files change, which is most at the borders of the quarters."""
    return lambda found: found.shape == pixels.shape and float(np.abs(found.astype(int) - pixels).mean()) < levels


_GREY = np.repeat(grey()[:, :, None], 3, axis=2)
_BILEVEL = np.repeat((grey()[:, :, None] > 127) * np.uint8(255), 3, axis=2)

GOOD: dict[str, tuple[Callable[[], bytes], Callable[[np.ndarray], bool]]] = {
    "png": (lambda: colour("PNG"), _same(picture())),
    "jpeg": (lambda: colour("JPEG", quality=95), _near(picture())),
    "jpeg, progressive": (lambda: colour("JPEG", quality=95, progressive=True), _near(picture())),
    "webp, lossless": (lambda: colour("WEBP", lossless=True), _same(picture())),
    "webp, lossy": (lambda: colour("WEBP", quality=90), _near(picture(), 8.0)),
    "avif": (lambda: colour("AVIF", quality=95), _near(picture(), 8.0)),
    "bmp": (lambda: colour("BMP"), _same(picture())),
    "tiff": (lambda: colour("TIFF"), _same(picture())),
    "gif, one frame": (palette_gif, _same(picture())),
    "exif 3": (lambda: turned(3), _same(picture())),
    "exif 6": (lambda: turned(6), _same(picture())),
    "exif 8": (lambda: turned(8), _same(picture())),
    "alpha": (see_through, _same(over_white())),
    "alpha, all opaque": (lambda: saved(Image.fromarray(picture()).convert("RGBA"), "PNG"), _same(picture())),
    "palette": (lambda: palette(transparent=False), _same(picture())),
    "palette, transparent": (
        lambda: palette(transparent=True),
        _same(np.where((picture() == picture()[0, 0]).all(-1, keepdims=True), 255, picture()).astype(np.uint8)),
    ),
    "grey": (lambda: saved(Image.fromarray(grey()), "PNG"), _same(_GREY)),
    "grey with alpha": (lambda: saved(Image.fromarray(grey()).convert("LA"), "PNG"), _same(_GREY)),
    "grey, 16 bits": (deep_grey, _same(_GREY)),
    "colour, 16 bits": (deep_colour, _same(picture())),
    "one bit": (lambda: saved(Image.fromarray(grey() > 127), "PNG"), _same(_BILEVEL)),
    "cmyk": (lambda: saved(Image.fromarray(picture()).convert("CMYK"), "JPEG", quality=95), _near(picture(), 8.0)),
    "mpo of a phone": (lambda: animated("MPO"), _near(picture(), 8.0)),
    "wrong suffix": (lambda: colour("PNG"), _same(picture())),  # the tests name every file .jpg
}

BAD: dict[str, tuple[Callable[[], bytes], str]] = {
    "animated gif": (lambda: animated("GIF"), r"is animated or has several pages \(3\)"),
    "animated webp": (lambda: animated("WEBP"), r"is animated or has several pages \(3\)"),
    "animated png": (lambda: animated("PNG"), r"is animated or has several pages \(3\)"),
    "tiff of three pages": (lambda: animated("TIFF"), r"is animated or has several pages \(3\)"),
    "floating point tiff": (
        lambda: saved(Image.fromarray(grey().astype(np.float32)), "TIFF"),
        "has floating point pixels",
    ),
    "32-bit tiff": (
        lambda: saved(Image.fromarray(grey().astype(np.int32) << 16), "TIFF"),
        "has more than 16 bits per pixel",
    ),
    "jpeg cut off": (lambda: colour("JPEG", quality=95)[:-60], "is broken or cut off"),
    "png cut off": (lambda: colour("PNG")[:90], "is broken or cut off"),
    "png with a wrong byte": (damaged, "is broken or cut off"),
    "empty": (lambda: b"", "is an empty file"),
    "text": (lambda: b"not found: 404", "is no image that is read here"),
    "pdf": (lambda: b"%PDF-1.7\n1 0 obj\n", "is no image that is read here"),
    "svg": (lambda: b"<svg xmlns='http://www.w3.org/2000/svg'/>", "is no image that is read here"),
    "postscript": (lambda: b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "is no image that is read here"),
    "too many pixels": (huge, "has more than 100,000,000 pixels|has 30000x30000 pixels"),
}
