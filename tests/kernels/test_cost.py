"""The cost notes: their counts are what the stand-in counts, their arithmetic is right, their verdicts are plausible."""

import contextlib
import json
import runpy
import sys
from pathlib import Path

import pytest
import torch

from kernels import cost
from kernels.conv3d import conv3d as conv3d_reference
from kernels.fp8_matmul import quantize_weight
from kernels.ring_attention_constmax import key_norm
from tests.nki_standin.launch import launch, launch_ranks

import kernels.adaln_nki as adaln_nki  # isort: skip - after the launcher
import kernels.attention_nki as attention_nki  # isort: skip
import kernels.conv3d_nki as conv3d_nki  # isort: skip
import kernels.fp8_matmul_nki as fp8_nki  # isort: skip
import kernels.qk_norm_rope_nki as qk_nki  # isort: skip
import kernels.ring_attention_constmax_nki as constmax_nki  # isort: skip
import kernels.ring_attention_nki as ring_nki  # isort: skip
import nki  # isort: skip

pytestmark = pytest.mark.usefixtures("standin")

ROOT = Path(__file__).resolve().parents[2]
BF16 = torch.bfloat16
COUNTS = ("tensor_columns", "vector_cycles", "scalar_cycles", "gpsimd_cycles", "dma_bytes")


def randn(*shape, dtype=BF16):
    """Gaussian numbers."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0)).to(dtype)


def attention(L, S, dtype=BF16):
    q, k = randn(1, L, 2, 128, dtype=dtype), randn(1, S, 2, 128, dtype=dtype)
    launch(attention_nki.attention, q, k, k)


def ring(kernel, rows, num_ranks, *extra):
    q = randn(1, rows, 1, 128)
    pairs = tuple(r for i in range(num_ranks) for r in (i, (i + 1) % num_ranks))
    launch_ranks(kernel, [(q, q, q, *extra, "cp", pairs, None, None, 2)] * num_ranks)


def adaln(L, D):
    x, g = randn(1, L, D), randn(1, 1, D, dtype=torch.float32)
    launch(adaln_nki.adaln, x, x, g, g, g)


def norm_and_rope(L, H):
    q, w, angle = randn(1, L, H, 128), randn(H * 128), randn(L, 64, dtype=torch.float32)
    launch(qk_nki.qk_norm_rope, q, q, w, w, angle, angle)


def fp8(M, K, N):
    weight, scale = quantize_weight(randn(N, K))
    launch(fp8_nki.fp8_matmul, randn(M, K), weight, scale)


def conv(T, H, W, C, outs):
    x, w = randn(1, C, T, H, W), randn(outs, C, 3, 3, 3)
    launch(conv3d_nki.conv3d, x, w, None, (1, 1), randn(C), True, (1, 1, 1), randn(1, C, 2, H, W))


# name: (launch, the note, ranks that the report sums over)
NOTES = {
    "attention": (lambda: attention(1300, 2600), lambda: cost.attention(1, 1300, 2600, 2), 1),
    "attention float32": (
        lambda: attention(260, 600, torch.float32),
        lambda: cost.attention(1, 260, 600, 2, item_bytes=4),
        1,
    ),
    "ring": (lambda: ring(ring_nki.ring_attention, 1100, 3), lambda: cost.ring_attention(1, 1100, 1100, 1, 3), 3),
    "constmax": (
        lambda: ring(constmax_nki.ring_attention_constmax, 1100, 3, key_norm(randn(1, 1100, 1, 128))),
        lambda: cost.ring_attention_constmax(1, 1100, 1100, 1, 3),
        3,
    ),
    "adaln": (lambda: adaln(1000, 1536), lambda: cost.adaln(1, 1000, 1536), 1),
    "qk_norm_rope": (lambda: norm_and_rope(1000, 4), lambda: cost.qk_norm_rope(1, 1000, 4), 1),
    "fp8_matmul": (lambda: fp8(1200, 1500, 700), lambda: cost.fp8_matmul(1200, 1500, 700), 1),
}


def counted(num_ranks):
    """What the stand-in counted in the last launch, for one rank."""
    return {name: nki.last_report.work[name] / num_ranks for name in COUNTS}


@pytest.mark.parametrize("name", NOTES)
def test_the_notes_count_what_the_kernels_do(name):
    """Columns, cycles and bytes of each note are within 3 % of what its kernel does on the stand-in."""
    run, note, num_ranks = NOTES[name]
    run()
    found, expected = counted(num_ranks), note()
    for count in COUNTS:
        assert getattr(expected, count) == pytest.approx(found[count], rel=0.03, abs=600), count


def test_the_note_of_conv3d_counts_what_its_loop_does():
    """The same for conv3d per frame: weights and their transposes, made once per launch, are left out of the note."""
    conv(1, 40, 130, 24, 130)
    one = counted(1)
    conv(4, 40, 130, 24, 130)
    found = {name: value - one[name] for name, value in counted(1).items()}
    more, less = cost.conv3d(4, 40, 130, 24, 130), cost.conv3d(1, 40, 130, 24, 130)
    for count in COUNTS:
        assert getattr(more, count) - getattr(less, count) == pytest.approx(found[count], rel=0.03, abs=600), count


def test_flops_are_those_of_the_operators():
    """The notes' FLOPs are what the operators register with torch."""
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter:
        conv3d_reference(
            randn(1, 8, 3, 6, 5), randn(4, 8, 3, 3, 3), None, (1, 1), None, False, (1, 1, 1), randn(1, 8, 2, 6, 5)
        )
    assert cost.conv3d(3, 6, 5, 8, 4).flops == counter.get_total_flops()
    assert cost.attention(1, 10, 20, 3).flops == 4 * 10 * 20 * 3 * 128
    assert cost.fp8_matmul(10, 20, 30).flops == 2 * 10 * 20 * 30


def test_the_arithmetic_of_a_note():
    """Times, limiting engine and utilisation follow from counts and documented rates."""
    work = cost.Work(flops=2 * cost.PEAK_BF16_FLOPS, tensor_columns=2.4e9, vector_cycles=2 * 0.96e9, dma_bytes=0)
    assert work.times_s() == {"TensorE": 0.5, "VectorE": 1.0, "ScalarE": 0.0, "GpSimdE": 0.0, "DMA": 0.0}
    assert work.limit() == ("VectorE", 1.0)
    assert work.mfu() == pytest.approx(1.0)
    assert work.plus(work, 2).tensor_columns == 3 * 2.4e9


def test_the_notes_agree_with_the_known_utilisations():
    """On paper VectorE limits both attentions, and their utilisation lies near the figures known for this job."""
    bound = cost.ring_attention_constmax(1, 18900, 18900, 5, 4)
    exact = cost.attention(1, 18900, 75600, 5)
    assert bound.limit()[0] == exact.limit()[0] == "VectorE"
    assert bound.mfu() == pytest.approx(cost.KNOWN_MFU["ring_attention_constmax"], abs=0.08)
    assert cost.KNOWN_MFU["attention"] <= exact.mfu() + 0.02 <= bound.mfu()


def test_the_table_has_a_line_for_every_shape():
    """The printed table names every kernel for 480p and for 720p."""
    lines = cost.table().splitlines()
    assert len(lines) == 1 + len(cost.SHAPES)
    assert {line.split()[0] for line in lines[1:]} == {name for name, _, _ in cost.SHAPES}


@pytest.mark.slow
def test_the_scripts_of_the_kernels_end_with_their_json(capsys):
    """bench_kernels and prove_fp8 run without arguments; the keys of their last line are frozen here, and all is well."""
    expected = {
        "bench_kernels": {
            "attention_mfu", "attention_mfu_known", "constmax_mfu", "constmax_mfu_known", "constmax_over_attention_time",
            "note_error",
        },
        "prove_fp8": {f"{name}_{top}" for name in ("worst_module", "velocity", "velocity_bfloat16") for top in (240, 448)},
    }  # fmt: skip
    for name, keys in expected.items():
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "argv", [f"{name}.py"])
            with contextlib.suppress(SystemExit):
                runpy.run_path(str(ROOT / "scripts" / f"{name}.py"), run_name="__main__")
        last = json.loads(capsys.readouterr().out.splitlines()[-1])
        assert last["name"] == name
        assert last["ok"] is True
        assert set(last["ratios"]) == keys
