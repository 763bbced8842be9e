"""Write the section "Meshes on paper" of docs/scale.md; the rest of the page is written by hand.

Run: python scripts/build_scale_meshes.py
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from batch_gen.estimate.paper import with_section

if __name__ == "__main__":
    page = ROOT / "docs" / "scale.md"
    page.write_text(with_section(page.read_text("utf-8")), "utf-8")
