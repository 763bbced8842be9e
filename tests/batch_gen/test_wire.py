"""Messages between supervisor and rank 0."""

import socket
import struct

import numpy as np
import pytest

from batch_gen import wire


@pytest.fixture
def pair():
    """Two connected sockets."""
    ours, theirs = socket.socketpair()
    ours.settimeout(5)
    theirs.settimeout(5)
    with ours, theirs:
        yield ours, theirs


def test_round_trip(pair):
    """A header with unicode and arrays of every dtype, also empty ones, arrive as they were sent."""
    arrays = [np.arange(24, dtype=np.uint8).reshape(2, 3, 4), np.zeros((0, 3), np.float32), np.array([1, -2], np.int64)]
    wire.send(pair[0], {"type": "x", "text": "\u00e9\U0001f98a\n"}, arrays)
    header, received = wire.receive(pair[1])
    assert header == {"type": "x", "text": "\u00e9\U0001f98a\n"}
    assert [a.dtype for a in received] == [a.dtype for a in arrays]
    assert all(np.array_equal(a, b) for a, b in zip(received, arrays, strict=True))


def test_received_arrays_are_read_only(pair):
    """Frames cannot be changed by whoever gets them first."""
    wire.send(pair[0], {}, [np.zeros(3, np.uint8)])
    with pytest.raises(ValueError, match="read-only"):
        wire.receive(pair[1])[1][0][0] = 1


def test_object_arrays_are_refused(pair):
    """Nothing that would need unpickling can be sent."""
    with pytest.raises(TypeError, match="object"):
        wire.send(pair[0], {}, [np.array([object()])])


@pytest.mark.parametrize(
    "item", [{"dtype": "object", "shape": [1]}, {"dtype": "uint8", "shape": [-1]}, {"dtype": "uint8", "shape": [2**40]}]
)
def test_foreign_array_descriptions_are_refused(pair, item):
    """A message with another dtype, a negative or an absurd size is refused before memory is taken."""
    import json

    head = json.dumps({"arrays": [item]}).encode()
    pair[0].sendall(struct.pack(">I", len(head)) + head)
    with pytest.raises(ValueError, match="array of"):
        wire.receive(pair[1])


def test_huge_header_is_refused(pair):
    """A header length beyond the limit is refused before memory is taken."""
    pair[0].sendall(struct.pack(">I", 2**32 - 1))
    with pytest.raises(ValueError, match="longer than"):
        wire.receive(pair[1])


def test_closed_connection(pair):
    """The end of the other side is WireClosed on both directions."""
    pair[1].close()
    with pytest.raises(wire.WireClosed):
        wire.receive(pair[0])
    with pytest.raises(wire.WireClosed):
        wire.send(pair[0], {"type": "x"}, [np.zeros(1 << 24, np.uint8)])
