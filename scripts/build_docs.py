"""Write the pages that come from tables in the code: docs/flags.md, docs/plan.md, docs/aws-json.md.

Run: python scripts/build_docs.py [--check]
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

from build_aws_page import aws_page
from build_plan_page import plan_page

from batch_gen.flags import FLAGS

FLAGS_HEAD = """# Settings

Every setting of `batch-gen run`, `plan` and `validate`. The YAML file of `--config` has the same names as keys.

Order: preset and profile < `--config job.yaml` < flags < a cell of the manifest < `--override`.

*Semantic* settings decide what a clip looks like: together with the checkpoint they are the run's fingerprint, and a
resume with others is refused. *Operational* settings decide how a machine renders it.

| flag | values | default | meaning | what it does |
|---|---|---|---|---|
"""


def flags_page() -> str:
    """docs/flags.md."""
    rows = []
    for flag in FLAGS:
        values = " ".join(f"`{value}`" for value in flag.kind) if isinstance(flag.kind, tuple) else flag.kind
        default = "-" if flag.default in (None, ()) else f"`{flag.default}`".lower()
        rows.append(f"| `--{flag.name}` | {values} | {default} | {flag.meaning} | {flag.help} |\n")
    return FLAGS_HEAD + "".join(rows)


PAGES = {"docs/flags.md": flags_page, "docs/plan.md": plan_page, "docs/aws-json.md": aws_page}


def main() -> int:
    """Write the pages, or with --check say which are stale."""
    stale = [name for name, make in PAGES.items() if _read(ROOT / name) != make()]
    if "--check" in sys.argv:
        print("\n".join(f"{name} is stale: run scripts/build_docs.py" for name in stale) or "pages are up to date")
        return bool(stale)
    for name in stale:
        (ROOT / name).write_text(PAGES[name](), "utf-8")
        print(f"wrote {name}")
    return 0


def _read(path: Path) -> str:
    return path.read_text("utf-8") if path.exists() else ""


if __name__ == "__main__":
    sys.exit(main())
