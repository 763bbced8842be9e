"""The first hour on a new device, in tiers, each only when the one before it passed; one JSON report.

    python scripts/first_device_hour.py                        # on the device of this machine
    python scripts/first_device_hour.py --device cpu           # a rehearsal: the same code on the host
    python scripts/first_device_hour.py --full m.parquet -- --model s3://bucket/wan --profile trn2-480p

1. machine      the stack is the right one, the device opens, a function compiles for each role and gives its numbers
2. components   text encoder, experts, decoder: three ways (float32 reference, working dtype on the host, ours)
3. step         guided velocity at both ends and on both sides of the change of experts, teacher-forced, three ways
4. end to end   two small clips through `batch-gen run`: committed, verified deeply, rendered once
5. full         with --full: one clip of that manifest with the flags behind `--`

The small checkpoint has random weights. On neuron it is the variant whose heads are as wide as the kernels need.
References are computed on the host and kept in OUT/references, so that a second try costs no device time for them.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from batch_gen.commands.doctor import diagnose
from batch_gen.environment import cache_folder, child_environment
from batch_gen.errors import BatchGenError
from batch_gen.health import View
from batch_gen.versions import cpu_class, versions

STEPS = 4
SIZE_PX, FRAMES = 64, 5
# Opens the device as a rank does and compiles one function for each role; the last line is JSON.
PROBE = """
import json, sys
from pathlib import Path
from models.device import Compiling, Start, open_device, prepare
from models.device_faults import classify
name, backend, cache = sys.argv[1:4]
try:
    prepare(Start(name, 0, 1, Path(cache)))
    device = open_device(name, compiling=Compiling("model", backend))
    import torch
    def probe(x):
        return torch.nn.functional.gelu(x @ x / 128, approximate="tanh")
    errors = {}
    for role in ("transformer", "vae", "text", "combine"):
        x = torch.linspace(-2, 2, 128 * 128).view(128, 128)
        here = x.to(device.torch_device)
        compiled = device.compile(probe, f"probe_{role}", role)
        errors[role] = float((compiled(here).cpu() - probe(x)).abs().max())
    device.synchronize()
    memory = device.memory()
    print(json.dumps({"ok": max(errors.values()) < 1e-2, "device": str(device.torch_device), "torch": torch.__version__,
                      "errors": errors, "memory": [memory.used_bytes, memory.peak_bytes, memory.total_bytes]}))
except Exception as error:
    found = classify(f"{type(error).__name__}: {error}") or (getattr(error, "kind", "bug"), str(error))
    print(json.dumps({"ok": False, "kind": found[0], "message": found[1][:2000]}))
"""
BUILD = "import sys, pathlib, models.wan.tiny as t; print(t.ensure_tiny(pathlib.Path(sys.argv[1]), sys.argv[2]))"


def default_device() -> str:
    """What this machine has."""
    if Path("/dev/neuron0").exists():
        return "neuron"
    return "cuda" if Path("/dev/nvidiactl").exists() else "cpu"


def checkpoint(options: argparse.Namespace) -> str:
    """The small checkpoint, built on the host in a process of its own, which touches no device."""
    if options.model is not None:
        return str(options.model)
    variant = "head128" if options.device == "neuron" else "default"
    folder = cache_folder() / "checkpoints"
    folder.mkdir(parents=True, exist_ok=True)
    environment = child_environment(TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    done = subprocess.run(
        [sys.executable, "-c", BUILD, str(folder), variant], env=environment, capture_output=True, text=True, check=True
    )
    return done.stdout.splitlines()[-1]


def settings(options: argparse.Namespace) -> dict[str, Any]:
    """Flags of every tier."""
    return {
        "device": options.device,
        "profile": "cpu",
        "kernels": "nki" if options.device == "neuron" else "reference",
        "dtype": options.dtype,
        "compile": options.compile,
        "compile_backend": options.compile_backend,
        "threads": options.threads,
    }


def machine(options: argparse.Namespace) -> dict[str, Any]:
    """Tier 1."""
    red = [f"{line.name}: {line.text} -> {line.fix}" for line in diagnose(None, {}, View()) if line.mark == "red"]
    done = subprocess.run(
        [sys.executable, "-c", PROBE, options.device, options.compile_backend, str(options.out / "graphs")],
        env=child_environment(), capture_output=True, text=True, check=False,
    )  # fmt: skip
    lines = done.stdout.splitlines()
    found = json.loads(lines[-1]) if lines else {"ok": False, "kind": "engine_died", "message": done.stderr[-2000:]}
    return {**found, "ok": found["ok"] and not red, "red": red}


def compared(name: str) -> Callable[[argparse.Namespace], dict[str, Any]]:
    """Tiers 2 and 3."""

    def run(options: argparse.Namespace) -> dict[str, Any]:
        from batch_gen.regress import tiers

        clip = {"width": SIZE_PX, "height": SIZE_PX, "num_frames": FRAMES, "steps": STEPS}
        keep = str(options.out / "references")
        flags = {**settings(options), "allow_compile": True}
        found = tiers.tier(name, options.model, clip, keep=keep, reference=options.reference, **flags)
        return {"ok": bool(found["ok"]), **{key: found[key] for key in ("verdict", "rows", "error") if key in found}}

    return run


def end_to_end(options: argparse.Namespace) -> dict[str, Any]:
    """Tier 4: render, verify, render again."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    manifest, out = options.out / "two.parquet", options.out / "run"
    prompts = ["a red circle moving right", "a green triangle rotating"]
    pq.write_table(pa.table({"row_id": ["one", "two"], "prompt": prompts}), manifest)
    sizes = {"width": SIZE_PX, "height": SIZE_PX, "num_frames": FRAMES, "steps": STEPS}
    flags = [f"--{key.replace('_', '-')}={value}" for key, value in settings(options).items() if value is not None]
    flags += [f"--override={key}={value}" for key, value in sizes.items()]
    flags += ["--allow-compile", "--quiet", f"--model={options.model}", f"--out={out}"]
    first = batch_gen("run", manifest, *flags, "--json")
    found: dict[str, Any] = {"ok": False, "run": first}
    if first["exit"] != 0:
        return found
    found["verify"] = batch_gen("verify", out, "--deep")
    again = batch_gen("run", manifest, *flags, "--json")
    rendered = again["json"]["summary"]["num_committed"] if again["exit"] == 0 else None
    found |= {"rendered_again": rendered}
    found["ok"] = first["json"]["num_committed"] == 2 and found["verify"]["exit"] == 0 and rendered == 0
    return found


def full(options: argparse.Namespace) -> dict[str, Any]:
    """Tier 5."""
    if options.full is None:
        return {"ok": True, "skipped": "not asked: --full MANIFEST -- flags of batch-gen run"}
    flags = [*options.flags, "--limit=1", f"--out={options.out / 'full'}", "--json"]
    found = batch_gen("run", options.full, *flags)
    return {"ok": found["exit"] == 0 and found["json"]["num_committed"] == 1, "run": found}


def batch_gen(*arguments: object) -> dict[str, Any]:
    """One command: exit code, its JSON where it printed some, the end of what it said otherwise."""
    command = [sys.executable, "-m", "batch_gen", *map(str, arguments)]
    done = subprocess.run(command, env=child_environment(), capture_output=True, text=True, check=False)
    body: Any = None
    start = done.stdout.find("{")
    if "--json" in arguments and start >= 0:
        body = json.loads(done.stdout[start:])
    return {"exit": done.returncode, "json": body, "said": "" if done.returncode == 0 else done.stderr[-2000:]}


TIERS: dict[str, Callable[[argparse.Namespace], dict[str, Any]]] = {
    "machine": machine,
    "components": compared("components"),
    "step": compared("step"),
    "end to end": end_to_end,
    "full": full,
}


def walk(options: argparse.Namespace) -> list[dict[str, Any]]:
    """The tiers in order, up to the first that fails."""
    results = []
    for name, tier in TIERS.items():
        if options.tiers and name not in options.tiers:
            continue
        began = time.monotonic()
        try:
            found = tier(options)
        except BatchGenError as error:
            found = {"ok": False, "kind": error.kind, "message": error.message, "hint": error.hint}
        found = {"tier": name, "seconds": round(time.monotonic() - began, 1), **found}
        results.append(found)
        print(f"{'ok  ' if found['ok'] else 'FAIL'} {name:<12}{found['seconds']:8.1f} s  {told(found)}", flush=True)
        if not found["ok"] and not options.go_on:
            break
    return results


def told(found: dict[str, Any]) -> str:
    """One line about a tier."""
    if found.get("rows"):
        return f"{len(found['rows'])} values, {found['verdict']}"
    return str(found.get("message") or found.get("skipped") or "")[:160]


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda", "neuron"], default=default_device())
    parser.add_argument("--model", help="another small checkpoint folder")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="bfloat16")
    parser.add_argument("--compile", choices=["off", "block", "model"], default="block")
    parser.add_argument("--compile-backend", choices=["auto", "inductor", "eager"], default="auto")
    parser.add_argument("--reference", choices=["diffusers", "plain"], default="diffusers")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("device-hour"), help="folder of the report")
    parser.add_argument("--tiers", action="append", choices=list(TIERS), help="only these")
    parser.add_argument("--go-on", action="store_true", help="also after a tier that failed")
    parser.add_argument("--full", help="manifest of the full-size tier; flags of batch-gen run follow behind --")
    parser.add_argument("flags", nargs="*", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    options.out = options.out.resolve()
    options.out.mkdir(parents=True, exist_ok=True)
    options.model = checkpoint(options)
    return options


def main(argv: list[str] | None = None) -> int:
    """Walk the tiers, write the report, print its short form as the last line."""
    options = parse(argv)
    results = walk(options)
    wanted = [name for name in TIERS if not options.tiers or name in options.tiers]
    passed = [found["tier"] for found in results if found["ok"]]
    report = {
        "name": "first_device_hour",
        "ok": passed == wanted,
        "rehearsal": options.device == "cpu",
        "settings": settings(options) | {"model": Path(options.model).name},
        "versions": versions(),
        "cpu": cpu_class(),
        "tiers": results,
    }
    path = options.out / "report.json"
    path.write_text(json.dumps(report, indent=1), "utf-8")
    print(f"report: {path}")
    seconds = {f"{found['tier'].replace(' ', '_')}_s": found["seconds"] for found in results}
    print(json.dumps({"name": "first_device_hour", "ok": report["ok"], "ratios": seconds}))
    return 0 if report["ok"] else 5


if __name__ == "__main__":
    sys.exit(main())
