"""What `import nki` means in the tests: the stand-in, unless NKI_TEST_TARGET says simulate or device."""

import os
import sys
from pathlib import Path

TARGET = os.environ.get("NKI_TEST_TARGET", "standin")
if TARGET == "standin":
    sys.path.insert(0, str(Path(__file__).parent))
