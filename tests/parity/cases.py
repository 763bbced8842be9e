"""The clips that are compared: name -> (variant of `tiny`, what differs from the standard clip, solver)."""

from tests.parity.reference import still

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
    "I2V, first image": ("i2v", {"steps": 6, "image": still(1)}, "unipc"),
    "I2V, first image, upright, 17 frames": (
        "i2v",
        {"width": 48, "height": 80, "num_frames": 17, "steps": 4, "image": still(2, 48, 80)},
        "unipc",
    ),
    "I2V, first image, one frame, Euler": ("i2v", {"num_frames": 1, "steps": 4, "image": still(3)}, "euler"),
    "I2V, first and last image": ("i2v", {"steps": 6, "image": still(1), "last_image": still(2)}, "unipc"),
    "I2V, first and last image, 5 frames, upright": (
        "i2v",
        {
            "width": 48,
            "height": 80,
            "num_frames": 5,
            "steps": 4,
            "image": still(2, 48, 80),
            "last_image": still(4, 48, 80),
        },
        "unipc",
    ),
    "I2V, first and last image, wide, 13 frames": (
        "i2v",
        {
            "width": 128,
            "height": 32,
            "num_frames": 13,
            "steps": 4,
            "image": still(5, 128, 32),
            "last_image": still(6, 128, 32),
        },
        "unipc",
    ),
    "5B, text": ("ti2v", {"steps": 5}, "unipc"),
    "5B, text, upright, one frame": ("ti2v", {"width": 64, "height": 128, "num_frames": 1, "steps": 3}, "unipc"),
    "5B, text, wide, 17 frames": ("ti2v", {"width": 160, "height": 64, "num_frames": 17, "steps": 3}, "euler"),
    "5B, image": ("ti2v", {"steps": 5, "image": still(1)}, "unipc"),
    "5B, image, upright, 5 frames": (
        "ti2v",
        {"width": 64, "height": 128, "num_frames": 5, "steps": 3, "image": still(2, 64, 128)},
        "euler",
    ),
    "5B, image, wide, 17 frames": (
        "ti2v",
        {"width": 160, "height": 64, "num_frames": 17, "steps": 3, "image": still(3, 160, 64)},
        "unipc",
    ),
}
