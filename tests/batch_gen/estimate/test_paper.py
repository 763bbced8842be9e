"""Meshes on paper: the arithmetic of bytes, seconds and clips, and the page that shows it."""

from pathlib import Path

import pytest

from batch_gen.estimate.flows import Flow, flows, local_tokens
from batch_gen.estimate.machines import TRN2
from batch_gen.estimate.memory import Placement
from batch_gen.estimate.paper import BEGIN, SHAPES, STEPS, fitting, on_paper, with_section
from batch_gen.estimate.speed import MEASURED, efficiency
from batch_gen.estimate.subject import Clips, published
from models.parallel.layout import Degrees

ROOT = Path(__file__).resolve().parents[3]
T2V = published("wan2.2-t2v-a14b")
HD = Clips(SHAPES["720p"], STEPS)


@pytest.mark.parametrize(
    ("flow", "sent_bytes", "hops"),
    [
        (Flow("all_reduce", "tp", 4, (10, 5), "bfloat16", 3), 3 * 100 * 1.5, 3 * 6),
        (Flow("reduce_scatter", "tp", 4, (4, 10), "float32", 1), 160 * 0.75, 3),
        (Flow("all_gather", "cp", 8, (10,), "float32", 2), 2 * 40 * 7, 14),
        (Flow("ring", "cp", 8, (10,), "bfloat16", 1), 2 * 20 * 7, 7),
    ],
)
def test_a_flow_by_hand(flow, sent_bytes, hops):
    """Bytes and hops of each kind are those of ring algorithms; a ring sends keys and values."""
    assert (flow.sent_bytes, flow.hops) == (sent_bytes, hops)


@pytest.mark.parametrize(
    ("degrees", "size", "sums_gb", "keys_gb"),
    [
        (Degrees(4, 8, 2), "480p", 7.6, 5.9),
        (Degrees(8, 4, 2), "480p", 17.6, 2.5),
        (Degrees(4, 8, 2), "720p", 17.4, 13.6),
        (Degrees(8, 4, 2), "720p", 40.6, 5.8),
    ],
)
def test_volumes_equal_the_known_ones(degrees, size, sums_gb, keys_gb):
    """The wide sums and the ring of one evaluation carry the known gigabytes; norms add less than a hundredth."""
    found = flows(T2V, Clips(SHAPES[size], STEPS), Placement(degrees, "ring"))
    wide = sum(flow.sent_bytes for flow in found if flow.axis == "tp" and flow.dtype == "bfloat16")
    norms = sum(flow.sent_bytes for flow in found if flow.axis == "tp" and flow.dtype == "float32")
    ring = sum(flow.sent_bytes for flow in found if flow.kind == "ring")
    assert wide / 1e9 == pytest.approx(sums_gb, abs=0.06)
    assert ring / 1e9 == pytest.approx(keys_gb, abs=0.06)
    assert 0 < norms < 0.01 * wide


def test_axes_of_one_rank_send_nothing():
    """A mesh of one rank has no flow, and an axis of degree 1 none of its own."""
    assert flows(T2V, HD, Placement(Degrees())) == ()
    assert {flow.axis for flow in flows(T2V, HD, Placement(Degrees(cp=4)))} == {"cp"}


def test_rows_are_dealt_out_with_padding():
    """What does not divide is padded: 75,600 tokens on 32 ranks of cp, and on parts for sequence parallelism."""
    assert local_tokens(75600, Placement(Degrees(cp=32))) == 2363
    assert local_tokens(75600, Placement(Degrees(tp=4, cp=8)), sequence_parallel=True) == 9452


def test_a_step_by_hand():
    """tp=8,cp=4,cfg=2 at 720p: work over 32 cores at the measured share, sums at 256 GB/s, the ring hidden."""
    mesh = on_paper(HD, Placement(Degrees(8, 4, 2), "ring"), 1)
    ideal_s = 6521.3e12 / (32 * 667e12 / 4)
    assert mesh.ideal_s == pytest.approx(ideal_s, rel=1e-4)
    assert mesh.compute_s == pytest.approx(ideal_s / efficiency("neuron"), rel=1e-4)
    sums_s = 120 * (18900 * 5120 * 2 * 1.75 / 256e9 + 14 * 2e-6)
    norms_s = 40 * (3 * 18900 * 4 * 1.75 / 256e9 + 2 * 14 * 2e-6)
    time_s = (640 * 4 + 6 * 640 * 2) * 7 / 256e9 + 2 * 7 * 2e-6
    assert mesh.links["tp"].exposed_s == pytest.approx(sums_s + norms_s + time_s, rel=1e-6)
    ring = 40 * (3 * 2 * 18900 * 5 * 128 * 2 / 256e9 + 3 * 2e-6)
    assert mesh.links["cp"].seconds > ring > mesh.links["cp"].exposed_s
    assert mesh.links["cfg"].sent_bytes == 16 * 21 * 90 * 160 * 4
    waits_s = sum(link.exposed_s for link in mesh.links.values())
    assert mesh.step_s == pytest.approx(mesh.compute_s + waits_s)
    assert mesh.clips_per_hour == pytest.approx(3600 / (STEPS * mesh.step_s + mesh.rest_s))
    assert mesh.clip_s == pytest.approx(MEASURED["neuron"].seconds, rel=0.01)


def test_guidance_in_sequence_doubles_the_work():
    """Without the guidance axis a rank does both branches: twice the arithmetic and twice the sums of a step."""
    one, two = (on_paper(HD, Placement(Degrees(8, 4, cfg), "ring"), 1) for cfg in (1, 2))
    assert one.compute_s == pytest.approx(2 * two.compute_s)
    assert one.links["tp"].sent_bytes == 2 * two.links["tp"].sent_bytes
    assert one.links["cfg"].sent_bytes == 0


@pytest.mark.parametrize("size", SHAPES)
def test_what_is_listed_fits(size):
    """Every listed mesh fits the memory and fills the machine; both validated layouts are among them."""
    found = fitting(SHAPES[size])
    assert all(mesh.memory.fits and mesh.replicas * mesh.degrees.size == TRN2.num_cores for mesh in found)
    assert {Degrees(4, 8, 2), Degrees(8, 4, 2)} <= {mesh.degrees for mesh in found}
    assert found == sorted(found, key=lambda mesh: -mesh.clips_per_hour)
    assert all(0 < mesh.of_peak < mesh.kept <= 1 for mesh in found)


def test_the_page_shows_it():
    """docs/scale.md holds the section as the estimate makes it now: python scripts/build_scale_meshes.py."""
    page = (ROOT / "docs" / "scale.md").read_text("utf-8")
    assert page.count(BEGIN) == 1
    assert with_section(page) == page
