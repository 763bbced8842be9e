"""The clips that are compared: name -> (variant of `tiny`, what differs from the standard clip, solver)."""

CASES = {
    "guidance high and low differ": ("default", {}, "unipc"),
    "head width 128, upright, one more step than before": (
        "head128",
        {"width": 48, "height": 80, "num_frames": 5, "steps": 5},
        "unipc",
    ),
    "one frame": ("default", {"width": 64, "num_frames": 1, "steps": 4}, "unipc"),
    "wide, 17 frames": (
        "default",
        {"width": 128, "height": 32, "num_frames": 17, "steps": 4, "flow_shift": 12.0},
        "unipc",
    ),
    "Euler": ("default", {"steps": 6, "flow_shift": 3.0}, "euler"),
    "one expert": ("single", {"steps": 4}, "unipc"),
    "high above 1, low 1": ("default", {"steps": 4, "guidance_low": 1.0}, "unipc"),
    "no guidance": ("default", {"steps": 4, "guidance_high": 1.0, "guidance_low": 1.0}, "unipc"),
    "empty negative prompt": ("default", {"steps": 4, "negative_prompt": ""}, "unipc"),
    "more than 512 tokens": (
        "default",
        {"steps": 3, "prompt": "a very long road through the mountain, " * 80},
        "unipc",
    ),
}
