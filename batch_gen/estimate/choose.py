"""From a run's settings and manifest to the question of the estimate; `--mesh auto`; the check of memory."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from batch_gen.checkpoint import Checkpoint
from batch_gen.config import Mesh, Preset, Settings
from batch_gen.errors import ConfigError, MemoryTooSmall
from batch_gen.estimate.machines import machine_of
from batch_gen.estimate.memory import check_fits, footprint
from batch_gen.estimate.ranking import Question, best, rank, thinned
from batch_gen.estimate.subject import Clips, subject_of
from batch_gen.estimate.work import denoise_work
from batch_gen.memory import limit_bytes
from batch_gen.request import Bucket
from models.parallel.layout import Degrees, LayoutError

MAX_SHAPES = 8
LATENT_COPIES = 3  # the latents, their velocity and what the solver keeps of the last step, float32 each
Work = Mapping[tuple[Bucket, int, bool], int]


def clips_of(work: Work) -> tuple[Clips, ...]:
    """All of the manifest's shapes and steps."""
    return tuple(Clips(bucket, steps, guided, count) for (bucket, steps, guided), count in work.items())


def preset_work(preset: Preset, checkpoint: Checkpoint) -> Work:
    """One clip of the preset, for a plan without a manifest."""
    sampling = preset.sampling
    kind = checkpoint.limits.conditionings[0]
    bucket = Bucket(sampling.width, sampling.height, sampling.num_frames, kind)
    return {(bucket, sampling.steps, max(sampling.guidance_high, sampling.guidance_low) > 1): 1}


def question_of(settings: Settings, checkpoint: Checkpoint, work: Work) -> Question | None:
    """What the estimate is asked; None for the fake engine."""
    subject = subject_of(checkpoint)
    if subject is None or not work:
        return None
    # layers that are kept make the rest a guess: then count as if none were converted
    fp8 = settings.quantization != "none" and not settings.modules_to_not_convert
    dtypes = settings.dtype, settings.vae_dtype
    whole, swap = clips_of(work), settings.experts == "swap"
    mix = thinned(whole, MAX_SHAPES, partial(denoise_work, subject))
    return Question(subject, mix, machine_of(settings), settings.attention, *dtypes, fp8, whole, swap)


def with_mesh(settings: Settings, question: Question, replicas: int | None) -> Settings:
    """The settings with the best mesh that fits, for `--mesh auto`.

    Raises:
        ConfigError: more replicas than cores. MemoryTooSmall: none fits, unless `--ignore-memory`.
    """
    choice = best(question, settings.for_, replicas, ignore_memory=settings.ignore_memory)
    degrees = choice.degrees
    changes = {"mesh": Mesh(tp=degrees.tp, cp=degrees.cp, cfg=degrees.cfg), "replicas": choice.replicas}
    return settings.model_copy(update=changes)


def degrees_of(settings: Settings) -> Degrees:
    """The mesh of the settings."""
    return Degrees(settings.mesh.tp, settings.mesh.cp, settings.mesh.cfg)


def check_model_mesh(settings: Settings, checkpoint: Checkpoint) -> None:
    """The mesh must divide the model, which every rank would find out for itself, late.

    Raises:
        ConfigError: with the degrees that do.
    """
    subject = subject_of(checkpoint) if settings.mesh.tp > 1 else None
    if subject is None:
        return
    transformer = subject.wan.transformer
    try:
        degrees_of(settings).check_model(num_heads=transformer.num_attention_heads, ffn_width=transformer.ffn_dim)
    except LayoutError as error:
        raise ConfigError(f"--mesh, --model {checkpoint.name}: {error}") from error


def check_cores(settings: Settings, question: Question) -> None:
    """Refuse more ranks than the machine that is estimated has cores, where each rank needs one.

    Raises:
        ConfigError: with the product and the cores.
    """
    degrees, machine = degrees_of(settings), question.machine
    num_ranks = degrees.size * settings.replicas
    if not machine.is_shared and num_ranks > machine.num_cores:
        raise ConfigError(
            f"replicas({settings.replicas}) * {degrees.formula} takes {num_ranks:,} cores, {machine.name} has "
            f"{machine.num_cores}; use fewer replicas or a smaller mesh"
        )


def check_memory(settings: Settings, question: Question) -> None:
    """Refuse the first shape that does not fit on this mesh.

    Raises:
        MemoryTooSmall: exit code 2, unless `--ignore-memory`.
    """
    placement = question.placed(degrees_of(settings), settings.replicas)
    for clips in question.mix:
        found = footprint(question.subject, clips, placement, question.machine)
        way_out = None if found.fits else _way_out(settings, question)
        check_fits(str(clips.bucket), found, placement, ignore=settings.ignore_memory, way_out=way_out)


def _way_out(settings: Settings, question: Question) -> str | None:
    """What to try where another mesh is no help; None where it is."""
    machine, num_ranks = question.machine, degrees_of(settings).size * settings.replicas
    if any(choice.fits for choice in rank(question, settings.for_)):
        share = f"{num_ranks} ranks share the memory of {machine.name}: try one replica on --mesh tp=1"
        return share if machine.is_shared else None
    smaller = "smaller clips, --experts swap" if question.subject.wan.num_experts > 1 and not question.swap else ""
    return f"no mesh of {machine.name} holds them: try {smaller or 'smaller clips'} or a machine with more memory"


def check_latents(settings: Settings, question: Question, have_bytes: int | None = None) -> None:
    """Refuse a shape whose latents alone are more than this machine's memory, on whatever device it renders.

    Args:
        settings, question: of the run.
        have_bytes: memory of the machine; None asks it.

    Raises:
        MemoryTooSmall: exit code 2, unless `--ignore-memory`: no start again would help.
    """
    vae, have = question.subject.vae, limit_bytes() if have_bytes is None else have_bytes
    for bucket in {clips.bucket for clips in question.mix}:
        places = (bucket.width // vae.scale_spatial) * (bucket.height // vae.scale_spatial)
        need = LATENT_COPIES * 4 * vae.z_dim * places * ((bucket.num_frames - 1) // vae.scale_temporal + 1)
        if need > have and not settings.ignore_memory:
            raise MemoryTooSmall(
                f"{bucket}: its latents alone need {need / 1e9:,.1f}e9 bytes and this machine has {have / 1e9:,.1f}e9"
            )
