"""The names that other tools give to our columns, as one table; the docs print it, the importer follows it.

Where one name means different things in different engines it stands once per engine, and an import without `--from`
stops at it. What the engines do was read in their code, not in their names: see the notes.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final, Literal

from batch_gen import rules

Convert = Literal[
    "text", "whole", "number", "seed", "fps", "size", "both", "low_high", "id", "media", "messages", "seconds", "frames"
]

ENGINES: Final[dict[str, str]] = {
    "diffusers": "Hugging Face diffusers; FastVideo, SGLang and xDiT use its names in its sense",
    "wan": "the Wan repository's command line and configs",
    "vllm-omni": "vLLM-Omni, by what its code does: guidance_scale at high noise, guidance_scale_2 at low noise",
    "vllm-omni-docs": "vLLM-Omni, by the words of its pages: guidance_scale at low noise, guidance_scale_2 at high",
    "wan2gp": "Wan2GP settings and queues",
    "comfyui": "ComfyUI and its Wan nodes",
    "diffsynth": "DiffSynth-Studio",
    "openai": "OpenAI batch files",
}


@dataclass(frozen=True, slots=True)
class Name:
    """What one foreign name means.

    Attributes:
        name: The name, lower case with underscores.
        columns: The columns that it fills.
        convert: How a cell becomes theirs; see `convert`.
        used_by: Who uses it, for the docs.
        engine: Empty, or the engine in which alone it means this.
        note: What to know, for the docs.
    """

    name: str
    columns: tuple[str, ...]
    convert: Convert
    used_by: str
    engine: str = ""
    note: str = ""


_GUIDANCE: Final = ("guidance_high", "guidance_low")
_SIZE: Final = ("width", "height")

NAMES: Final[tuple[Name, ...]] = (
    Name("caption", ("prompt",), "text", "data sets"),
    Name("text", ("prompt",), "text", "data sets"),
    Name("text_prompt", ("prompt",), "text", "hosted services"),
    Name("prompt_en", ("prompt",), "text", "VBench"),
    Name("positive", ("prompt",), "text", "ComfyUI"),
    Name("positive_prompt", ("prompt",), "text", "ComfyUI"),
    Name("messages", ("prompt",), "messages", "OpenAI chat lines", note="the text of the last user message"),
    Name("negative", ("negative_prompt",), "text", "ComfyUI"),
    Name("neg_prompt", ("negative_prompt",), "text", "several"),
    Name("n_prompt", ("negative_prompt",), "text", "Wan"),
    Name("sample_neg_prompt", ("negative_prompt",), "text", "Wan configs"),
    Name("id", ("row_id",), "id", "everyone", note="letters that a file name cannot have become `-`"),
    Name("uid", ("row_id",), "id", "data sets"),
    Name("uuid", ("row_id",), "id", "data sets"),
    Name("prompt_id", ("row_id",), "id", "data sets"),
    Name("sample_id", ("row_id",), "id", "data sets"),
    Name("custom_id", ("row_id",), "id", "OpenAI batch lines"),
    Name("base_seed", ("seed",), "seed", "Wan", note="-1 (random) leaves the cell empty"),
    Name("noise_seed", ("seed",), "seed", "ComfyUI"),
    Name("size", _SIZE, "size", "Wan, OpenAI, vLLM-Omni", note="`1280*720`, `1280x720`"),
    Name("resolution", _SIZE, "size", "Wan2GP"),
    Name("image_size", _SIZE, "size", "hosted services"),
    Name("frame_num", ("num_frames",), "whole", "Wan"),
    Name("frames", ("num_frames",), "whole", "several"),
    Name("video_length", ("num_frames",), "frames", "Wan2GP", note="frames; `5s` needs fps"),
    Name("seconds", ("num_frames",), "seconds", "OpenAI", note="with fps: the nearest 4k+1; without: an extra column"),
    Name("duration", ("num_frames",), "seconds", "hosted services", note="as `seconds`"),
    Name("length", ("num_frames",), "whole", "ComfyUI", engine="comfyui", note="frames there, seconds elsewhere"),
    Name("frame_rate", ("fps",), "fps", "ComfyUI"),
    Name("frames_per_second", ("fps",), "fps", "hosted services"),
    Name("sample_fps", ("fps",), "fps", "Wan configs"),
    Name("force_fps", ("fps",), "fps", "Wan2GP", note="empty or `auto`: the preset's"),
    Name("num_inference_steps", ("steps",), "whole", "diffusers, vLLM-Omni, Wan2GP"),
    Name("sample_steps", ("steps",), "whole", "Wan"),
    Name("sampling_steps", ("steps",), "whole", "Wan"),
    Name("infer_steps", ("steps",), "whole", "LightX2V"),
    Name("guidance_scale", _GUIDANCE, "both", "everyone", note="alone: both; beside a second scale: high noise"),
    Name("guidance_scale_2", ("guidance_low",), "number", "diffusers", engine="diffusers"),
    Name("guidance_scale_2", ("guidance_low",), "number", "vLLM-Omni's code", engine="vllm-omni"),
    Name("guidance_scale_2", ("guidance_high",), "number", "vLLM-Omni's pages", engine="vllm-omni-docs"),
    Name("guidance2_scale", ("guidance_low",), "number", "Wan2GP", note="the second phase, at low noise"),
    Name("sample_guide_scale", _GUIDANCE, "low_high", "Wan", note="one number: both; a pair is (low, high)"),
    Name("guide_scale", _GUIDANCE, "low_high", "Wan", note="one number: both; a pair is (low, high)"),
    Name("cfg_scale", _GUIDANCE, "both", "DiffSynth-Studio"),
    Name("cfg", _GUIDANCE, "both", "ComfyUI"),
    Name("sample_shift", ("flow_shift",), "number", "Wan"),
    Name("shift", ("flow_shift",), "number", "ComfyUI"),
    Name("sigma_shift", ("flow_shift",), "number", "DiffSynth-Studio"),
    Name("image_path", ("image",), "media", "several"),
    Name("init_image", ("image",), "media", "several"),
    Name("input_image", ("image",), "media", "DiffSynth-Studio"),
    Name("start_image", ("image",), "media", "ComfyUI"),
    Name("image_start", ("image",), "media", "Wan2GP"),
    Name("first_frame", ("image",), "media", "Wan"),
    Name("input_reference", ("image",), "media", "OpenAI, vLLM-Omni"),
    Name("end_image", ("last_image",), "media", "ComfyUI, DiffSynth-Studio"),
    Name("image_end", ("last_image",), "media", "Wan2GP"),
    Name("last_frame", ("last_image",), "media", "Wan"),
    Name("num_videos_per_prompt", ("samples",), "whole", "diffusers"),
    Name("num_outputs_per_prompt", ("samples",), "whole", "vLLM-Omni"),
    Name("repeat_generation", ("samples",), "whole", "Wan2GP"),
    Name("n", ("samples",), "whole", "OpenAI"),
)

_CANONICAL: Final[dict[str, Convert]] = {
    "string": "text",
    "int32": "whole",
    "int64": "whole",
    "float64": "number",
    "fps": "fps",
    "media": "media",
}

ENVELOPES: Final = frozenset(
    {"body", "params", "parameters", "input", "settings", "sampling_params", "extra_body", "extra_params"}
    | {"extra_args", "multi_modal_data", "inputs"}
)
"""Names whose value, where it is an object, holds the settings themselves."""

IGNORED: Final = frozenset({"method", "url"})
"""Parts of an OpenAI batch line that say where it was to be sent."""

AMBIGUOUS: Final[dict[str, str]] = {
    "guidance_scale_2": "is the scale at low noise in diffusers and in vLLM-Omni's code, at high noise in its pages",
    "length": "is a number of frames in ComfyUI and seconds elsewhere",
}


def folded(name: str) -> str:
    """A name as the table writes it: `numInferenceSteps`, `Num-Inference Steps` -> `num_inference_steps`."""
    snake = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name.strip())
    return re.sub(r"[\s\-]+", "_", snake).lower()


def meanings(name: str) -> list[Name]:
    """Everything that a name may mean; one entry with an empty engine where it is clear, none for an extra column."""
    plain = folded(name)
    rule = rules.BY_COLUMN.get(plain)
    if rule is not None:
        convert: Convert = {"seed": "seed", "row_id": "id"}.get(plain, _CANONICAL[rule.type])  # type: ignore[assignment]
        return [Name(plain, (plain,), convert, "batch-gen")]
    return [entry for entry in NAMES if entry.name == plain]


def docs_table() -> str:
    """The table of names for the docs, as Markdown."""
    lines = ["| name | used by | column | note |", "|---|---|---|---|"]
    for entry in NAMES:
        note = f"`--from {entry.engine}`; {entry.note}".strip("; ") if entry.engine else entry.note
        lines.append(f"| {entry.name} | {entry.used_by} | {', '.join(entry.columns)} | {note} |")
    return "\n".join(lines)


def engines_table() -> str:
    """The engines that `--from` knows, as Markdown."""
    lines = ["| `--from` | what |", "|---|---|"]
    return "\n".join(lines + [f"| {name} | {what} |" for name, what in ENGINES.items()])
