"""Every setting of a run in one table: command line flags, YAML keys and the page docs/flags.md all come from it.

`semantic` settings decide what a clip looks like and form the run's fingerprint; `operational` ones decide how a
machine renders it. A test freezes the table.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

Meaning = Literal["semantic", "operational"]


@dataclass(frozen=True, slots=True)
class Flag:
    """One setting.

    Args:
        name: the flag without its dashes; YAML keys are equal to it.
        kind: `str`, `int`, `float`, `bool`, `path` or a tuple of choices.
        default: what holds when nobody says anything; None means "from preset, profile or checkpoint".
        meaning: `semantic` or `operational`.
        help: one line.
        multiple: may be given several times.
    """

    name: str
    kind: str | tuple[str, ...]
    default: Any
    meaning: Meaning
    help: str
    multiple: bool = False

    @property
    def key(self) -> str:
        """The Python and YAML name."""
        return self.name.replace("-", "_")

    @property
    def opposite(self) -> str:
        """The name that switches a bool off."""
        return self.name.removeprefix("no-") if self.name.startswith("no-") else f"no-{self.name}"


SEMANTIC: tuple[Flag, ...] = (
    Flag("model", "str", None, "semantic", "Checkpoint: a folder, pocket, tiny, s3://..., or owner/name."),
    Flag("preset", "str", None, "semantic", "Sampling preset; default: the checkpoint's."),
    Flag("dtype", ("float32", "bfloat16"), None, "semantic", "Arithmetic of the transformer; default: the preset's."),
    Flag(
        "vae-dtype",
        ("float32", "bfloat16"),
        None,
        "semantic",
        "Arithmetic of the autoencoder; default: bfloat16 on Neuron, float32 elsewhere.",
    ),
    Flag("solver", ("unipc", "euler"), None, "semantic", "Solver of the flow ODE; default: the preset's."),
    Flag(
        "quantization",
        ("none", "fp8_row"),
        "none",
        "semantic",
        "FP8 for the linear layers of the transformer's blocks.",
    ),
    Flag(
        "modules-to-not-convert", "str", (), "semantic", "A layer that keeps its dtype, e.g. blocks.0.*.", multiple=True
    ),
    Flag(
        "lora", "str", (), "semantic", "LoRA file PATH[@strength][:high|low], merged into the weights.", multiple=True
    ),
    Flag("step-cache", "float", None, "semantic", "Skip steps that change less than this, e.g. 0.24; default: off."),
    Flag("step-cache-warm-up", "int", 4, "semantic", "Steps of each expert that are never skipped."),
    Flag("step-cache-max-run", "int", 3, "semantic", "Skipped steps in a row at most."),
    Flag("decode", ("exact", "tiled", "reference"), "exact", "semantic", "How the VAE decodes."),
    Flag("codec", ("h264", "h265_10bit", "ffv1", "x264_lossless"), "h264", "semantic", "Video codec."),
    Flag("crf", "int", 16, "semantic", "Quality of h264 and h265 (0 best .. 51)."),
    Flag("file-metadata", "bool", True, "semantic", "Write prompt, settings and origin into the file's metadata."),
    Flag("long-prompt", ("truncate", "fail"), "truncate", "semantic", "What to do above the model's token limit."),
    Flag("resize", ("crop", "fit", "exact"), "crop", "semantic", "How an image and the clip get one size."),
    Flag("run-seed", "int", 0, "semantic", "Seed of the run: rows without a seed derive theirs from it."),
)

OPERATIONAL: tuple[Flag, ...] = (
    Flag("out", "str", None, "operational", "Output root: a folder or s3://bucket/prefix."),
    Flag("profile", "str", None, "operational", "How this machine renders; default: cpu, or cuda where present."),
    Flag("config", "path", None, "operational", "YAML file of settings; keys equal flag names."),
    Flag("device", ("cpu", "cuda", "neuron"), None, "operational", "Device; default: the profile's."),
    Flag("mesh", "str", None, "operational", "Degrees of the rank mesh, e.g. tp=4,cp=8,cfg=2, or auto."),
    Flag("for", ("throughput", "latency"), "throughput", "operational", "What --mesh auto and plan rank meshes by."),
    Flag("replicas", "int", None, "operational", "Independent pipelines on this machine."),
    Flag("attention", ("auto", "ring", "gather"), None, "operational", "Attention over context-parallel ranks."),
    Flag("kernels", ("reference", "nki"), None, "operational", "Operator backend."),
    Flag("experts", ("resident", "swap"), "resident", "operational", "Both experts in memory, or one at a time."),
    Flag("tp-sequence-parallel", "bool", False, "operational", "Split tokens inside the tensor axis too."),
    Flag("compile", ("off", "block", "model"), None, "operational", "Compile: nothing, one graph for all layers, all."),
    Flag("compile-backend", ("auto", "inductor", "eager"), "auto", "operational", "Compiler; auto: the device's own."),
    Flag("graphs", "str", None, "operational", "Store of compiled graphs (folder or s3://), see batch-gen compile."),
    Flag("graphs-digest", "str", None, "operational", "SHA-256 that batch-gen compile printed: what is trusted there."),
    Flag("allow-compile", "bool", False, "operational", "On neuron: compile here what --graphs does not hold."),
    Flag("threads", "int", None, "operational", "CPU threads of one rank; default: the cores, shared fairly."),
    Flag("scratch", "path", None, "operational", "Folder for files in the making; default: the system's."),
    Flag("limit", "int", None, "operational", "Only the first N clips, in manifest order."),
    Flag("ids", "path", None, "operational", "Only the row or clip ids in this file, one a line."),
    Flag("where", "str", None, "operational", "Only rows that match, e.g. \"tag = 'hero'\"."),
    Flag("override", "str", (), "operational", "Set a column of every row, e.g. steps=8.", multiple=True),
    Flag("shard", "str", None, "operational", "This worker's index hint, i/n; default: from the array job."),
    Flag("assign", ("lease", "static"), "lease", "operational", "How chunks are dealt to workers."),
    Flag("chunk-requests", "int", None, "operational", "Requests in one chunk at most (1..64)."),
    Flag("lease-ttl", "float", 180.0, "operational", "Seconds without a renewal after which a lease may be taken."),
    Flag("continue", "bool", False, "operational", "Retire a stop.json and go on."),
    Flag(
        "keep-latents", "bool", False, "operational", "Keep final latents, so that a failed decode resumes from them."
    ),
    Flag(
        "max-failures", "str", "0.5", "operational", "Stop when this many clips (or this share of the last 100) fail."
    ),
    Flag("ok-with-quarantine", "bool", False, "operational", "Exit 0 although clips were quarantined."),
    Flag("clips-per-step", "int", 1, "operational", "Clips of one shape that the engine denoises in one call."),
    Flag("drain-budget", "float", 25.0, "operational", "Seconds to finish after SIGTERM."),
    Flag("block-list", "path", None, "operational", "File of patterns: prompts that match are set aside."),
    Flag("drain-at", "str", None, "operational", "Drain at this moment (ISO 8601 with zone)."),
    Flag(
        "on-clip",
        "str",
        None,
        "operational",
        "A line of JSON per finished clip: - for stdout, a webhook URL, or env:NAME.",
    ),
    Flag(
        "max-cost", "float", None, "operational", "Stop the run (exit 4) when one start of one worker has cost so much."
    ),
    Flag("price-per-hour", "float", None, "operational", "Price of this machine, for --max-cost and reports."),
    Flag(
        "max-hours",
        "float",
        None,
        "operational",
        "Stop the run (exit 4) when one start of one worker has taken so many hours.",
    ),
    Flag("stall-timeout", "float", None, "operational", "Seconds without progress after which an engine is killed."),
    Flag("require-same-numerics", "bool", False, "operational", "Refuse to resume on a machine whose bits may differ."),
    Flag("no-token-check", "bool", False, "operational", "Do not count tokens at validation."),
    Flag("ignore-memory", "bool", False, "operational", "Start although the estimate says that it does not fit."),
    Flag("s3-endpoint", "str", None, "operational", "URL of an S3-compatible server."),
    Flag("s3-checksum", ("when_supported", "when_required"), "when_supported", "operational", "Checksum trailer rule."),
    Flag("s3-kms-key", "str", None, "operational", "Encrypt every object with this KMS key."),
    Flag("s3-storage-class", "str", None, "operational", "Storage class of every object."),
    Flag("s3-tags", "str", None, "operational", "Tags of every object: key=value&key=value."),
    Flag("s3-bucket-owner", "str", None, "operational", "Account that must own the bucket."),
    Flag("s3-requester-pays", "bool", False, "operational", "Pay for requests to somebody else's bucket."),
    Flag("emf", "bool", False, "operational", "Each minute a line of CloudWatch metrics (EMF) on stderr."),
    Flag("prometheus", "path", None, "operational", "Textfile of metrics for Prometheus, replaced each minute."),
    Flag("quiet", "bool", False, "operational", "No progress lines."),
)

FLAGS: tuple[Flag, ...] = SEMANTIC + OPERATIONAL
BY_KEY: dict[str, Flag] = {flag.key: flag for flag in FLAGS}
