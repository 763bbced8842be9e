"""What `pocket` is called, where its weights are, and how its clips look by default."""

from __future__ import annotations

from pathlib import Path

NAME = "pocket"
WEIGHTS = Path(__file__).resolve().parent / "weights"

WIDTH = 128
HEIGHT = 128
NUM_FRAMES = 17
FPS = 8
STEPS = 16
FLOW_SHIFT = 5.0
GUIDANCE_HIGH = 2.0
GUIDANCE_LOW = 2.0
NEGATIVE_PROMPT = ""
BOUNDARY = 0.875
