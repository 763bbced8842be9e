"""Sizes, limits and official settings of Wan pipelines; imports no torch.

Official values: Wan2.2 `wan/configs/*.py`. Sizes: the diffusers-layout config files.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from models.entry import ConfigFiles, Limits, PipelineEntry
from models.errors import ModelError
from models.umt5.spec import MAX_TOKENS, UMT5_XXL, Umt5Spec
from models.vae.spec import VaeSpec, vae_spec

NUM_TRAIN_TIMESTEPS = 1000
TRAINED_FRAMES = 81
OFFICIAL_NEGATIVE_PROMPT = (
    "\u8272\u8c03\u8273\u4e3d\uff0c\u8fc7\u66dd\uff0c\u9759\u6001\uff0c\u7ec6\u8282\u6a21\u7cca\u4e0d\u6e05\uff0c"
    "\u5b57\u5e55\uff0c\u98ce\u683c\uff0c\u4f5c\u54c1\uff0c\u753b\u4f5c\uff0c\u753b\u9762\uff0c\u9759\u6b62\uff0c"
    "\u6574\u4f53\u53d1\u7070\uff0c\u6700\u5dee\u8d28\u91cf\uff0c\u4f4e\u8d28\u91cf\uff0cJPEG\u538b\u7f29\u6b8b\u7559\uff0c"
    "\u4e11\u964b\u7684\uff0c\u6b8b\u7f3a\u7684\uff0c\u591a\u4f59\u7684\u624b\u6307\uff0c\u753b\u5f97\u4e0d\u597d\u7684\u624b\u90e8\uff0c"
    "\u753b\u5f97\u4e0d\u597d\u7684\u8138\u90e8\uff0c\u7578\u5f62\u7684\uff0c\u6bc1\u5bb9\u7684\uff0c\u5f62\u6001\u7578\u5f62\u7684\u80a2\u4f53\uff0c"
    "\u624b\u6307\u878d\u5408\uff0c\u9759\u6b62\u4e0d\u52a8\u7684\u753b\u9762\uff0c\u6742\u4e71\u7684\u80cc\u666f\uff0c\u4e09\u6761\u817f\uff0c"
    "\u80cc\u666f\u4eba\u5f88\u591a\uff0c\u5012\u7740\u8d70"
)


@dataclass(frozen=True, slots=True)
class TransformerSpec:
    """Sizes of one DiT; the names are those of diffusers' config.json."""

    patch_size: tuple[int, int, int] = (1, 2, 2)
    num_attention_heads: int = 40
    attention_head_dim: int = 128
    in_channels: int = 16
    out_channels: int = 16
    text_dim: int = 4096
    freq_dim: int = 256
    ffn_dim: int = 13824
    num_layers: int = 40
    eps: float = 1e-6
    rope_max_seq_len: int = 1024

    @property
    def width(self) -> int:
        """Model width: heads times head width."""
        return self.num_attention_heads * self.attention_head_dim

    @property
    def num_parameters(self) -> int:
        """Parameters of one expert."""
        width, ffn = self.width, self.ffn_dim
        patch = math.prod(self.patch_size)
        attention = 4 * (width * width + width) + 2 * width
        block = 2 * attention + 2 * width * ffn + ffn + width + 2 * width + 6 * width
        time = self.freq_dim * width + width + width * width + width + 6 * (width * width + width)
        text = self.text_dim * width + width + width * width + width
        ends = self.in_channels * patch * width + width + (width + 1) * self.out_channels * patch + 2 * width
        return self.num_layers * block + time + text + ends

    @property
    def num_whole_parameters(self) -> int:
        """Those of them that tensor parallelism does not split (`parallelize.PLAN`)."""
        width, patch = self.width, math.prod(self.patch_size)
        biases = 3 * width  # of what is summed over ranks
        ends = self.in_channels * patch * width + width + (width + 1) * self.out_channels * patch
        return self.num_layers * biases + ends + self.num_whole_float32_parameters

    @property
    def num_whole_float32_parameters(self) -> int:
        """Whole ones that stay in float32 (`weights.FLOAT32_PARTS`): tables, norms, the time's first layer."""
        return self.num_layers * 8 * self.width + 2 * self.width + (self.freq_dim + 1) * self.width

    @property
    def num_split_float32_parameters(self) -> int:
        """Those that stay in float32 and are split: the time's second layer."""
        return (self.width + 1) * self.width


@dataclass(frozen=True, slots=True)
class OfficialSampling:
    """The settings that a checkpoint's authors publish."""

    steps: int
    flow_shift: float
    guidance_high: float
    guidance_low: float
    num_frames: int
    fps: int
    sizes: tuple[tuple[int, int], ...]  # (width, height) in px
    preset: str = ""


@dataclass(frozen=True, slots=True)
class WanSpec:
    """One pipeline: its parts' sizes, its limits and its official settings."""

    name: str
    transformer: TransformerSpec
    text_encoder: Umt5Spec
    num_experts: int
    boundary_ratio: float | None
    vae_stride: tuple[int, int, int] = (4, 8, 8)  # frames, height, width
    conditionings: tuple[str, ...] = ("text",)
    max_tokens: int = MAX_TOKENS
    trained_frames: int = TRAINED_FRAMES
    official: OfficialSampling | None = None

    @property
    def size_multiple(self) -> int:
        """Width and height in px are multiples of this."""
        return self.vae_stride[1] * self.transformer.patch_size[1]

    def latent_shape(self, width: int, height: int, num_frames: int) -> tuple[int, int, int, int]:
        """[C, T, h, w] of a clip's latents."""
        time, tall, wide = self.vae_stride
        return self.transformer.out_channels, (num_frames - 1) // time + 1, height // tall, width // wide

    def num_tokens(self, width: int, height: int, num_frames: int) -> int:
        """Tokens of a clip inside the DiT."""
        _, frames, rows, columns = self.latent_shape(width, height, num_frames)
        patch = self.transformer.patch_size
        return (frames // patch[0]) * (rows // patch[1]) * (columns // patch[2])

    def weights_bytes(self, dtype_bytes: int, tensor_parallel: int = 1) -> int:
        """Resident weights of one rank: every expert and the text encoder, sharded over the tensor axis."""
        count = self.num_experts * self.transformer.num_parameters + self.text_encoder.num_parameters
        return count * dtype_bytes // tensor_parallel

    def activation_bytes(self, num_tokens: int, dtype_bytes: int, batch: int = 1) -> int:
        """Peak of one block: the stream, its norm, q, k, v, the attention's result, or the wide half of the FFN."""
        width, ffn = self.transformer.width, self.transformer.ffn_dim
        return batch * num_tokens * dtype_bytes * (2 * width + max(4 * width, 2 * ffn))


_A14B_SIZES = ((1280, 720), (832, 480), (720, 1280), (480, 832))
T2V_A14B = WanSpec(
    name="wan2.2-t2v-a14b",
    transformer=TransformerSpec(),
    text_encoder=UMT5_XXL,
    num_experts=2,
    boundary_ratio=0.875,
    official=OfficialSampling(40, 12.0, 4.0, 3.0, 81, 16, _A14B_SIZES, "t2v-a14b-480p"),
)
I2V_A14B = WanSpec(
    name="wan2.2-i2v-a14b",
    transformer=TransformerSpec(in_channels=36),
    text_encoder=UMT5_XXL,
    num_experts=2,
    boundary_ratio=0.9,
    conditionings=("image", "first_last"),
    official=OfficialSampling(40, 5.0, 3.5, 3.5, 81, 16, _A14B_SIZES, "i2v-a14b-480p"),
)
TI2V_5B = WanSpec(
    name="wan2.2-ti2v-5b",
    transformer=TransformerSpec(num_attention_heads=24, in_channels=48, out_channels=48, ffn_dim=14336, num_layers=30),
    text_encoder=UMT5_XXL,
    num_experts=1,
    boundary_ratio=None,
    vae_stride=(4, 16, 16),
    conditionings=("text", "image"),
    trained_frames=121,
    official=OfficialSampling(50, 5.0, 5.0, 5.0, 121, 24, ((1280, 704), (704, 1280)), "ti2v-5b"),
)

ARCHITECTURES: dict[str, WanSpec] = {spec.name: spec for spec in (T2V_A14B, I2V_A14B, TI2V_5B)}
CUSTOM = "custom"  # sizes that nobody published, such as those of `pocket` and `tiny`
CUSTOM_PRESET = "pocket"


def conditionings(index: Mapping[str, Any], transformer: TransformerSpec, vae: VaeSpec) -> tuple[str, ...]:
    """What a checkpoint takes besides text: of "text", "image", "first_last".

    `expand_timesteps` in model_index.json marks the 5B, whose first latent frame may be an image; four mask channels
    and an encoded video beside the noise mark I2V-A14B. Raises ModelError("unsupported") for other channels.
    """
    if transformer.in_channels == transformer.out_channels == vae.z_dim:
        return ("text", "image") if index.get("expand_timesteps") else ("text",)
    if transformer.in_channels == 2 * vae.z_dim + vae.scale_temporal and transformer.out_channels == vae.z_dim:
        return ("image", "first_last")
    channels = f"in_channels {transformer.in_channels}, out_channels {transformer.out_channels}"
    raise ModelError("unsupported", f"transformer: {channels} with {vae.z_dim} latent channels is no known model")


def published(transformer: TransformerSpec) -> WanSpec | None:
    """The published pipeline whose transformer has these sizes."""
    shape = _shape(transformer)
    return next((spec for spec in ARCHITECTURES.values() if _shape(spec.transformer) == shape), None)


def _shape(transformer: TransformerSpec) -> tuple[int, ...]:
    return transformer.num_attention_heads, transformer.num_layers, transformer.in_channels


def limits(files: ConfigFiles) -> Limits:
    """What a checkpoint can serve; raises ModelError("checkpoint" or "unsupported")."""
    transformer, vae = transformer_spec(files.transformer), vae_spec(files.vae)
    known = published(transformer)
    official = known.official if known else None
    return Limits(
        architecture=known.name if known else CUSTOM,
        preset=official.preset if official else CUSTOM_PRESET,
        size_multiple=vae.scale_spatial * transformer.patch_size[1],
        max_tokens=MAX_TOKENS,
        conditionings=conditionings(files.index, transformer, vae),
        trained_frames=known.trained_frames if known else None,
        fps=official.fps if official else None,
        flow_shift=official.flow_shift if official else None,
        sizes=official.sizes if official else (),
    )


_ENTRY = PipelineEntry(
    path="models.wan.pipeline:WanPipeline",
    limits=limits,
    presets=(
        *("t2v-a14b-480p", "t2v-a14b-720p", "i2v-a14b-480p", "i2v-a14b-720p", "ti2v-5b"),
        *("t2v-a14b-lightning", "i2v-a14b-lightning"),
    ),
    cards=tuple(f"docs/models/{name}.md" for name in ARCHITECTURES),
)
PIPELINES: dict[str, PipelineEntry] = {"WanPipeline": _ENTRY, "WanImageToVideoPipeline": _ENTRY}

_REQUIRED = (
    "num_attention_heads",
    "attention_head_dim",
    "in_channels",
    "out_channels",
    "text_dim",
    "ffn_dim",
    "num_layers",
)


def transformer_spec(config: Mapping[str, Any]) -> TransformerSpec:
    """Sizes from a transformer's config.json.

    Raises ModelError("checkpoint") for a config that lacks sizes, ModelError("unsupported") for parts that are not
    rendered here (image branches of Wan2.1, other norms).
    """
    absent = [name for name in _REQUIRED if config.get(name) is None]
    if absent:
        raise ModelError("checkpoint", f"transformer: config.json lacks {', '.join(absent)}")
    for name in ("added_kv_proj_dim", "image_dim", "pos_embed_seq_len"):
        if config.get(name) is not None:
            raise ModelError("unsupported", f"transformer: {name} = {config[name]}; image branches are not supported")
    if config.get("qk_norm", "rms_norm_across_heads") != "rms_norm_across_heads":
        raise ModelError(
            "unsupported", f"transformer: qk_norm {config['qk_norm']!r}; only 'rms_norm_across_heads' is known"
        )
    if not config.get("cross_attn_norm", True):
        raise ModelError("unsupported", "transformer: cross_attn_norm is off; only checkpoints with it are supported")
    values = {name: config[name] for name in TransformerSpec.__dataclass_fields__ if name in config}
    if "patch_size" in values:
        values["patch_size"] = tuple(values["patch_size"])
    return TransformerSpec(**values)
