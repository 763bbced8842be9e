"""Deliberately wrong kernels: the stand-in refuses each one with a message that names the limit it breaks."""

import numpy as np
import pytest

from tests.nki_standin import target  # noqa: F401 - says what `import nki` finds

import nki  # isort: skip
import nki.collectives as ncc  # isort: skip
import nki.isa as nisa  # isort: skip
import nki.language as nl  # isort: skip

pytestmark = pytest.mark.usefixtures("standin")

X = np.ones((128, 512), np.float32)


def sbuf(shape=(128, 128), dtype=nl.float32, value=1.0):
    """An SBUF tile with something in it."""
    tile = nl.ndarray(shape, dtype=dtype, buffer=nl.sbuf)
    nisa.memset(dst=tile, value=value)
    return tile


def tile_of_129(x):
    return nl.ndarray((129, 4), dtype=nl.float32, buffer=nl.sbuf)


def psum_over_a_bank(x):
    return nl.ndarray((128, 513), dtype=nl.float32, buffer=nl.psum)


def nine_banks(x):
    return [nl.ndarray((128, 4), dtype=nl.float32, buffer=nl.psum) for _ in range(9)]


def sbuf_overflow(x):
    return [nl.ndarray((128, 13312), dtype=nl.float32, buffer=nl.sbuf) for _ in range(5)]


def reads_unwritten(x):
    tile = nl.ndarray((128, 4), dtype=nl.float32, buffer=nl.sbuf)
    nisa.memset(dst=tile[:, 0:3], value=0.0)
    nisa.tensor_copy(dst=sbuf((128, 4)), src=tile)


def leaves_output_unwritten(x):
    out = nl.ndarray((128, 4), dtype=nl.float32, buffer=nl.shared_hbm)
    nisa.dma_copy(dst=out[0:127, :], src=sbuf((127, 4)))
    return out


def output_in_sbuf(x):
    return sbuf()


def trn3_exponential(x):
    nisa.exponential(dst=sbuf(), src=sbuf())


def trn3_mx_matmul(x):
    nisa.nc_matmul_mx(dst=sbuf(), stationary=sbuf(), moving=sbuf(), stationary_scale=sbuf(), moving_scale=sbuf())


def trn3_abs_max(x):
    nisa.tensor_tensor(dst=sbuf(), data1=sbuf(), data2=sbuf(), op=nl.abs_max)


def trn3_fp8(x):
    return nl.ndarray((128, 4), dtype=nl.float8_e4m3fn, buffer=nl.sbuf)


def trn3_dma_priority(x):
    nisa.dma_copy(dst=sbuf((128, 512)), src=x, priority=1)


def matmul(dst=None, stationary=None, moving=None, **kwargs):
    dst = nl.ndarray((128, 128), dtype=nl.float32, buffer=nl.psum) if dst is None else dst
    nisa.nc_matmul(
        dst=dst,
        stationary=sbuf() if stationary is None else stationary,
        moving=sbuf() if moving is None else moving,
        **kwargs,
    )
    return dst


def missing_accumulate(x):
    dst = matmul(accumulate=False)
    matmul(dst, accumulate=False)


def accumulates_into_nothing(x):
    matmul(accumulate=True)


def accumulates_into_memset(x):
    dst = nl.ndarray((128, 128), dtype=nl.float32, buffer=nl.psum)
    nisa.memset(dst=dst, value=0.0)
    matmul(dst, accumulate=True)


def stationary_of_129(x):
    matmul(stationary=sbuf((128, 129)))


def moving_of_513(x):
    matmul(moving=sbuf((128, 513), nl.bfloat16), stationary=sbuf(dtype=nl.bfloat16))


def matmul_into_sbuf(x):
    matmul(dst=sbuf())


def matmul_into_bf16(x):
    matmul(dst=nl.ndarray((128, 128), dtype=nl.bfloat16, buffer=nl.psum))


def matmul_of_two_kinds(x):
    matmul(moving=sbuf(dtype=nl.bfloat16))


def double_row_of_bf16(x):
    tile = sbuf((128, 2, 128), nl.bfloat16)
    matmul(stationary=tile, moving=tile, perf_mode=nisa.matmul_perf_mode.double_row)


def dma_from_psum(x):
    nisa.dma_copy(dst=sbuf(), src=matmul())


def engine_on_hbm(x):
    nisa.tensor_copy(dst=sbuf((128, 512)), src=x)


def gpsimd_on_psum(x):
    nisa.tensor_tensor(dst=sbuf(), data1=matmul(), data2=sbuf(), op=nl.add, engine=nisa.engine.gpsimd)


def both_in_psum(x):
    nisa.tensor_tensor(dst=sbuf(), data1=matmul(), data2=matmul(), op=nl.add)


def partition_start_of_1(x):
    nisa.tensor_copy(dst=sbuf((1, 128)), src=sbuf()[1:2])


def vector_operand_too_wide(x):
    nisa.tensor_scalar(dst=sbuf(), data=sbuf(), op0=nl.add, operand0=sbuf((128, 2)))


def bf16_operand(x):
    nisa.tensor_scalar(dst=sbuf(), data=sbuf(), op0=nl.add, operand0=sbuf((128, 1), nl.bfloat16))


def statistics_of_513(x):
    nisa.bn_stats(dst=sbuf((128, 6)), data=sbuf((128, 513)))


def log_out_of_range(x):
    nisa.activation(dst=sbuf(), op=nl.log, data=sbuf(value=0.0))


def memset_of_the_wrong_kind(x):
    nisa.memset(dst=nl.ndarray((128, 1), dtype=nl.int32, buffer=nl.sbuf), value=1.0)


def slice_past_the_end(x):
    return x[0:128, 500:513]


def pattern_past_the_end(x):
    nisa.dma_copy(dst=sbuf((128, 512)), src=x.ap(pattern=((512, 128), (1, 512)), offset=1))


def partition_broadcast_on_chip(x):
    return sbuf((1, 128)).broadcast(0, 128)


def writes_a_broadcast(x):
    nisa.memset(dst=sbuf((128, 1, 4)).broadcast(1, 8), value=0.0)


def register_as_index(x):
    def body(i):
        nisa.dma_copy(dst=sbuf((1, 512)), src=x[i])

    nl.fori_loop(0, 2, body)


def loop_returns_a_value(x):
    nl.fori_loop(0, 2, lambda i: 1)


def transposes_fp8(x):
    nisa.nc_transpose(dst=nl.ndarray((128, 128), dtype=nl.float8_e4m3, buffer=nl.psum), data=sbuf(dtype=nl.float8_e4m3))


def adds_tensors(x):
    return sbuf() + sbuf()


def permutes_from_sbuf(x):
    ncc.collective_permute(srcs=(sbuf(),), dsts=(sbuf(),), source_target_pairs=((0, 0),))


REFUSALS = {
    tile_of_129: "partition dimension 129 exceeds 128",
    psum_over_a_bank: "2052 bytes per partition exceeds a bank of 2048",
    nine_banks: "9 PSUM tiles live.*8 banks",
    sbuf_overflow: "266240 bytes per partition live in SBUF; the limit is 212992|212992",
    reads_unwritten: "reads data that was never written",
    leaves_output_unwritten: "some elements were never written",
    output_in_sbuf: "results must be in shared HBM",
    trn3_exponential: "exponential exists on trn3 only",
    trn3_mx_matmul: "nc_matmul_mx exists on trn3 only",
    trn3_abs_max: "abs_max exists on trn3 only",
    trn3_fp8: "float8_e4m3fn.*trn2",
    trn3_dma_priority: "priority exists on trn3 only",
    missing_accumulate: "accumulate is missing",
    accumulates_into_nothing: "no matmul has started",
    accumulates_into_memset: "memset does not count",
    stationary_of_129: "129 stationary columns exceed 128",
    moving_of_513: "513 moving columns exceed 512",
    matmul_into_sbuf: "must be float32 in PSUM",
    matmul_into_bf16: "must be float32 in PSUM",
    matmul_of_two_kinds: "float32 goes with float32 only",
    double_row_of_bf16: "double_row takes float8",
    dma_from_psum: "DMA cannot reach PSUM",
    engine_on_hbm: "engines read SBUF and PSUM only",
    gpsimd_on_psum: "GpSimdE cannot access PSUM",
    both_in_psum: "both inputs in PSUM",
    partition_start_of_1: "from partition 1",
    vector_operand_too_wide: "vector operand of shape",
    bf16_operand: "must be float32",
    statistics_of_513: "513 elements per partition exceed 512",
    log_out_of_range: "outside of its valid input range",
    memset_of_the_wrong_kind: "is not of the kind of int32",
    slice_past_the_end: "must lie inside",
    pattern_past_the_end: "reaches element 65536",
    partition_broadcast_on_chip: "cannot be broadcast over partitions",
    writes_a_broadcast: "broadcast view cannot be written",
    register_as_index: "a register is no Python index",
    loop_returns_a_value: "must not return a value",
    transposes_fp8: "16 or 32 bits",
    permutes_from_sbuf: "must be in HBM",
}


@pytest.mark.parametrize("kernel", REFUSALS, ids=lambda kernel: kernel.__name__)
def test_a_wrong_kernel_is_refused(kernel):
    """Each wrong kernel is refused, and the message says which limit it breaks."""
    with pytest.raises(nki.NkiValidationError, match=REFUSALS[kernel]):
        nki.simulate(nki.jit(kernel))(X)


def test_tensors_have_no_operators():
    """Arithmetic on tensors is a TypeError, as tensors of the real package have none."""
    with pytest.raises(TypeError, match="unsupported operand"):
        nki.simulate(nki.jit(adds_tensors))(X)


def test_lists_are_no_kernel_arguments():
    """Kernels take tuples; a list is refused at launch."""
    with pytest.raises(nki.NkiValidationError, match="tuples, not lists"):
        nki.simulate(nki.jit(lambda x, sizes: x))(X, [1, 2])


def exchange(with_barrier):
    """Each core writes its half of a shared tensor, then reads all of it."""

    def kernel(x):
        shared = nl.ndarray((128, 512), dtype=nl.float32, buffer=nl.shared_hbm)
        out = nl.ndarray((128, 512), dtype=nl.float32, buffer=nl.shared_hbm)
        half = nl.program_id(0) * 64
        nisa.dma_copy(dst=shared[half : half + 64, :], src=x[half : half + 64, :])
        if with_barrier:
            nisa.core_barrier(data=shared, cores=(0, 1))
        tile = nl.ndarray((128, 512), dtype=nl.float32, buffer=nl.sbuf)
        nisa.dma_copy(dst=tile, src=shared)
        nisa.dma_copy(dst=out, src=tile)
        return out

    return nki.jit(kernel)[2]


def test_a_missing_barrier_between_cores_is_found():
    """Reading the other core's half without a barrier is refused in either order of turns; with one it works."""
    for reverse in (False, True):
        with pytest.raises(nki.NkiValidationError, match="never written"):
            nki.simulate_ranks(exchange(with_barrier=False), [(X,)], reverse)
        assert np.array_equal(nki.simulate_ranks(exchange(with_barrier=True), [(X,)], reverse)[0], X)


def test_cores_that_wait_for_nobody_are_found():
    """A barrier that only one core reaches ends in an error, not in a hang."""

    def kernel(x):
        if nl.program_id(0) == 0:
            shared = nl.ndarray((1, 1), dtype=nl.float32, buffer=nl.shared_hbm)
            nisa.core_barrier(data=shared, cores=(0, 1))
        return x

    with pytest.raises(nki.NkiValidationError, match="nobody else comes"):
        nki.simulate(nki.jit(kernel)[2])(X)


def test_memory_is_freed_when_a_tile_dies():
    """What counts is live memory: a loop may use more SBUF in all than there is."""

    def kernel(x):
        out = nl.ndarray((128, 512), dtype=nl.float32, buffer=nl.shared_hbm)
        for _ in range(20):
            tile = nl.ndarray((128, 25 * 1024), dtype=nl.float32, buffer=nl.sbuf)
            nisa.memset(dst=tile, value=3.0)
            nisa.dma_copy(dst=out, src=tile[:, 0:512])
            del tile
        return out

    assert (nki.simulate(nki.jit(kernel))(X) == 3).all()
    assert nki.last_report.sbuf_peak_bytes == 100 * 1024


def test_results_are_rounded_to_their_dtype():
    """Tiles hold bfloat16 and FP8 values, not float32 ones: 1.01 comes back rounded."""

    def kernel(x):
        out = nl.ndarray((2, 4), dtype=nl.float32, buffer=nl.shared_hbm)
        for row, dtype in ((0, nl.bfloat16), (1, nl.float8_e4m3)):
            tile = nl.ndarray((1, 4), dtype=dtype, buffer=nl.sbuf)
            nisa.memset(dst=tile, value=1.01)
            nisa.dma_copy(dst=out[row : row + 1, :], src=tile)
        return out

    found = nki.simulate(nki.jit(kernel))(X)
    assert found[:, 0].tolist() == [1.0078125, 1.0]
