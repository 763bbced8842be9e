"""`plan` and what follows from it: verdicts, ranking, `--mesh auto`, the page, a million rows."""

import io
import json
import re
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
from PIL import Image

from batch_gen.cli import invoke
from batch_gen.commands.plan import describe
from batch_gen.config import load_preset, resolve
from batch_gen.estimate import holdouts
from batch_gen.estimate.machines import TRN2, machine_of
from batch_gen.estimate.ranking import Question, judge, rank, swings, thinned
from batch_gen.estimate.speed import MEASURED, T2V_720P, Rates, clip_seconds, efficiency
from batch_gen.estimate.spend import LOAD_S, price_of, spend, variants_of
from batch_gen.estimate.subject import Clips, published
from batch_gen.estimate.work import denoise_work
from batch_gen.graphs import keys
from batch_gen.prepare import prepare
from batch_gen.request import Bucket
from models.parallel.layout import Degrees, make_layout
from tests.manifests import save

ROOT = Path(__file__).resolve().parents[3]
A14B = ["--model", "wan2.2-t2v-a14b", "--preset", "t2v-a14b-720p", "--profile", "trn2-720p"]
QUESTION = Question(published("wan2.2-t2v-a14b"), (T2V_720P,), TRN2, "auto", "bfloat16")


def planned(capsys, *arguments):
    """The JSON of a plan that succeeds."""
    assert invoke(["plan", *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(("attention", "code"), [("gather", 2), ("ring", 0)])
def test_the_case_that_failed_on_a_device(attention, code, capsys):
    """720p on tp=4,cp=8,cfg=2: exit 2 with gathered keys and values, 0 with the ring; the plan is printed either way."""
    assert invoke(["plan", *A14B, "--mesh", "tp=4,cp=8,cfg=2", "--attention", attention]) == code
    shown = capsys.readouterr()
    assert ("DOES NOT FIT" in shown.out) is (code == 2)
    assert ("try --attention ring" in shown.err) is (code == 2)


def test_ignore_memory(capsys):
    """--ignore-memory prints the verdict and goes on."""
    arguments = ["--mesh", "tp=4,cp=8,cfg=2", "--attention", "gather", "--ignore-memory"]
    assert invoke(["plan", *A14B, *arguments]) == 0
    assert "DOES NOT FIT" in capsys.readouterr().out


def test_run_refuses_what_does_not_fit_and_names_without_weights(tmp_path, capsys):
    """`run` says that a published name has no weights before anything else is tried."""
    manifest = save(tmp_path / "m.parquet", {"prompt": ["a fox"]})
    assert invoke(["run", str(manifest), *A14B, "--out", str(tmp_path / "out")]) == 2
    assert "sizes without weights" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_efficiency_meets_the_measurement():
    """With the solved efficiency the measured mesh takes the measured seconds."""
    for kind, known in MEASURED.items():
        dtypes = "bfloat16", known.vae_dtype
        question = Question(published(known.model), (known.clips,), known.machine, known.attention, *dtypes)
        seconds = clip_seconds(
            question.subject, known.clips, question.placed(known.degrees), known.machine, Rates(efficiency(kind))
        )
        assert seconds.total == pytest.approx(known.seconds, rel=1e-9)


def test_holdouts_are_predicted():
    """Denoising of the seven measurements that were held out is predicted within 30 %, totals within 20 %, and the table shows each miss."""
    found = holdouts.misses()
    assert all(abs(miss.denoise_share) < 0.3 for miss in found)
    assert all(abs(miss.total_share) < 0.2 for miss in found)
    assert len(holdouts.as_text().splitlines()) == 1 + len(found)


def test_ranking_is_by_the_aim_and_fits_first():
    """Throughput ranks by clips per machine-hour, latency by seconds; what does not fit comes last; swings name both."""
    fast, quick = rank(QUESTION, "throughput"), rank(QUESTION, "latency")
    for found in (fast, quick):
        fits = [choice.fits for choice in found]
        assert fits == sorted(fits, reverse=True)
    rates = [choice.clips_per_hour for choice in fast if choice.fits]
    assert rates == sorted(rates, reverse=True)
    seconds = [choice.seconds_per_clip for choice in quick if choice.fits]
    assert seconds == sorted(seconds)
    assert len(swings(QUESTION, "latency")) == 4


@pytest.mark.parametrize(
    ("preset", "profile", "size", "words"),
    [
        ("ti2v-5b", "trn2-5b", (832, 480, 17), ["stays", "stays", "flips to tp=4,cp=8,cfg=2 x 1", "stays"]),
        ("t2v-a14b-720p", "trn2-720p", (832, 480, 81), ["stays"] * 4),
    ],
)
def test_a_flip_is_said(preset, profile, size, words, tmp_path, capsys):
    """5B, 17 frames, latency: with a link 30 % slower tp=4 beats tp=2, and the page says so; A14B at 480p never flips."""
    width, height, num_frames = ([value] for value in size)
    columns = {"prompt": ["a fox"], "width": width, "height": height, "num_frames": num_frames, "steps": [40]}
    manifest = str(save(tmp_path / "m.parquet", columns))
    model = "wan2.2-ti2v-5b" if preset == "ti2v-5b" else "wan2.2-t2v-a14b"
    settings = ["--preset", preset, "--profile", profile, "--for", "latency", "--attention", "auto"]
    assert invoke(["plan", manifest, "--model", model, *settings]) == 0
    shown = capsys.readouterr().out
    assert re.findall(r"(?:efficiency|link speed) [+-]30%  +(stays|flips to [^:]+): ", shown) == words


def test_a_flip_is_another_mesh():
    """Swings: efficiency -30 % and +30 %, link -30 % and +30 %; a flip names the mesh that comes first then."""
    small = Clips(Bucket(832, 480, 17, "text"), 40)
    question = Question(published("wan2.2-ti2v-5b"), (small,), TRN2, "auto", "bfloat16")
    assert rank(question, "latency")[0].degrees == Degrees(2, 16, 2)
    found = swings(question, "latency")
    assert [swing.flips for swing in found] == [False, False, True, False]
    assert found[2].best.degrees == Degrees(4, 8, 2)
    assert not any(swing.flips for swing in swings(QUESTION, "latency"))


def test_every_ranked_mesh_is_routable():
    """Each combination that the ranking offers has a routable place on a trn2 machine."""
    for choice in rank(QUESTION, "throughput"):
        for replica in {0, choice.replicas - 1}:
            assert not make_layout("trn2", choice.degrees, replica=replica).unroutable()


def test_mesh_auto_takes_the_first(capsys):
    """--mesh auto renders on the best mesh that fits, by the aim, with the layout that places it."""
    for aim in ("throughput", "latency"):
        body = planned(capsys, *A14B, "--mesh", "auto", "--for", aim)["estimate"]
        assert body["chosen"]["mesh"] == body["ranked"][0]["mesh"]
        assert body["chosen"]["replicas"] == body["ranked"][0]["replicas"]
        assert body["chosen"]["fits"]


def test_mesh_auto_on_a_cpu_is_one_rank(tmp_path, capsys):
    """On a CPU --mesh auto is one rank."""
    manifest = save(tmp_path / "m.parquet", {"prompt": ["a fox"], "width": [64], "height": [64], "num_frames": [5]})
    body = planned(capsys, str(manifest), "--model", "tiny", "--mesh", "auto")
    assert body["estimate"]["chosen"]["mesh"] == "tp=1,cp=1,cfg=1"
    assert body["chunks"] == 1


def test_money_follows_the_price(capsys):
    """The price is the given one, else the machine's with its source; cost is hours times price."""
    assert price_of(TRN2, 20.0).note == "from --price-per-hour"
    assert "2026" in price_of(TRN2, None).note
    totals = planned(capsys, *A14B, "--price-per-hour", "20")["estimate"]["totals"]
    assert totals["cost_usd"] == pytest.approx(20 * totals["machine_hours"])
    choice = judge(QUESTION, Degrees(8, 4, 2), 1)
    spent = spend(QUESTION, choice, None, num_chunks=1, codec="h264", lease_ttl_s=180.0)
    assert spent["cost_usd"] is None
    assert spent["clips_per_day"] == pytest.approx(86_400 / choice.seconds_per_clip)


def test_compilation_counts_every_shape_and_kind_of_guidance(tmp_path, capsys):
    """20 shapes, 5 of them also without guidance, take 25 times 45 min, whatever their steps."""
    shapes = [(480 + 16 * k, 4.0, steps) for k in range(20) for steps in (20, 30)]
    shapes += [(480 + 16 * k, 1.0, 20) for k in range(5)]
    widths, high, steps = (list(column) for column in zip(*shapes, strict=True))
    rows = {
        "prompt": ["a fox"] * 45,
        "width": widths,
        "steps": steps,
        "guidance_high": high,
        "guidance_low": [1.0] * 45,
    }
    manifest = str(save(tmp_path / "m.parquet", rows))
    totals = planned(capsys, manifest, *A14B)["estimate"]["totals"]
    assert (len(totals["buckets"]), totals["graph_sets"], totals["compile_s"]) == (20, 25, 25 * 45 * 60)
    assert invoke(["plan", manifest, *A14B]) == 0
    shown = capsys.readouterr().out
    assert "compile: 20 buckets, 5 of them both with guidance and without, 1,125 min, not included" in shown
    assert "45 shapes and numbers of steps are judged by 8" in shown


def test_a_single_shape_with_and_without_guidance_is_two_sets(tmp_path, capsys):
    """One shape in both ways takes two compilations, in words that fit one shape."""
    rows = {"prompt": ["a fox"] * 2, "guidance_high": [1.0, 4.0], "guidance_low": [1.0, 1.0]}
    assert invoke(["plan", str(save(tmp_path / "m.parquet", rows)), *A14B]) == 0
    assert "compile: 1 bucket, with guidance and without, 90 min, not" in capsys.readouterr().out


def test_graphs_are_counted_as_compile_counts_them(tmp_path):
    """The plan counts the variants that `compile` would build, for a manifest of mixed guidance."""
    rows = {"prompt": ["a fox"] * 4, "width": [640, 640, 656, 672], "guidance_high": [1.0, 4.0, 4.0, 1.0]}
    rows |= {"guidance_low": [1.0, 1.0, 1.0, 3.0]}
    manifest = str(save(tmp_path / "m.parquet", rows))
    given = {"model": A14B[1], "preset": A14B[3], "profile": A14B[5]}
    prepared = prepare((manifest,), given, weights=False)
    built = {(variant.bucket, variant.guided) for variant in keys.variants_of(prepared)}
    assert variants_of(prepared.question) == built
    assert len(built) == 4


def test_one_clip_takes_one_replica(capsys):
    """A machine of four replicas renders one clip in the time of one replica, not in a quarter of it."""
    body = planned(capsys, *A14B[:4], "--profile", "trn2-throughput")["estimate"]
    assert body["chosen"]["replicas"] == 4
    seconds = 3600 * body["totals"]["machine_hours"] - LOAD_S
    assert seconds == pytest.approx(body["chosen"]["seconds_per_clip"])


def test_a_shape_with_several_numbers_of_steps_shows_its_memory_once(tmp_path, capsys):
    """Steps do not change memory: one table for them, seconds for each; what is one is not called several."""
    rows = {"prompt": ["a fox"] * 2, "steps": [1, 20], "guidance_high": [1.0] * 2, "guidance_low": [1.0] * 2}
    assert invoke(["plan", str(save(tmp_path / "m.parquet", rows)), *A14B]) == 0
    shown = capsys.readouterr().out
    assert shown.count("memory    1280x720x81-text without guidance, bytes") == 1
    assert "1 step, 1 evaluation each" in shown
    assert "20 steps, 1 evaluation each" in shown


def test_one_expert_at_a_time_holds_half(capsys):
    """--experts swap holds one of two experts and one text's keys, and the page says what it leaves out."""
    both, one = (planned(capsys, *A14B, *more)["estimate"] for more in ([], ["--experts", "swap"]))
    held = [{part["name"]: part["bytes"] for part in found["shapes"][0]["memory"]} for found in (both, one)]
    for name in ("weights: DiT", "K/V of the text"):
        assert held[1][name] == pytest.approx(held[0][name] / 2, abs=1)
    assert held[1]["weights: text"] == held[0]["weights: text"]
    assert [note.partition(":")[0] for note in one["notes"]] == ["--experts swap"]
    assert both["notes"] == []
    assert invoke(["plan", *A14B, "--decode", "tiled", "--step-cache", "0.1", "--compile", "block"]) == 0
    shown = capsys.readouterr().out
    assert "--decode tiled is not counted" in shown
    assert "--step-cache: seconds are those of all steps" in shown


def test_where_nothing_fits_no_other_mesh_is_offered(tmp_path, capsys):
    """Clips that no mesh holds: the page says that none fits, the error offers smaller clips instead of a mesh."""
    columns = {"prompt": ["a fox"], "width": [4096], "height": [4096], "num_frames": [161]}
    assert invoke(["plan", str(save(tmp_path / "m.parquet", columns)), *A14B]) == 2
    shown = capsys.readouterr()
    assert shown.out.startswith("1 clip in 1 chunk, ")
    assert "    none: smaller clips, or a machine with more memory" in shown.out
    assert "no mesh of trn2.48xlarge holds them: try smaller clips, --experts swap or a machine" in shown.err


def test_images_that_decide_the_size_are_planned_at_it(tmp_path):
    """Under `--resize fit` shapes are those of the images, for the plan, the memory and the graphs alike."""
    picture = io.BytesIO()
    Image.new("RGB", (60, 40), "red").save(picture, "PNG")
    (tmp_path / "a.png").write_bytes(picture.getvalue())
    columns = {"prompt": ["a", "b"], "image": ["a.png"] * 2, "width": [96, 960], "height": [96, 960]}
    manifest = str(save(tmp_path / "m.parquet", columns | {"num_frames": [5, 5], "steps": [20, 20]}))
    given = {"model": "wan2.2-i2v-a14b", "preset": "i2v-a14b-480p", "profile": "trn2-i2v-480p", "resize": "fit"}
    prepared = prepare((manifest,), given, weights=False)
    rendered = {row.request.bucket for row in prepared.rows()}
    assert Bucket(112, 64, 5, "image") in rendered
    assert {clips.bucket for clips in prepared.question.mix} == rendered
    assert {bucket for bucket, _ in variants_of(prepared.question)} == rendered
    assert {row["bucket"] for row in describe(prepared)["buckets"]} == {str(bucket) for bucket in rendered}


def test_the_fake_engine_says_that_it_has_no_estimate(capsys):
    """A plan of the fake engine ends with the reason why there are no figures."""
    assert invoke(["plan", "--model", "fake"]) == 0
    assert capsys.readouterr().out.endswith("no estimate: --model fake has no sizes\n")


def test_small_figures_are_not_zero(capsys):
    """A clip of a fraction of a cent, in a thousandth of an hour, is not shown as nothing; infinite prices are refused."""
    arguments = ["plan", "--model", "wan2.2-ti2v-5b", "--preset", "ti2v-5b", "--profile", "cuda"]
    assert invoke([*arguments, "--price-per-hour", "1e-4"]) == 0
    assert re.search(r"cost, USD +[1-9]e-\d+  [1-9]e-\d+ a clip", capsys.readouterr().out)
    assert invoke([*arguments, "--price-per-hour", "inf"]) == 2
    assert "--price-per-hour" in capsys.readouterr().err


def test_many_shapes_are_thinned():
    """Of many shapes every clip is counted, the largest are kept as they are, and the work is at most 5 % too much."""
    mix = [Clips(Bucket(16 * k, 480, 81, "text"), 40, count=k) for k in range(1, 60)]
    mix += [Clips(Bucket(1280, 720, 81, "text"), 1), Clips(Bucket(1920, 1088, 5, "text"), 1)]
    few = thinned(mix, 8, work := partial(denoise_work, QUESTION.subject))
    assert len(few) == 8
    whole, counted = (sum(clips.count * work(clips) for clips in clips_) for clips_ in (mix, few))
    assert whole <= counted < 1.05 * whole
    assert sum(clips.count for clips in few) == sum(clips.count for clips in mix)
    assert {mix[-1], mix[-2]} <= set(few)


def test_a_large_manifest_is_planned_in_seconds_without_torch(tmp_path):
    """30,000 rows: shapes, steps and guidance are counted by columns, requests are not made, torch is not loaded."""
    count = 30_000
    columns = {"row_id": [f"r{k}" for k in range(count)], "prompt": ["a fox"] * count, "steps": [20, 40] * (count // 2)}
    manifest = save(tmp_path / "m.parquet", columns)
    code = (
        "import sys; from batch_gen.cli import invoke\n"
        f"code = invoke(['plan', {str(manifest)!r}, *{A14B!r}])\n"
        "assert 'torch' not in sys.modules\nprint('code', code)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "code 0"
    assert re.search(r"30,000 clips in at least [\d,]+ chunks", done.stdout)


def test_the_page_is_fresh():
    """docs/plan.md is what `plan` prints for the shipped profiles today."""
    code = "import sys; sys.path[:0] = ['.', 'scripts']; import build_plan_page; print(build_plan_page.plan_page(), end='')"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == (ROOT / "docs/plan.md").read_text("utf-8")


def test_machines_by_profile():
    """trn3 profiles mean trn3, other Neuron profiles trn2, and a CPU profile this machine."""
    preset = load_preset("pocket", "pocket")
    found = {
        name: machine_of(resolve({"model": "fake", "out": "o"}, preset, name))
        for name in ("trn3-throughput", "trn2-5b", "cpu")
    }
    assert [machine.name[:4] for machine in found.values()][:2] == ["trn3", "trn2"]
    assert found["cpu"].kind == "cpu"


def a14b_folder(folder):
    """The configuration files of a checkpoint of A14B's size; no weights."""
    spec = published("wan2.2-t2v-a14b").wan
    names = (
        "num_attention_heads",
        "attention_head_dim",
        "in_channels",
        "out_channels",
        "text_dim",
        "ffn_dim",
        "num_layers",
    )
    sizes = {name: getattr(spec.transformer, name) for name in names}
    index = {
        "_class_name": "WanPipeline",
        "transformer_2": ["diffusers", "WanTransformer3DModel"],
        "boundary_ratio": 0.875,
    }
    files = {"model_index.json": index, "transformer/config.json": sizes, "vae/config.json": {"z_dim": 16}}
    for name in ("text_encoder", "tokenizer", "scheduler", "transformer", "vae"):
        (folder / name).mkdir(parents=True)
    for name, body in files.items():
        (folder / name).write_text(json.dumps(body))
    return str(folder)


def test_run_checks_memory_on_a_neuron_profile(tmp_path, capsys):
    """`run` refuses what does not fit on its mesh, exit 2, and writes nothing."""
    manifest = save(tmp_path / "m.parquet", {"prompt": ["a fox"]})
    model = a14b_folder(tmp_path / "a14b")
    mesh = ["--mesh", "tp=4,cp=8,cfg=2", "--attention", "gather", "--out", str(tmp_path / "out")]
    assert invoke(["run", str(manifest), "--model", model, *A14B[2:], *mesh]) == 2
    assert "a rank needs 24.39e9 bytes and has 24.00e9" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
