"""What a manifest amounts to before anything is rendered: clips, buckets, cost, and warnings that save money."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from fractions import Fraction
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from batch_gen import rules
from batch_gen.errors import Fault
from batch_gen.manifest.canon import by_unique, filled, numbers
from batch_gen.manifest.resolve import preset_values
from batch_gen.manifest.select import Picked, Rows, overridden
from batch_gen.request import Bucket, Conditioning, ModelLimits, SamplingDefaults
from batch_gen.rule_checks import parse_fps, shown

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from batch_gen.manifest.faults import FaultLog
    from batch_gen.manifest.options import ManifestOptions
    from batch_gen.manifest.sources import Batch

# Normalisation may lengthen text that is not plain ASCII: U+FDFA, 3 bytes, becomes 33.
_WORST_GROWTH: Final = 11
_END_MARK: Final = 2
_KINDS: Final[tuple[Conditioning, ...]] = ("text", "image", "first_last")
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Warned:
    """Something legal that is probably not meant.

    Attributes:
        code: Short stable name, such as `guidance` or `tokens`.
        message: What, and what to do.
        num_rows: Rows that it is about; 0 when it is about a column or file.
        first: The first of them, or the file, for people.
    """

    code: str
    message: str
    num_rows: int
    first: str

    def __str__(self) -> str:
        """`12 rows (first: a.parquet row 3): guidance ...`."""
        if self.num_rows == 0:
            return f"{self.first}: {self.message}"
        noun = "row" if self.num_rows == 1 else "rows"
        return f"{self.num_rows:,} {noun} (first: {self.first}): {self.message}"

    def to_json(self) -> dict[str, str | int]:
        """The warning as a JSON object."""
        return {"code": self.code, "message": self.message, "num_rows": self.num_rows, "first": self.first}


@dataclass(slots=True)
class Survey:
    """Totals over the wanted clips."""

    num_rows: int = 0
    num_clips: int = 0
    buckets: Counter[Bucket] = field(default_factory=Counter)
    work: Counter[tuple[Bucket, int, bool]] = field(default_factory=Counter)  # (shape, steps, guided) -> clips
    cost: int = 0
    duration_s: Fraction = Fraction(0)
    warned: dict[str, Warned] = field(default_factory=dict)

    @property
    def warnings(self) -> list[Warned]:
        """The warnings, in the order in which they were met."""
        return list(self.warned.values())

    def warn(self, code: str, message: str, num_rows: int, first: str) -> None:
        """Add rows to a warning; the message and the first place are those of the first call."""
        known = self.warned.get(code)
        if known is None:
            self.warned[code] = Warned(code, message, num_rows, first)
        else:
            self.warned[code] = Warned(code, known.message, known.num_rows + num_rows, known.first)


@dataclass(frozen=True, slots=True)
class Surveyor:
    """Adds batch after batch to a survey."""

    defaults: SamplingDefaults
    limits: ModelLimits
    options: ManifestOptions
    survey: Survey
    log: FaultLog

    def add(self, picked: Picked) -> None:
        """Count the wanted clips of a batch and look for what is probably not meant."""
        rows = picked.clip_rows()
        if len(rows) == 0:
            return
        batch = overridden(picked.batch, self.options)
        clips = np.bincount(picked.rows, minlength=batch.num_rows)[rows]
        columns = self._resolved(batch, rows)
        self._count(batch, rows, clips, columns)
        for code, message, hit in self._doubts(batch, rows, columns):
            if hit.any():
                at = int(rows[int(np.argmax(hit))])
                self.survey.warn(code, message, int(hit.sum()), place(batch, at))
        if self.options.count_tokens is not None:
            self._tokens(batch, rows)

    def _resolved(self, batch: Batch, rows: Rows) -> dict[str, Floats]:
        """Number columns with every default filled in, `[rows]` float64 each; fps rounded to float64."""
        known = preset_values(self.options.presets, self.options.preset, self.defaults)
        taken = pa.array(rows, pa.int64())
        presets = batch.cells.get("preset")
        names = None if presets is None else presets.take(taken)
        columns: dict[str, Floats] = {}
        for name in ("width", "height", "num_frames", "steps", "guidance_high", "guidance_low", "flow_shift", "fps"):
            default = _default_column(name, names, known, self.options.preset, len(rows))
            cells = batch.cells.get(name)
            columns[name] = default if cells is None else _filled_in(name, cells.take(taken), default)
        return columns

    def _count(self, batch: Batch, rows: Rows, clips: Rows, columns: Mapping[str, Floats]) -> None:
        survey = self.survey
        survey.num_rows += len(rows)
        survey.num_clips += int(clips.sum())
        kinds = _conditioning(batch, rows)
        shape = np.stack([columns["width"], columns["height"], columns["num_frames"], kinds, columns["steps"]])
        guided = np.maximum(columns["guidance_high"], columns["guidance_low"]) > 1
        shape = np.vstack([shape, columns["fps"], guided])
        unique, inverse = np.unique(shape, axis=1, return_inverse=True)
        totals = np.bincount(inverse.reshape(-1), weights=clips)
        for (width, height, frames, kind, steps, fps, twice), total in zip(
            unique.T.tolist(), totals.tolist(), strict=True
        ):
            num_clips = round(total)
            bucket = Bucket(int(width), int(height), int(frames), _KINDS[int(kind)])
            survey.buckets[bucket] += num_clips
            survey.work[bucket, int(steps), bool(twice)] += num_clips
            survey.cost += num_clips * int(width) * int(height) * int(frames) * int(steps)
            survey.duration_s += num_clips * Fraction(int(frames)) / Fraction(fps).limit_denominator(1_000_000)

    def _doubts(
        self, batch: Batch, rows: Rows, columns: Mapping[str, Floats]
    ) -> list[tuple[str, str, npt.NDArray[np.bool_]]]:
        limits = self.limits
        found = []
        no_guidance = (columns["guidance_high"] <= 1) & (columns["guidance_low"] <= 1)
        found.append(("guidance", NEGATIVE_UNUSED, no_guidance & _own_negative(batch, rows)))
        if limits.trained_frames is not None:
            message = f"more than {limits.trained_frames} frames, the trained length; expect loops and colour shifts"
            found.append(("frames", message, columns["num_frames"] > limits.trained_frames))
        if limits.fps is not None:
            message = f"fps unlike the model's {limits.fps}; motion plays faster or slower than it was learnt"
            found.append(("fps", message, np.abs(columns["fps"] - float(limits.fps)) > 1e-9))
        if limits.flow_shift is not None:
            message = f"flow_shift unlike the official {limits.flow_shift:g}; it moves the split between the experts"
            found.append(("flow_shift", message, columns["flow_shift"] != limits.flow_shift))
        if limits.sizes:
            legal = {*limits.sizes, *((height, width) for width, height in limits.sizes)}
            names = ", ".join(f"{width}x{height}" for width, height in limits.sizes)
            sizes = zip(columns["width"].tolist(), columns["height"].tolist(), strict=True)
            odd = np.array([size not in legal for size in sizes], bool)
            found.append(("size", f"a size unlike the model's ({names} and turned); expect weaker clips", odd))
        return found

    def _tokens(self, batch: Batch, rows: Rows) -> None:
        prompts = batch.cells["prompt"].take(pa.array(rows, pa.int64()))
        doubtful = np.flatnonzero(_may_exceed(prompts, min(rules.WARN_TOKENS, self.limits.max_tokens)))
        if len(doubtful) == 0:
            return
        texts = prompts.take(pa.array(doubtful)).to_pylist()
        counts = self._counted(texts)
        limit = self.limits.max_tokens
        for row, text, count in zip(rows[doubtful].tolist(), texts, counts, strict=True):
            if count > limit and self.options.long_prompt == "fail":
                message = f"has {count} tokens; {self.limits.name} sees {limit} (--long-prompt truncate cuts it there)"
                self.log.add(Fault(batch.file.source.name, batch.first_row + row, "prompt", shown(text), message))
            elif count > limit:
                cut = f"prompts above {limit} tokens are cut there (--long-prompt fail refuses them)"
                self.survey.warn("truncated", cut, 1, place(batch, row))
            elif count > rules.WARN_TOKENS:
                self.survey.warn("tokens", LONG_PROMPT, 1, place(batch, row))

    def _counted(self, texts: Sequence[str]) -> list[int]:
        assert self.options.count_tokens is not None
        unique = list(dict.fromkeys(texts))
        counts = dict(zip(unique, self.options.count_tokens(unique), strict=True))
        return [counts[text] for text in texts]


NEGATIVE_UNUSED: Final = "guidance is 1 or less, so the negative prompt does nothing; raise guidance_high or drop it"
LONG_PROMPT: Final = f"prompts above {rules.WARN_TOKENS} tokens; quality falls from about there on"


def place(batch: Batch, row: int) -> str:
    """A row for people: file and row number."""
    return f"{batch.file.source.name} row {batch.first_row + row}"


def _number(name: str, value: object) -> float:
    return float(parse_fps(value)) if name == "fps" else float(value)  # type: ignore[arg-type]


def _default_column(
    name: str, presets: pa.Array | None, known: Mapping[str, SamplingDefaults], run_preset: str, num_rows: int
) -> Floats:
    if presets is None:
        return np.full(num_rows, _number(name, getattr(known[run_preset], name)))
    own = {preset: _number(name, getattr(values, name)) for preset, values in known.items()}
    return np.array(by_unique(presets, lambda preset: own[str(preset)], own[run_preset]), np.float64)


def _filled_in(name: str, cells: pa.Array, default: Floats) -> Floats:
    if name == "fps":
        values = np.array(by_unique(cells, lambda value: _number(name, value), np.nan), np.float64)
    else:
        values = numbers(cells)
    return np.where(filled(cells), values, default)


def _conditioning(batch: Batch, rows: Rows) -> Floats:
    kinds = np.zeros(len(rows))
    for name in ("image", "last_image"):
        if name in batch.cells:
            kinds += filled(batch.cells[name])[rows]
    return kinds


def _own_negative(batch: Batch, rows: Rows) -> npt.NDArray[np.bool_]:
    cells = batch.cells.get("negative_prompt")
    if cells is None:
        return np.zeros(len(rows), bool)
    lengths = numbers(pc.utf8_length(cells))[rows]
    return np.asarray(lengths > 0, bool)


def _may_exceed(prompts: pa.Array, num_tokens: int) -> npt.NDArray[np.bool_]:
    """Prompts whose token count can exceed the number: a token is at least one byte after normalisation."""
    num_bytes = numbers(pc.binary_length(prompts))
    plain = num_bytes == numbers(pc.utf8_length(prompts))
    plain &= ~np.asarray(pc.match_substring(prompts, "&").to_numpy(zero_copy_only=False), bool)
    longest = np.where(plain, num_bytes, num_bytes * _WORST_GROWTH) + _END_MARK
    return np.asarray(longest > num_tokens, bool)
