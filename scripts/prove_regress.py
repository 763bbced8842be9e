"""Regression renders on real clips: new, approved, an unchanged render, another mesh, and every mutation.

Run: python scripts/prove_regress.py [--model pocket] [--tiny]

With pocket the cases have their full size and take minutes; --tiny takes the random checkpoint and small clips. The
last line is JSON; its ratios are the share of mutations caught, and how far from the limit another mesh stays.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SUITE = str(ROOT / "manifests/regression.parquet")
SMALL = ["--override", "width=64", "--override", "height=64", "--override", "num_frames=9", "--override", "steps=4"]


def main() -> int:
    """Run everything; exit code 1 when an answer is not the one that is promised."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="pocket")
    parser.add_argument("--tiny", action="store_true")
    arguments = parser.parse_args()
    flags = ["--model", "tiny", *SMALL] if arguments.tiny else ["--model", arguments.model]
    with tempfile.TemporaryDirectory(prefix="batch-gen-regress-") as folder:
        shared = ["--out", folder]
        render = [*shared, *flags, "--limit", "2", "--threads", "1"]
        facts = {"new": regress("run", SUITE, *render, "--night", "n1")[0] == 6}
        regress("approve", "regression", *shared, "--who", "prove_regress", "--why", "first night of the proof")
        code, same = regress("run", SUITE, *render, "--night", "n2", "--json")
        facts["unchanged"] = code == 0 and answers(same, "frames_hash") == {("pass", "")}
        code, meshed = regress("run", SUITE, *render, "--night", "n3", "--mesh", "tp=2", "--json")
        facts["mesh"] = code == 0 and answers(meshed, "frames_hash") == {("not_comparable", "not comparable: mesh")}
        code, mutated = regress("mutate", SUITE, *render, "--json")
        caught = [one["caught"] for one in mutated["mutations"]]
        facts["mutations"] = code == 0 and len(caught) == 8
    for one in mutated["mutations"]:
        print(f"{one['mutation']:16} {'caught' if one['caught'] else 'NOT caught'} by {one['gate']}")
    for name, good in facts.items():
        print(f"{name:16} {'as promised' if good else 'WRONG'}")
    ratios = {"caught": sum(caught) / len(caught), "mesh_psnr_vs_limit": mesh_margin(meshed)}
    print(json.dumps({"name": "prove_regress", "ok": all(facts.values()), "ratios": ratios}))
    return 0 if all(facts.values()) else 1


def regress(*arguments: str) -> tuple[int, dict]:
    """Exit code of a command, and its JSON when it was asked for."""
    command = [sys.executable, "-m", "batch_gen", "regress", *arguments]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False)
    print(f"exit {done.returncode}: regress {' '.join(arguments[:1])}", flush=True)
    return done.returncode, json.loads(done.stdout) if "--json" in arguments and done.stdout else {}


def answers(night: dict, gate: str) -> set[tuple[str, str]]:
    """Verdict and note of one gate over all cases."""
    gates = [found for case in night["cases"] for found in case["gates"]]
    return {(found["verdict"], found["note"]) for found in gates if found["gate"] == gate}


def mesh_margin(night: dict) -> float:
    """The worst frame of the other mesh over the limit; above 1 is green."""
    gates = [found for case in night["cases"] for found in case["gates"] if found["gate"] == "psnr_min"]
    return round(min(found["value"] / found["limit"] for found in gates), 3)


if __name__ == "__main__":
    sys.exit(main())
