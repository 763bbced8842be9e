# ruff: noqa: E501 - tables of the page
"""Write docs/plan.md: what `plan` prints for the shipped profiles, and the arithmetic behind each line.

Run: python scripts/build_plan_page.py
"""

import contextlib
import io
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from batch_gen.commands.plan import plan
from batch_gen.estimate import holdouts
from batch_gen.estimate.decoding import speed_up
from batch_gen.estimate.machines import TRN2
from batch_gen.estimate.memory import ADDERS, Placement, footprint
from batch_gen.estimate.speed import (
    MEASURED,
    T2V_720P,
    Rates,
    clip_seconds,
    efficiency,
    forward_work,
    ideal_denoise_s,
    traffic,
)
from batch_gen.estimate.subject import published
from batch_gen.estimate.work import decode_work, num_tokens
from models.parallel.layout import Degrees

CASES = (
    ("trn2-480p", "wan2.2-t2v-a14b", "t2v-a14b-480p"),
    ("trn2-720p", "wan2.2-t2v-a14b", "t2v-a14b-720p"),
    ("trn2-throughput", "wan2.2-t2v-a14b", "t2v-a14b-720p"),
    ("trn2-i2v-720p", "wan2.2-i2v-a14b", "i2v-a14b-720p"),
    ("trn2-5b", "wan2.2-ti2v-5b", "ti2v-5b"),
    ("trn3", "wan2.2-t2v-a14b", "t2v-a14b-720p"),
    ("cuda", "wan2.2-t2v-a14b", "t2v-a14b-480p"),
)

HEAD = """# Know before you spend: `batch-gen plan`

```
batch-gen plan manifest.parquet --model s3://bucket/wan2.2-t2v-a14b --profile trn2-720p      a manifest
batch-gen plan --model wan2.2-t2v-a14b --preset t2v-a14b-720p --profile trn2-720p            one clip of a preset
batch-gen plan manifest.parquet --model wan2.2-t2v-a14b --profile trn2-480p --mesh auto --for latency   let it choose
```

A published name (`batch-gen models` lists them) needs no weights. Nothing is written, and torch is not loaded. What does
not fit in memory is exit code 2, for `plan` and, on Neuron, for `run`; `--ignore-memory` starts all the same.
`--mesh auto` takes the first of the ranking that fits; `--for` is what it ranks by: clips per machine-hour
(`throughput`) or seconds per clip (`latency`). On a CPU it is one rank a replica; there all ranks of all replicas share
the machine's cores and memory, so replicas are not free. On CUDA each rank has a device. `--json` has every figure.

The estimate knows sizes exactly and speed roughly: one public measurement, seven more to check it against, and none of
ours, for want of a device. Each line below says which it is.

## Line by line: T2V-A14B at 720p on trn2-720p
"""


def plan_page() -> str:
    """docs/plan.md."""
    return HEAD + _arithmetic() + _adders() + _holdouts() + "".join(_case(*case) for case in CASES)


def _arithmetic() -> str:
    subject, placement = published("wan2.2-t2v-a14b"), Placement(Degrees(8, 4, 2), "ring")
    wan = subject.wan
    tokens = num_tokens(subject, T2V_720P.bucket)
    work, moved = forward_work(subject, tokens), traffic(subject, T2V_720P, placement)
    ideal, share = ideal_denoise_s(subject, T2V_720P, placement, TRN2), efficiency("neuron")
    seconds = clip_seconds(subject, T2V_720P, placement, TRN2, Rates(share))
    parts = {part.name: part.num_bytes for part in footprint(subject, T2V_720P, placement, TRN2).parts}
    sums_s = 40 * (moved.sums_bytes / TRN2.link_bytes_per_s + moved.sums_hops * TRN2.hop_s)
    measured = MEASURED["neuron"]
    return f"""
| line | arithmetic |
|---|---|
| tokens | latent 21 x 90 x 160, patches of 1 x 2 x 2: 21 * 45 * 80 = {tokens:,}; each of 4 context ranks holds {tokens // 4:,} |
| weights: DiT | 2 experts * {wan.transformer.num_parameters:,} parameters, 2 bytes each ({wan.transformer.num_split_float32_parameters + wan.transformer.num_whole_float32_parameters:,} of them 4), / tp 8 but for {wan.transformer.num_whole_parameters:,} that every rank holds (norms, tables, biases of sums, both ends) = {parts["weights: DiT"]:,.0f} |
| weights: text | {wan.text_encoder.num_parameters:,} * 2 / 64 ranks (the largest sub-mesh that divides 64 heads) = {parts["weights: text"]:,.0f} |
| K/V of the text | 2 * 512 tokens * 5120 / 8 channels * 40 layers * 2 experts * 1 prompt * 2 bytes = {parts["K/V of the text"]:,.0f} |
| activations | {tokens // 4:,} tokens * 2 bytes * (2 * 5120 whole + max(4 * 5120, 2 * 13824) / 8) = {parts["activations"]:,.0f} |
| K/V in flight | one layer, all tokens, this rank's heads: 2 * {tokens:,} * 640 * 2 = {2 * tokens * 640 * 2:,} bytes; the ring holds 3 of 4 such blocks, a gather holds 2 copies of all |
| one evaluation | self-attention 4 * {tokens:,}^2 * 5120 * 40 and 4 * {tokens:,} * 512 * 5120 * 40 across = {work.attention / 1e12:,.1f} TFLOP; linear {work.linear / 1e12:,.1f}; together {work.total / 1e12:,.1f} |
| denoising, ideal | {work.total / 1e12:,.1f} TFLOP * 2 * 40 steps / (64 cores * 166.75 TFLOP/s) = {ideal:.1f} s (480p: 12.6 s) |
| efficiency | ({ideal:.1f} s + text + decoding at the peak) / ({measured.seconds} s - exposed communication of a gather) = {share:.3f} |
| denoising | {ideal:.1f} / {share:.3f} = {seconds.denoise:.1f} s |
| exposed communication | 3 sums a layer over tp: {moved.sums_bytes / 1e9:.1f} GB a rank and evaluation at 256 GB/s, 2 us a hop, 40 steps: {sums_s:.2f} s; the ring hides behind attention; the rest is guidance and the velocity: {seconds.exposed:.2f} s in all |
| decoding | {decode_work(subject.vae, T2V_720P.bucket) / 1e12:.1f} TFLOP in bfloat16; 16 strips on 64 ranks, halos and the part that every rank repeats make it {speed_up(subject.vae, T2V_720P.bucket, 64):.2f} times faster than one: {seconds.decode:.2f} s |

The same share of the peak is used for every other mesh, shape and model, and on trn3. `how sure` repeats the ranking with
the share and the link speed 30 % lower and higher and says whether another mesh comes first. Differences between meshes of
a few per cent are below what such an estimate can tell; factors are not.
"""


def _adders() -> str:
    rows = "".join(
        f"| {a.name} | {a.num_bytes / 1e9:.2f}e9 a {a.per} | {a.kind} | {a.stage} | {a.source} |\n" for a in ADDERS
    )
    subject = published("wan2.2-t2v-a14b")
    peaks = {
        kind: footprint(subject, T2V_720P, Placement(Degrees(4, 8, 2), kind), TRN2).peak_bytes / 1e9
        for kind in ("gather", "ring")
    }
    in_float32 = Placement(Degrees(4, 8, 2), "ring", vae_dtype="float32")
    wide = footprint(subject, T2V_720P, in_float32, TRN2).peak_bytes / 1e9
    return f"""
## What no size tells

`batch_gen/estimate/memory.py` holds this table; the verdict follows from it and from the 24.0e9 usable bytes of a core.
With gathered keys and values, tp=4,cp=8,cfg=2 at 720p comes to {peaks["gather"]:.2f}e9 (it failed on a device, reported
as 24.4e9); the ring needs {peaks["ring"]:.2f}e9.

The verdict for the ring is close, and rests on two things: the autoencoder computes in bfloat16 on Neuron, as in the programs
that were measured (`--vae-dtype float32` is counted as such: the ring then needs {wide:.1f}e9 and does not fit), and decoding
has no compiler scratch of its own. Elsewhere than on Neuron the autoencoder's default is float32.

| adder | bytes | device | held | source |
|---|---|---|---|---|
{rows}"""


def _holdouts() -> str:
    return f"""
## Measurements that the estimate never saw

TI2V-5B on trn2.48xlarge, warm medians published by others; three columns each: measured, predicted, miss. The totals hold
2 to 3 s of host work that the estimate has no part for, and our strips decode more slowly than the 28 blended tiles of the
measured program (7 s predicted, 4.3 s measured on 64 cores): that totals agree so well is partly luck. Sequential guidance
on 64 cores (`cfg=1`) is the weak spot: small pieces of work per rank cost more than a constant share of the peak.

No figure was fitted to this table. But the part for decoding was replaced after it had been seen once (rough strips in
float32, totals between -9 % and +30 %; now the decoder's own plan in bfloat16), so only denoising is a strict hold-out.

```
{holdouts.as_text()}
```
"""


def _case(profile: str, model: str, preset: str) -> str:
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown):
        plan((), {"model": model, "preset": preset, "profile": profile}, False)
    lines = "\n".join(line.rstrip() for line in shown.getvalue().splitlines())
    return f"""
## {profile}

```
$ batch-gen plan --model {model} --preset {preset} --profile {profile}
{lines}
```
"""


if __name__ == "__main__":
    (ROOT / "docs" / "plan.md").write_text(plan_page(), "utf-8")
