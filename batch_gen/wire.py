"""Messages between the supervisor and rank 0: one JSON header and raw array bytes, over a Unix socket.

```
4 bytes header length (big endian) | header: UTF-8 JSON | arrays, back to back, C order
```

The header carries `{"type": ..., "arrays": [{"dtype", "shape"}, ...], ...}`. Only the dtypes named here are accepted
and every size is checked before memory is taken; nothing is ever unpickled.
"""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np

from batch_gen.engine import Array

_DTYPES: dict[str, np.dtype[Any]] = {"uint8": np.dtype("u1"), "float32": np.dtype("<f4"), "int64": np.dtype("<i8")}
MAX_HEADER_BYTES = 64 << 20
MAX_ARRAY_BYTES = 16 << 30
_LENGTH = struct.Struct(">I")


class WireClosed(ConnectionError):
    """The other side is gone."""


def send(connection: socket.socket, header: dict[str, Any], arrays: Sequence[Array] = ()) -> None:
    """Send one message; arrays must be uint8, float32 or int64."""
    packed = [np.ascontiguousarray(array) for array in arrays]
    described = [{"dtype": array.dtype.name, "shape": list(array.shape)} for array in packed]
    for item in described:
        if item["dtype"] not in _DTYPES:
            raise TypeError(f"array dtype {item['dtype']} cannot be sent; only {sorted(_DTYPES)}")
    head = json.dumps({**header, "arrays": described}).encode()
    try:
        connection.sendall(_LENGTH.pack(len(head)) + head)
        for array in packed:
            connection.sendall(memoryview(array.data).cast("B") if array.size else b"")
    except (BrokenPipeError, ConnectionResetError, OSError) as error:
        raise WireClosed(f"cannot send: {error}") from error


def receive(connection: socket.socket) -> tuple[dict[str, Any], list[Array]]:
    """Receive one message.

    Raises:
        WireClosed: the other side closed the connection.
        TimeoutError: the socket's timeout passed in the middle of a message or before one.
        ValueError: the message is not one of ours.
    """
    (length,) = _LENGTH.unpack(_read(connection, _LENGTH.size))
    if length > MAX_HEADER_BYTES:
        raise ValueError(f"header of {length} bytes is longer than {MAX_HEADER_BYTES}")
    header = json.loads(bytes(_read(connection, length)))
    arrays = [_read_array(connection, item) for item in header.pop("arrays")]
    return header, arrays


def _read_array(connection: socket.socket, item: dict[str, Any]) -> Array:
    dtype = _DTYPES.get(item["dtype"])
    shape = tuple(int(n) for n in item["shape"])
    if dtype is None or any(n < 0 for n in shape):
        raise ValueError(f"array of dtype {item['dtype']!r} and shape {shape} is not accepted")
    num_bytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    if num_bytes > MAX_ARRAY_BYTES:
        raise ValueError(f"array of {num_bytes} bytes is larger than {MAX_ARRAY_BYTES}")
    flat: Array = np.frombuffer(_read(connection, num_bytes), dtype=dtype)
    array = flat.reshape(shape)
    array.flags.writeable = False
    return array


def _read(connection: socket.socket, num_bytes: int) -> bytearray:
    buffer = bytearray(num_bytes)
    view = memoryview(buffer)
    got = 0
    while got < num_bytes:
        try:
            count = connection.recv_into(view[got:])
        except ConnectionResetError as error:
            raise WireClosed("connection reset") from error
        if count == 0:
            raise WireClosed("connection closed")
        got += count
    return buffer
