"""What each NKI kernel asks of the engines of a Trainium2 core, on paper: the counts, the limiting engine, the time.

Counts are of one launch, summed over the two physical cores of LNC2; they follow the loops of the kernels and are
checked against what the stand-in counts. Rates are the documented ones; nothing here was measured on a device.
"""

from collections.abc import Callable
from dataclasses import dataclass

PARTITIONS = 128
BANK = 512
CORES = 2  # physical cores of a logical one
MIN_CYCLES = 64  # initiation interval of an instruction of VectorE, ScalarE, GpSimdE

# Architecture guide of Trainium2, per physical core
TENSOR_HZ = 2.4e9  # moving columns per second
VECTOR_HZ = 0.96e9
SCALAR_HZ = 1.2e9
GPSIMD_HZ = 1.2e9
HBM_BYTES_PER_S = 2.9e12 / 8
PEAK_BF16_FLOPS = 667e12 / 8
PEAK_FP8_FLOPS = 1299e12 / 8

# Model FLOPs utilisation reported for this job by others: ring with a constant bound, gather with a true maximum
KNOWN_MFU = {"ring_attention_constmax": 0.75, "attention": 0.44}


@dataclass(frozen=True, slots=True)
class Work:
    """Counts of one launch; columns and cycles of instructions, bytes between HBM and SBUF."""

    flops: float
    tensor_columns: float = 0
    vector_cycles: float = 0
    scalar_cycles: float = 0
    gpsimd_cycles: float = 0
    dma_bytes: float = 0
    peak_flops: float = PEAK_BF16_FLOPS

    def times_s(self) -> dict[str, float]:
        """Seconds that each engine of the two cores is busy."""
        return {
            "TensorE": self.tensor_columns / CORES / TENSOR_HZ,
            "VectorE": self.vector_cycles / CORES / VECTOR_HZ,
            "ScalarE": self.scalar_cycles / CORES / SCALAR_HZ,
            "GpSimdE": self.gpsimd_cycles / CORES / GPSIMD_HZ,
            "DMA": self.dma_bytes / CORES / HBM_BYTES_PER_S,
        }

    def limit(self) -> tuple[str, float]:
        """The busiest engine and its seconds: the time of the launch if all others hide behind it."""
        times = self.times_s()
        name = max(times, key=lambda engine: times[engine])
        return name, times[name]

    def mfu(self) -> float:
        """Share of the matrix peak that the launch reaches at that time."""
        return self.flops / (CORES * self.peak_flops * self.limit()[1])

    def plus(self, other: "Work", times: float = 1) -> "Work":
        """This work and `times` times another."""
        return Work(
            self.flops + times * other.flops,
            self.tensor_columns + times * other.tensor_columns,
            self.vector_cycles + times * other.vector_cycles,
            self.scalar_cycles + times * other.scalar_cycles,
            self.gpsimd_cycles + times * other.gpsimd_cycles,
            self.dma_bytes + times * other.dma_bytes,
            self.peak_flops,
        )


def _ceil(a: int, b: int) -> int:
    return -(-a // b)


def _spans(count: int, size: int) -> list[int]:
    return [min(size, count - start) for start in range(0, count, size)]


def _halves(rows: int) -> int:
    """Rows that the two cores compute together: an odd one is computed twice."""
    return 2 * _ceil(rows, 2)


def _cycles(elements: float, instructions: float = 1) -> float:
    return max(MIN_CYCLES * instructions, elements)


def transposing_keys(S: int, D: int, item_bytes: int) -> Work:
    """One head's keys to scratch memory, transposed."""
    wide = item_bytes // 2  # a float32 transpose takes two passes, and its copy has no fast mode
    rows = _halves(S)
    vector = sum(_cycles(group * wide / 2) for group in _spans(rows // 2, BANK)) * CORES
    return Work(0, rows * wide, vector, dma_bytes=2 * rows * D * item_bytes)


def attention(B: int, L: int, S: int, H: int, D: int = 128, item_bytes: int = 2, merge: bool = False) -> Work:
    """`attention_nki.attention`; with `merge` one later step of a ring, whose keys are transposed already."""
    wide = item_bytes // 2
    parts = 4 if item_bytes == 4 else 1
    half = _halves(L) // 2
    tensor = vector = scalar = bytes_moved = 0.0
    sections, key_tiles = _spans(S, 2048), _ceil(S, PARTITIONS)
    for group in _spans(half, BANK):
        tensor += group * wide
        vector += _cycles(group * wide / 2)
        bytes_moved += 2 * group * D * item_bytes + 2 * S * D * item_bytes + 4 * group
        bytes_moved += group * (4 * D + 4) if merge else 0
        for rows in _spans(group, PARTITIONS):
            tensor += parts * S + key_tiles * rows * wide + parts * key_tiles * D
            copied = [_ceil(chunk, PARTITIONS) * rows for chunk in _spans(S, BANK)]  # half of them by ScalarE
            reduces = sum(_cycles(chunk) for chunk in _spans(S, BANK))
            vector += reduces + sum(_cycles(n * wide / 2) for n in copied[0::2])
            vector += len(sections) * (5 * MIN_CYCLES + _cycles(D)) + (1 + 2 * merge) * MIN_CYCLES + _cycles(D)
            scalar += reduces + sum(_cycles(n) for n in copied[1::2]) + (len(sections) + merge) * MIN_CYCLES
    heads = B * H
    flops = 4.0 * heads * L * S * D
    work = Work(
        flops, CORES * tensor * heads, CORES * vector * heads, CORES * scalar * heads, 0, CORES * bytes_moved * heads
    )
    return work if merge else work.plus(transposing_keys(S, D, item_bytes), heads)


def ring_attention(B: int, L: int, S: int, H: int, ranks: int, D: int = 128, item_bytes: int = 2) -> Work:
    """`ring_attention_nki.ring_attention`: one own block, and one merging step per other rank."""
    waiting = Work(0, dma_bytes=B * H * _halves(L) * D * (4 - item_bytes))  # numerators between steps are float32
    first = attention(B, L, S, H, D, item_bytes).plus(waiting, ranks - 1)
    return first.plus(attention(B, L, S, H, D, item_bytes, merge=True), ranks - 1)


def ring_attention_constmax(B: int, L: int, S: int, H: int, ranks: int, D: int = 128, item_bytes: int = 2) -> Work:
    """`ring_attention_constmax_nki.ring_attention_constmax` without padding."""
    wide, parts = item_bytes // 2, 4 if item_bytes == 4 else 1
    tensor = vector = scalar = bytes_moved = 0.0
    key_tiles = _ceil(S, PARTITIONS)
    for group in _spans(_halves(L) // 2, BANK):
        query_tiles = _spans(group, PARTITIONS)
        tensor += group * wide + parts * group  # transposes, bound
        vector += _cycles(group * wide / 2) + 2 * _cycles(group) + PARTITIONS
        scalar += 2 * _cycles(group)
        tensor += key_tiles * parts * (group + len(query_tiles) * (D + 1))
        vector += key_tiles * _cycles(group) + len(query_tiles) * (_cycles(D + 1))
        scalar += key_tiles * _cycles(group)
        bytes_moved += group * D * item_bytes + S * (2 * D + 1) * item_bytes
    tensor, vector, scalar, bytes_moved = (CORES * n for n in (tensor, vector, scalar, bytes_moved))
    step = Work(4.0 * L * S * D, tensor, vector, scalar, 0, bytes_moved)
    queries, key_copies = _halves(L), CORES * _ceil(_halves(S) // 2, PARTITIONS)
    copies = Work(0, 0, MIN_CYCLES * key_copies, dma_bytes=_halves(S) * (2 * D + 1) * item_bytes)
    sums = Work(0, dma_bytes=8 * queries * (D + 1))  # to scratch and back, between two steps
    num_tiles = CORES * _ceil(queries // 2, PARTITIONS)
    finish = Work(0, 0, num_tiles * (2 * MIN_CYCLES + D), dma_bytes=queries * (D * item_bytes + 4))
    head = copies.plus(step, ranks).plus(sums, ranks - 1).plus(finish).plus(transposing_keys(S, D, item_bytes))
    return Work(0).plus(head, B * H)


def adaln(B: int, L: int, D: int, item_bytes: int = 2) -> Work:
    """`adaln_nki.adaln` with a gate and a modulation per clip."""
    vector = gpsimd = 0.0
    chunks = _spans(D, BANK)
    for _ in [rows for group in _spans(_halves(L) // 2, 256) for rows in _spans(group, PARTITIONS)]:
        gpsimd += _cycles(D)
        vector += 3 * _cycles(D) + sum(_cycles(chunk) for chunk in chunks) + _cycles(6 * len(chunks))
    tiles = sum(_ceil(group, PARTITIONS) for group in _spans(_halves(L) // 2, 256))
    rows = _halves(L) * B
    vectors = CORES * B * (3 * PARTITIONS * D * 4)
    return Work(
        0,
        0,
        CORES * B * (vector + _cycles(D)),
        CORES * B * tiles * MIN_CYCLES,
        CORES * B * gpsimd,
        4.0 * rows * D * item_bytes + vectors,
    )


def qk_norm_rope(B: int, L: int, H: int, D: int = 128, item_bytes: int = 2) -> Work:
    """`qk_norm_rope_nki.qk_norm_rope` with its own sums of squares."""
    width = H * D
    tiles = sum(_ceil(group, PARTITIONS) for group in _spans(_halves(L) // 2, 256))
    calls = CORES * B * 2 * tiles
    rows = _halves(L) * B * 2
    return Work(
        0,
        0,
        calls * (_cycles(width) + 4 * _cycles(width / 2)),
        calls * (_cycles(width) + MIN_CYCLES),
        calls * 2 * _cycles(width / 2),
        rows * (2 * width * item_bytes + D * 4) + CORES * 2 * PARTITIONS * width * 4,
    )


def fp8_matmul(M: int, K: int, N: int, item_bytes: int = 2) -> Work:
    """`fp8_matmul_nki.fp8_matmul` from plain rows, without bias."""
    tensor = vector = scalar = moved = 0.0
    key_blocks, key_tiles = _ceil(K, PARTITIONS), _ceil(K, 256)
    for group in _spans(_halves(M) // 2, BANK):
        moved += group * (K * item_bytes + N * item_bytes) + K * N + PARTITIONS * N * 4
        vector += 2 * (group + N) if K % 256 else 0  # zeros behind the last channel
        for rows in _spans(group, PARTITIONS):
            tensor += key_blocks * rows + key_tiles * N
            vector += 2 * _cycles(K) + 2 * MIN_CYCLES + key_blocks * _cycles(rows)
            vector += sum(_cycles(width) for width in _spans(N, BANK))
            scalar += 2 * _cycles(K)
    tensor, vector, scalar, moved = (CORES * n for n in (tensor, vector, scalar, moved))
    return Work(2.0 * M * K * N, tensor, vector, scalar, 0, moved, PEAK_FP8_FLOPS)


def conv3d(frames: int, rows: int, columns: int, C: int, outs: int, item_bytes: int = 2) -> Work:
    """`conv3d_nki.conv3d` of one clip: 3 x 3 x 3 with norm and SiLU behind two frames of context."""
    parts = 4 if item_bytes == 4 else 1
    c_tiles, o_tiles = _ceil(C, PARTITIONS), _ceil(outs, PARTITIONS)
    tensor = vector = scalar = moved = 0.0
    strips = _spans(columns, 128)
    for index, width in enumerate(strips):
        sides = (index == 0) + (index == len(strips) - 1)  # where the frame ends and zeros begin
        for height in _spans(_halves(rows) // 2, BANK // min(columns, 128)):
            window = (height + 2) * (width + 2)
            pieces = _spans(window, BANK)
            scalar_window = 2 * c_tiles * _cycles(window) + sum(_cycles(piece) for piece in pieces)
            vector_window = c_tiles * (_cycles(window) + sides * MIN_CYCLES) + sum(_cycles(piece) for piece in pieces)
            tensor += (frames + 2) * parts * c_tiles * window + frames * parts * 27 * c_tiles * o_tiles * height * width
            vector += (frames + 2) * vector_window
            scalar += (frames + 2) * scalar_window + frames * o_tiles * _cycles(height * width)
            moved += ((frames + 2) * C * window + frames * outs * height * width) * item_bytes
    flops = 2.0 * frames * rows * columns * C * outs * 27
    return Work(flops, CORES * tensor, CORES * vector, CORES * scalar, 0, CORES * moved)


# What one rank launches: (kernel, shape in words, work)
SHAPES: list[tuple[str, str, Callable[[], Work]]] = [
    ("attention", "480p tp4 cp8: 10 heads, 4095 x 32760", lambda: attention(1, 4095, 32760, 10)),
    ("attention", "720p tp8 cp4: 5 heads, 18900 x 75600", lambda: attention(1, 18900, 75600, 5)),
    ("ring_attention", "480p: 8 blocks of 4095", lambda: ring_attention(1, 4095, 4095, 10, 8)),
    ("ring_attention", "720p: 4 blocks of 18900", lambda: ring_attention(1, 18900, 18900, 5, 4)),
    ("ring_attention_constmax", "480p: 8 blocks of 4095", lambda: ring_attention_constmax(1, 4095, 4095, 10, 8)),
    ("ring_attention_constmax", "720p: 4 blocks of 18900", lambda: ring_attention_constmax(1, 18900, 18900, 5, 4)),
    ("adaln", "480p: 4095 x 5120", lambda: adaln(1, 4095, 5120)),
    ("adaln", "720p: 18900 x 5120", lambda: adaln(1, 18900, 5120)),
    ("qk_norm_rope", "480p: 4095 x 10 heads", lambda: qk_norm_rope(1, 4095, 10)),
    ("qk_norm_rope", "720p: 18900 x 5 heads", lambda: qk_norm_rope(1, 18900, 5)),
    ("fp8_matmul", "480p: FFN up, 4095 x 5120 x 3456", lambda: fp8_matmul(4095, 5120, 3456)),
    ("fp8_matmul", "720p: FFN up, 18900 x 5120 x 1728", lambda: fp8_matmul(18900, 5120, 1728)),
    ("conv3d", "480p: 4 frames of 480 x 832, 96 channels", lambda: conv3d(4, 480, 832, 96, 96)),
    ("conv3d", "720p: 4 frames of 720 x 1280, 96 channels", lambda: conv3d(4, 720, 1280, 96, 96)),
]


def table() -> str:
    """The cost notes as text: busy milliseconds per engine, the limiting engine, the utilisation, the known one."""
    head = f"{'kernel':24}{'shape of one rank':44}{'GFLOP':>9}"
    head += "".join(f"{engine:>9}" for engine in Work(0).times_s()) + f"  {'limit':8}{'ms':>9}{'MFU':>6}{'known':>7}"
    lines = [head]
    for name, shape, make in SHAPES:
        work = make()
        engine, seconds = work.limit()
        line = f"{name:24}{shape:44}{work.flops / 1e9:9.1f}"
        line += "".join(f"{1e3 * t:9.3f}" for t in work.times_s().values()) + f"  {engine:8}{1e3 * seconds:9.3f}"
        line += f"{work.mfu():6.0%}" if work.flops else f"{'-':>6}"
        known = KNOWN_MFU.get(name)
        lines.append(line + (f"{known:7.0%}" if known else f"{'-':>7}"))
    return "\n".join(lines)
