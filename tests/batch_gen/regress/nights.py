"""Nights that nobody rendered: 31 of them, the last with every kind of verdict."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from batch_gen.encode import frames_hash
from batch_gen.regress.artifacts import store_arrays, store_frames
from batch_gen.regress.baseline import approve_case
from batch_gen.regress.results import (
    Artifacts,
    CaseError,
    CaseResult,
    Curves,
    Fingerprint,
    GateResult,
    Night,
    Platform,
    night_key,
)
from tests.clips import SPEC, moving_frames
from tests.making import make_request

SUITE = "nightly"
MARKUP = '<img src=x onerror="document.title=1"> & <b>bold</b> </script> fox'
PLATFORM = Platform(device="cpu", chip="some-cpu", torch="2.13")
BAD_FRAME = 6
REQUESTS = {
    name: replace(make_request(name, steps=4, width=64, height=48, num_frames=13), prompt=prompt)
    for name, prompt in {
        "fox": "a fox in the snow", "bear": MARKUP, "crow": "a crow at dawn", "lynx": "a lynx, one level lighter",
    }.items()
}  # fmt: skip


def fingerprint(commit="one", mesh="tp=1,cp=1,cfg=1"):
    """What decided a night's pixels."""
    return Fingerprint(
        checkpoint="c" * 64,
        settings={"dtype": "float32"},
        numerics={"mesh": mesh},
        numerics_key="k" * 16,
        versions={"torch": "2.13.0", "batch-gen": commit},
    )


def clip(name):
    """(frames, arrays) of a case as its baseline has them."""
    seed = list(REQUESTS).index(name)
    rng = np.random.default_rng(seed)
    arrays = {"text": rng.standard_normal((4, 8)).astype(np.float32), "latents": rng.standard_normal((4, 4, 6, 8))}
    arrays |= {f"{what}.{k}": rng.standard_normal((4, 4, 6, 8)) for k in range(4) for what in ("latents", "velocity")}
    return moving_frames(SPEC, seed), {key: value.astype(np.float32) for key, value in arrays.items()}


def stored(store, name, frames, arrays):
    """A case's objects in the store."""
    kept = Artifacts(frames=store_frames(store, SUITE, frames, SPEC.fps), arrays=store_arrays(store, SUITE, arrays))
    return {"artifacts": kept, "frames_hash": frames_hash(frames), "num_frames": len(frames)}


def case(name, verdict="pass", **changes):
    """A case's result."""
    request = REQUESTS[name]
    facts = {"case": name, "request": request.to_json(), "request_digest": request.digest, "verdict": verdict}
    times = {"text": 0.1, "denoise.high": 2.0, "denoise.low": 1.0, "decode": 0.5}
    gates = (GateResult(gate="frames_hash", level="exact", verdict=verdict),)
    return CaseResult(**(facts | {"timings": times, "gates": gates} | changes))


def night(number, cases, **changes):
    """A night by number."""
    facts = {
        "suite": SUITE, "night": f"202611{number:02d}T020000Z", "started": f"2026-11-{number:02d}T02:00:00Z",
        "finished": f"2026-11-{number:02d}T02:10:00Z", "platform": PLATFORM, "fingerprint": fingerprint(),
        "verdict": "pass", "exit_code": 0, "cases": tuple(cases),
    }  # fmt: skip
    return Night(**(facts | changes))


def write(store, one):
    """Put a night into the store."""
    store.create(night_key(SUITE, one.night), one.to_bytes())


def thirty_nights(store):
    """29 green nights, then one with a pass, a red, a new and a lost case; returns the last."""
    objects = {name: stored(store, name, *clip(name)) for name in REQUESTS if name != "crow"}
    equal = Curves(psnr=(100.0,) * 13, ssim=(1.0,) * 13, luma=(0.0,) * 13, motion=(2.0,) * 13)
    variants = {}
    for number in range(1, 30):
        cases = [case(name, baseline=variants.get(name), curves=equal, **objects[name]) for name in objects]
        one = night(number, cases)
        write(store, one)
        if number == 1:
            variants = {
                item.case: approve_case(store, one, item, "Kim", "looked <i>good</i>").variant for item in cases
            }
    last = red_night(store, objects, variants)
    write(store, last)
    return last


def red_night(store, objects, variants):
    """A black box in one frame of `bear`, `lynx` green, `fox` lost, `crow` new."""
    frames, arrays = clip("bear")
    frames[BAD_FRAME, 8:24, 8:24] = 0
    arrays["velocity.3"] = arrays["velocity.3"] * np.float32(1.001)
    curves = Curves(
        psnr=tuple(28.0 if k == BAD_FRAME else 100.0 for k in range(13)),
        ssim=tuple(0.9 if k == BAD_FRAME else 1.0 for k in range(13)),
        luma=tuple(-6.0 if k == BAD_FRAME else 0.0 for k in range(13)),
        motion=(2.0,) * 13,
    )
    gates = (
        GateResult(gate="frame_count", level="count", value=13, limit=13, verdict="pass"),
        GateResult(gate="psnr_min", level="near", value=28.0, limit=35.0, verdict="fail", frame=BAD_FRAME, note=MARKUP),
        GateResult(gate="frames_hash", level="exact", verdict="not_comparable", note="not comparable: mesh"),
    )
    bear = case(
        "bear", "fail", baseline=variants["bear"], curves=curves, gates=gates, first_bad_frame=BAD_FRAME,
        worst_frame=BAD_FRAME, **stored(store, "bear", frames, arrays),
    )  # fmt: skip
    lost = case("fox", "infra", error=CaseError(kind="engine_died", message="rank 0 <died>"), timings={})
    crow = case("crow", "new", **stored(store, "crow", *clip("crow")))
    lynx = case("lynx", baseline=variants["lynx"], **objects["lynx"])
    speed = GateResult(gate="speed.decode", level="speed", value=9.0, limit=1.0, verdict="fail", note="stage decode")
    return night(
        30, [lost, bear, crow, lynx], verdict="fail", exit_code=5, gates=(speed,), last_green="20261129T020000Z",
        changed=("bear: pass -> fail",), fingerprint=fingerprint("two <b>", "tp=2,cp=1,cfg=1"),
        since_green=("numerics.mesh: tp=1,cp=1,cfg=1 -> tp=2,cp=1,cfg=1", "versions.batch-gen: one -> two <b>"),
    )  # fmt: skip
