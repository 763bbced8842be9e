"""The cost notes of the NKI kernels, and what the torch references take on this machine.

Run: python scripts/bench_kernels.py
The first table is arithmetic (counts per engine of Trainium2 at the documented rates, not run on a device) beside the
utilisations known for this job. The second is measured here. The last line is one JSON object; `ok` says that the notes
count what the kernels do on the stand-in, within 3 %.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from kernels import cost
from kernels.adaln import adaln
from kernels.attention import attention
from kernels.conv3d import conv3d
from kernels.fp8_matmul import fp8_matmul, quantize_weight
from kernels.qk_norm_rope import qk_norm_rope

MAX_NOTE_ERROR = 0.03


def agreement() -> float:
    """The largest relative error of the attention note against the stand-in's counts, over all engines."""
    from tests.nki_standin.launch import launch  # isort: skip - it says what `import nki` finds
    import nki

    from kernels.attention_nki import attention as kernel

    q, k = torch.randn(1, 1300, 1, 128).bfloat16(), torch.randn(1, 2600, 1, 128).bfloat16()
    launch(kernel, q, k, k)
    note, found = cost.attention(1, 1300, 2600, 1), nki.last_report.work
    names = ("tensor_columns", "vector_cycles", "scalar_cycles", "dma_bytes")
    return max(abs(getattr(note, name) / found[name] - 1) for name in names)


def milliseconds(call: Callable[[], object]) -> float:
    """The best of a few runs."""
    best = float("inf")
    with torch.inference_mode():
        for _ in range(5):
            start = time.perf_counter()
            call()
            best = min(best, time.perf_counter() - start)
    return best * 1e3


def references() -> list[tuple[str, str, float]]:
    """(operator, shape, ms) of the torch references at the size of a small model."""
    rows: list[tuple[str, str, float]] = []
    for dtype in (torch.float32, torch.bfloat16):
        q, x = torch.randn(1, 1200, 6, 64).to(dtype), torch.randn(1, 1200, 384).to(dtype)
        gate, gain, angle = torch.randn(1, 1, 384), torch.randn(384), torch.randn(1200, 32)
        video, kernel = torch.randn(1, 32, 4, 96, 96).to(dtype), torch.randn(32, 32, 3, 3, 3).to(dtype)
        weight, scale = quantize_weight(torch.randn(384, 384))
        calls: list[tuple[str, str, Callable[[], object]]] = [
            ("attention", "1200 tokens, 6 x 64", lambda q=q: attention(q, q, q)),
            ("adaln", "1200 x 384", lambda x=x, g=gate: adaln(x, x, g, g, g)),
            ("qk_norm_rope", "1200 x 6 x 64", lambda q=q, g=gain, a=angle: qk_norm_rope(q, q, g, g, a, a)),
            ("conv3d", "32 -> 32, 4 x 96 x 96", lambda v=video, w=kernel, g=gain[:32]: conv3d(v, w, None, (1, 1), g)),
            ("fp8_matmul", "1200 x 384 x 384", lambda x=x[0], w=weight, s=scale: fp8_matmul(x, w, s)),
        ]  # fmt: skip
        rows += [(name, f"{shape}, {str(dtype)[6:]}", milliseconds(call)) for name, shape, call in calls]
    return rows


def main() -> None:
    print("On paper, one rank (a logical core of two physical ones), busy milliseconds per engine:\n")
    print(cost.table())
    print("\nTorch references on this machine:\n")
    for name, shape, took in references():
        print(f"{name:16}{shape:36}{took:9.3f} ms")
    error = agreement()
    exact, bound = cost.attention(1, 18900, 75600, 5), cost.ring_attention_constmax(1, 18900, 18900, 5, 4)
    ratios = {
        "attention_mfu": round(exact.mfu(), 3),
        "attention_mfu_known": cost.KNOWN_MFU["attention"],
        "constmax_mfu": round(bound.mfu(), 3),
        "constmax_mfu_known": cost.KNOWN_MFU["ring_attention_constmax"],
        "constmax_over_attention_time": round(bound.limit()[1] / exact.limit()[1], 3),
        "note_error": round(error, 4),
    }
    print(json.dumps({"name": "bench_kernels", "ok": error <= MAX_NOTE_ERROR, "ratios": ratios}))


if __name__ == "__main__":
    main()
