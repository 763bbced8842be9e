"""Which compiled graphs a run needs: a key per bucket and kind of guidance, made of all that shapes a graph."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from batch_gen.config import Settings
from batch_gen.placement import rank_threads
from batch_gen.prepare import Prepared
from batch_gen.request import Bucket, RenderRequest
from batch_gen.versions import cpu_class, versions

_COMPILERS: Final = ("batch-gen", "torch", "torch-neuronx", "neuronx-cc", "nki")
_SETTINGS: Final = (
    "device", "layout", "attention", "kernels", "compile", "compile_backend", "dtype", "vae_dtype", "decode",
    "quantization", "tp_sequence_parallel",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Variant:
    """Clips that share all their graphs. guided: whether any step runs the negative prompt too."""

    bucket: Bucket
    guided: bool

    def __str__(self) -> str:
        return f"{self.bucket}{'' if self.guided else ' without guidance'}"


def variants_of(prepared: Prepared) -> list[Variant]:
    """The variants of a manifest, the most frequent first."""
    counts: dict[Variant, int] = {}
    for variant, count in _counted(prepared):
        counts[variant] = counts.get(variant, 0) + count
    return sorted(counts, key=lambda variant: (-counts[variant], str(variant)))


def variant_of(request: RenderRequest) -> Variant:
    """The variant of one clip."""
    return Variant(request.bucket, max(request.guidance_high, request.guidance_low) > 1)


def _counted(prepared: Prepared) -> Iterator[tuple[Variant, int]]:
    """Counts from the survey, which is quick; clip by clip where images may have changed sizes."""
    survey = prepared.manifest.survey
    if any(bucket.conditioning != "text" for bucket in survey.buckets):
        yield from ((variant_of(row.request), 1) for row in prepared.rows())
        return
    for (bucket, _, guided), count in survey.work.items():
        yield Variant(bucket, guided), count


def facts_of(settings: Settings, model_digest: str, variant: Variant) -> dict[str, Any]:
    """What decides the graphs of a variant, as JSON values.

    On a CPU its model counts too: the compiler makes code for exactly that processor and number of threads.
    """
    found: dict[str, Any] = {name: getattr(settings, name) for name in _SETTINGS}
    found["modules_to_not_convert"] = list(settings.modules_to_not_convert)
    on_cpu = settings.device == "cpu"
    return found | {
        "model": model_digest,
        "mesh": str(settings.mesh),
        "bucket": str(variant.bucket),
        "guided": variant.guided,
        "step_cache": settings.step_cache is not None,
        "cpu": cpu_class() if on_cpu else "",
        "threads": rank_threads(settings) if on_cpu else 0,
        "versions": compiler_versions(versions()),
    }


def compiler_versions(installed: Mapping[str, str]) -> dict[str, str]:
    """Versions of what turns a module into machine code."""
    return {name: installed[name] for name in _COMPILERS if name in installed}
