"""How long the command line takes to start, beside an interpreter that does nothing and one that imports torch.

Run: python scripts/bench_startup.py [--tiny]
"""

import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
COMMANDS = {
    "help": [sys.executable, "-m", "batch_gen", "--help"],
    "models": [sys.executable, "-m", "batch_gen", "models"],
    "nothing": [sys.executable, "-c", "pass"],
    "torch": [sys.executable, "-c", "import torch"],
}


def main() -> int:
    """Alternate the commands, print medians, end with the JSON line."""
    rounds = 2 if "--tiny" in sys.argv else 9
    seconds: dict[str, list[float]] = {name: [] for name in COMMANDS}
    for _ in range(rounds):
        for name, command in COMMANDS.items():
            began = time.perf_counter()
            subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
            seconds[name].append(time.perf_counter() - began)
    median = {name: statistics.median(values) for name, values in seconds.items()}
    for name, value in median.items():
        print(f"{name:<10}{value:8.3f} s  (min {min(seconds[name]):.3f}, max {max(seconds[name]):.3f})")
    ratios = {"help_vs_nothing": median["help"] / median["nothing"], "torch_vs_help": median["torch"] / median["help"]}
    rounded = {key: round(value, 2) for key, value in ratios.items()}
    print(json.dumps({"name": "startup", "ok": True, "ratios": rounded}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
