"""Draw one picture of all clips of a run: a frame of each with its prompt.

Run: python scripts/contact_sheet.py OUT [PICTURE.png]
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from batch_gen.contact_sheet import contact_sheet
from batch_gen.records import Record


def main() -> int:
    """Write OUT/contact-sheet.png and print its path."""
    if len(sys.argv) not in (2, 3):
        print(__doc__)
        return 2
    out = Path(sys.argv[1])
    picture = Path(sys.argv[2]) if len(sys.argv) == 3 else out / "contact-sheet.png"
    found = [Record.model_validate_json(path.read_bytes()) for path in sorted(out.glob("clips/*/*.json"))]
    found.sort(key=lambda record: record.clip_id)
    contact_sheet([(record.request["prompt"], out / record.file.key) for record in found], picture)
    print(f"picture    {picture}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
