"""Write the random checkpoint `tiny` in diffusers layout: `build_tiny_checkpoint.py [FOLDER] [VARIANT]`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from models.wan.tiny import VARIANTS, build_tiny


def main() -> int:
    """Build one variant; the default folder is ./tiny."""
    arguments = sys.argv[1:]
    folder = Path(arguments[0] if arguments else "tiny")
    variant = arguments[1] if len(arguments) > 1 else "default"
    if variant not in VARIANTS:
        print(f"variant {variant!r} is unknown; choose one of {', '.join(VARIANTS)}", file=sys.stderr)
        return 2
    if (folder / "model_index.json").exists():
        print(f"{folder}: already holds a checkpoint; remove it or name another folder", file=sys.stderr)
        return 2
    build_tiny(folder, variant)
    num_bytes = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    print(f"{folder}: {num_bytes / 1e6:.1f} MB")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
