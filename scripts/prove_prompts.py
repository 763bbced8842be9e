"""Real prompts, end to end: import text files, render to a SeaweedFS bucket, verify, print the figures.

Run: python scripts/prove_prompts.py [PROMPTS.txt ...] [--num 64] [--model tiny] [--full]

Without files it uses tests/data/prompts.txt. `--full` renders the preset's size; the default is small, to be quick.
Half of the prompts are the shortest of the files, half the longest.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests.seaweed import ACCESS_KEY, REGION, SECRET_KEY, SeaweedServer

SMALL = ("--override", "width=64", "--override", "height=64", "--override", "num_frames=9", "--override", "steps=4")


def main() -> int:
    """Run everything; exit code 1 when anything is not as it should be."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", type=Path, default=[ROOT / "tests/data/prompts.txt"])
    parser.add_argument("--num", type=int, default=64)
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--full", action="store_true")
    arguments = parser.parse_args()
    chosen = choose(arguments.files, arguments.num)
    with tempfile.TemporaryDirectory(prefix="batch-gen-prompts-") as name:
        folder = Path(name)
        (folder / "prompts.txt").write_text("\n".join(chosen) + "\n", "utf-8")
        server = SeaweedServer(folder / "weed")
        os.environ |= {
            "AWS_ACCESS_KEY_ID": ACCESS_KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
            "AWS_DEFAULT_REGION": REGION,
        }
        try:
            server.start().make_bucket("prompts")
            flags = ("--model", arguments.model, *(() if arguments.full else SMALL))
            return render(folder, server.endpoint, chosen, flags)
        finally:
            server.stop()


def choose(files: list[Path], num: int) -> list[str]:
    """The shortest and the longest lines, half of each."""
    every = (line.strip() for file in files for line in file.read_text("utf-8").splitlines())
    lines = sorted({line for line in every if line}, key=len)
    if len(lines) <= num:
        return lines
    return lines[: num - num // 2] + lines[len(lines) - num // 2 :]


def render(folder: Path, endpoint: str, chosen: list[str], how: tuple[str, ...]) -> int:
    """Import, run, run again and verify; prints the figures."""
    manifest, out = folder / "manifest.parquet", "s3://prompts/run"
    reach = ("--s3-endpoint", endpoint)
    call("import", str(folder / "prompts.txt"), str(manifest))
    began = time.monotonic()
    flags = ("--out", out, *reach, *how, "--quiet", "--json")
    first = json.loads(call("run", str(manifest), *flags))
    seconds = time.monotonic() - began
    again = json.loads(call("run", str(manifest), *flags))
    report = json.loads(call("verify", out, *reach, "--deep", "--json"))
    words = [len(prompt.split()) for prompt in chosen]
    print(f"prompts    {len(chosen)}, {min(words)} to {max(words)} words")
    print(
        f"committed  {first['num_committed']} of {first['num_clips']} in {seconds:.0f} s, {report['num_bytes']:,} bytes"
    )
    print(f"again      {again['summary']['num_committed']} rendered")
    print(f"verified   {report['num_committed']} decoded back, {len(report['problems'])} problems")
    ok = first["num_committed"] == report["num_committed"] == len(chosen) and not report["problems"]
    ok = ok and again["summary"]["num_committed"] == 0
    print(json.dumps({"name": "prompts", "ok": ok, "ratios": {"committed": first["num_committed"] / len(chosen)}}))
    return 0 if ok else 1


def call(*arguments: str) -> str:
    """One batch-gen command; ends the script with its words when it fails."""
    command = [sys.executable, "-m", "batch_gen", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        sys.exit(f"{' '.join(arguments)}: exit {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout


if __name__ == "__main__":
    sys.exit(main())
