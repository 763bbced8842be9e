"""What a night of regression renders found, and where everything lies below the regress root.

```
regress/<suite>/<night>/results.json               the Night; create-only, so of two of one name one wins
regress/<suite>/<night>/summary.md, junit.xml      the same for people and for CI, written after it by the winner
regress/<suite>/<night>/bisect/<case>.json         the stage that moved, asked for afterwards; made again at will
regress/<suite>/<night>/report/                    the page of the night; made again at will
regress/<suite>/objects/frames/<2 hex>/<frames hash>.mkv          FFV1, RGB bit for bit
regress/<suite>/objects/arrays/<2 hex>/<sha256>.safetensors       `latents` and the taps of a case, float32
regress/<suite>/objects/logs/<2 hex>/<sha256>.txt                 log of a rank that died
regress/<suite>/baselines/<case>/<platform>/<variant>.json        an Approval; create-only
regress/<suite>/baselines/<case>/<platform>/<variant>.retired.json    an approval that no longer counts; create-only
regress/<suite>/calibration/<name>.json            what repeats measured
```

Objects go by content, so a night that changed nothing stores nothing but its results. Nights are named so that names
sort by time. A `Night` is a whole answer: no reader needs the machine that rendered it.

For other parts:

- nights: `list_nights`, `load_night`, `last_nights` here;
- frames and arrays of a case: `artifacts.load_frames(store, case.artifacts.frames)` -> uint8 [F, H, W, 3],
  `artifacts.load_arrays(store, case.artifacts.arrays)` -> {"latents", "text", "latents.<k>",
  "velocity.<k>", "file" (bytes of the delivered file)};
- what a case is compared with: `baseline.find_baselines(store, suite, case, platform_key)` -> tuple[Approval, ...];
  an Approval has the same `artifacts`;
- an engine for replays: `night.open_engine(setup)`, a context manager; `suite.prepare_suite(sources, given)` -> Setup.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, ClassVar, Final, Literal, TypeVar

from pydantic import Field, field_validator, model_validator

from batch_gen.errors import CheckFailed
from batch_gen.records import Strict
from batch_gen.regress.documents import Document, Moment, RequestJson, clip_shape, load_document
from batch_gen.storage.base import Store

log = logging.getLogger(__name__)
RESULTS_NAME: Final = "results.json"
HEX_64: Final = r"^[0-9a-f]{64}$"

Verdict = Literal["pass", "fail", "new", "not_comparable", "infra", "quarantined"]
Judgement = Literal["pass", "warn", "fail"]
"""Of a figure that is held against a reference in several precisions, see `threeway`."""
Level = Literal["count", "exact", "numeric", "near", "temporal", "semantic", "speed"]

EARNEST: Final[tuple[Verdict, ...]] = ("fail", "infra", "new", "quarantined", "not_comparable", "pass")
"""Verdicts, the most earnest first: a case has that of its most earnest gate (see `worst`)."""
_LADDER: Final[tuple[str, ...]] = ("fail", "infra", "warn", *EARNEST[2:])
V = TypeVar("V", Verdict, Judgement)


class GateResult(Strict):
    """What one gate says about one case, or about the whole night.

    Attributes:
        gate: `frame_count`, `baseline` (there is none), `frames_hash`, `latents_cosine`, `latents_error`,
            `latents_ratio`, `psnr_min`, `ssim_min`, `bad_frames`, `drift_luma`, `drift_red`, `drift_green`,
            `drift_blue`, `black`, `frozen`, `flicker`, `prompt_following`, `vmaf`, `render` (there is no clip),
            `speed.<stage>`, `memory`.
        level: Which kind of change it sees.
        value, limit: Measured and allowed, in the gate's unit; None where there is nothing to measure or compare.
        verdict: `not_comparable` is neither green nor red, the note says why.
        note: For people; `not comparable: mesh`, the stage that became slow, who owns the quarantine.
        frame: The frame that the value is of, from 0; None where it is of the clip.
    """

    gate: str
    level: Level
    value: float | None = None
    limit: float | None = None
    verdict: Verdict
    note: str = ""
    frame: int | None = None


class Artifact(Strict):
    """A stored object.

    Attributes:
        key: Below the regress root.
        digest: Hex; frames hash of frames, SHA-256 of a file of arrays.
        bytes: Length of the stored file.
        shape: Of frames, [F, H, W, 3]; empty for arrays, whose file tells.
    """

    key: str
    digest: str = Field(pattern=HEX_64)
    bytes: int = Field(ge=0)
    shape: tuple[int, ...] = ()

    @field_validator("shape")
    @classmethod
    def _is_shape(cls, shape: tuple[int, ...]) -> tuple[int, ...]:
        if shape and (len(shape) != 4 or min(shape) < 1 or shape[3] != 3):
            raise ValueError("expected [frames, height, width, 3]")
        return shape


class Artifacts(Strict):
    """What a case left: frames before lossy encoding, and float32 arrays; None when it did not get so far."""

    frames: Artifact | None = None
    arrays: Artifact | None = None

    def check_of(self, suite: str, request: dict[str, Any], num_frames: int) -> None:
        """Raises ValueError for objects of another suite or content, and for frames that are not a clip's."""
        for name, artifact, key_of in (("frames", self.frames, frames_key), ("arrays", self.arrays, arrays_key)):
            if artifact is not None and artifact.key != key_of(suite, artifact.digest):
                raise ValueError(f"artifacts.{name}.key: expected {key_of(suite, artifact.digest)}")
        if self.frames is not None and self.frames.shape != clip_shape(request, num_frames):
            raise ValueError(f"artifacts.frames.shape: expected {list(clip_shape(request, num_frames))}")


class Curves(Strict):
    """One value per frame, aligned by index with the baseline's frames; empty without a comparison.

    Attributes:
        psnr: dB; equal frames have 100.
        ssim: -1..1.
        luma: Mean BT.709 luma minus the baseline's, 0..255.
        motion: Mean absolute difference to the frame before, 0..255; the first is 0.
    """

    psnr: tuple[float, ...] = ()
    ssim: tuple[float, ...] = ()
    luma: tuple[float, ...] = ()
    motion: tuple[float, ...] = ()


class CaseError(Strict):
    """Why a case has no clip: a kind of `errors.KINDS`, and its words."""

    kind: str
    message: str


class CaseResult(Strict):
    """One case of one night.

    Attributes:
        case: The clip_id.
        request, request_digest: What was rendered.
        verdict: The most earnest of its gates.
        gates: In the order in which they were asked.
        baseline: Variant that it is compared with (the nearest of the approved ones), None when there is none.
        frames_hash, num_frames, artifacts: What was rendered; None, 0 and empty when nothing was.
        curves: Per frame.
        first_bad_frame, worst_frame: By PSNR and SSIM; None when there is no bad frame, or no comparison.
        timings: Seconds by stage: `text`, `denoise.high`, `denoise.low` (or `denoise`), `decode`.
        peak_rss_bytes: Of rank 0 up to the end of this case; 0 when the engine does not say.
        error: Why there is no clip.
        attempts: Starts.
    """

    case: str
    request: RequestJson
    request_digest: str
    verdict: Verdict
    gates: tuple[GateResult, ...] = ()
    baseline: str | None = None
    frames_hash: str | None = None
    num_frames: int = 0
    artifacts: Artifacts = Artifacts()
    curves: Curves = Curves()
    first_bad_frame: int | None = None
    worst_frame: int | None = None
    timings: dict[str, float] = Field(default_factory=dict)
    peak_rss_bytes: int = 0
    error: CaseError | None = None
    attempts: int = 1


class Platform(Strict):
    """The class of machines whose baselines hold for each other.

    Attributes:
        device: cpu, cuda or neuron.
        chip: CPU class or accelerator.
        torch: Major and minor version.
    """

    device: str
    chip: str
    torch: str

    @property
    def key(self) -> str:
        """Part of a baseline's key: `cpu_intel-xeon-platinum_torch2.13`."""
        return f"{self.device}_{self.chip}_torch{self.torch}"


class Fingerprint(Strict):
    """What decides a night's pixels and bits, beside the requests.

    Attributes:
        checkpoint: Digest of the weights.
        settings: Semantic settings (dtype, solver, decode, ...).
        numerics: Operational settings and facts that can change bits: device, cpu, mesh, attention, kernels, ...
        numerics_key: Their digest, as in records.
        versions: Of code and libraries.
    """

    checkpoint: str
    settings: dict[str, Any]
    numerics: dict[str, Any]
    numerics_key: str
    versions: dict[str, str]


class Night(Document):
    """One run of a suite.

    Attributes:
        suite, night: Its place.
        started, finished: UTC, ISO 8601.
        platform, fingerprint: Where and how.
        verdict: The most earnest of `gates` and of the cases.
        exit_code: 0, 5 (a gate failed), 75 (something was not rendered), 6 (new).
        cases: In the order of the suite.
        gates: Of the whole night: `speed.<stage>`, `memory`.
        changed: `<case or gate>: pass -> fail` for each state that differs from the night before on this platform.
        since_green: Differences of fingerprint and numerics to the last green night, `numerics.mesh: a -> b`.
        last_green: That night; None when there is none.
    """

    ADVICE: ClassVar[str] = "restore it from a copy or remove it; later nights go on without it"

    suite: str
    night: str
    started: Moment
    finished: Moment
    platform: Platform
    fingerprint: Fingerprint
    verdict: Verdict
    exit_code: int
    cases: tuple[CaseResult, ...]
    gates: tuple[GateResult, ...] = ()
    changed: tuple[str, ...] = ()
    since_green: tuple[str, ...] = ()
    last_green: str | None = None

    @property
    def key(self) -> str:
        """See `Document.key`."""
        return night_key(self.suite, self.night)

    @model_validator(mode="after")
    def _objects_are_its_own(self) -> Night:
        for case in self.cases:
            try:
                case.artifacts.check_of(self.suite, case.request, case.num_frames)
            except ValueError as error:
                raise ValueError(f"case {case.case}: {error}") from None
        return self

    def case(self, name: str) -> CaseResult | None:
        """The case of that name, None when the night has none."""
        return next((case for case in self.cases if case.case == name), None)


class Approval(Document):
    """One approved variant of a case on a platform: the baseline, and who took the blame for it.

    Attributes:
        variant: Its name, from its content.
        suite, case, platform: Its place.
        request, request_digest, fingerprint, frames_hash, num_frames, artifacts: As in the night that it comes from.
        night: That night.
        who, why, when: The approval.
    """

    ADVICE: ClassVar[str] = "restore it from a copy, or remove it and approve the case again"

    variant: str
    suite: str
    case: str
    platform: Platform
    request: RequestJson
    request_digest: str
    fingerprint: Fingerprint
    frames_hash: str
    num_frames: int
    artifacts: Artifacts
    night: str
    who: str
    why: str
    when: Moment

    @property
    def key(self) -> str:
        """See `Document.key`."""
        return f"{baseline_prefix(self.suite, self.case, self.platform.key)}{self.variant}.json"

    @model_validator(mode="after")
    def _objects_are_its_own(self) -> Approval:
        frames = self.artifacts.frames
        if frames is None or frames.digest != self.frames_hash:
            raise ValueError("artifacts.frames: expected the frames that frames_hash names")
        self.artifacts.check_of(self.suite, self.request, self.num_frames)
        return self


class Retirement(Document):
    """Who took an approval back, why and when."""

    ADVICE: ClassVar[str] = "restore it from a copy, or remove it: the approval counts again then, until it is retired"

    who: str
    why: str
    when: Moment


def worst(verdicts: Sequence[V]) -> V:
    """The most earnest verdict; `pass` without any.

    `not_comparable` beside passing gates does not spoil them: an exact gate that cannot answer leaves the numeric ones.
    """
    counted = [verdict for verdict in verdicts if verdict != "not_comparable"] or verdicts
    return min(counted, key=_LADDER.index, default="pass")


def suite_prefix(suite: str) -> str:
    """Everything of a suite."""
    return f"regress/{suite}/"


def night_key(suite: str, night: str, name: str = RESULTS_NAME) -> str:
    """A file of a night."""
    return f"{suite_prefix(suite)}{night}/{name}"


def frames_key(suite: str, frames_hash: str) -> str:
    """The frames with that hash."""
    return f"{suite_prefix(suite)}objects/frames/{frames_hash[:2]}/{frames_hash}.mkv"


def arrays_key(suite: str, sha256: str) -> str:
    """The safetensors file with that SHA-256."""
    return f"{suite_prefix(suite)}objects/arrays/{sha256[:2]}/{sha256}.safetensors"


def log_key(suite: str, sha256: str) -> str:
    """The log with that SHA-256."""
    return f"{suite_prefix(suite)}objects/logs/{sha256[:2]}/{sha256}.txt"


def baseline_prefix(suite: str, case: str, platform_key: str | None = None) -> str:
    """All variants of a case, or those of one platform."""
    root = f"{suite_prefix(suite)}baselines/{case}/"
    return root if platform_key is None else f"{root}{platform_key}/"


def list_nights(store: Store, suite: str) -> list[str]:
    """Names of the finished nights of a suite, oldest first."""
    prefix, end = suite_prefix(suite), f"/{RESULTS_NAME}"
    found = (listed.key.removeprefix(prefix) for listed in store.list(prefix) if listed.key.endswith(end))
    return sorted(key.removesuffix(end) for key in found if key.count("/") == 1)


def load_night(store: Store, suite: str, night: str) -> Night | None:
    """A night, None when there is none of that name.

    Raises:
        CheckFailed: its file is damaged, of a newer version or of another night.
    """
    return load_document(store, Night, night_key(suite, night))


def last_nights(store: Store, suite: str, count: int = 30, before: str | None = None) -> list[Night]:
    """The last nights of a suite, oldest first; only those before a name when one is given.

    A night that cannot be read is left out, and the log says which: what comes after it must not wait for its mending.
    """
    names = [name for name in list_nights(store, suite) if before is None or name < before]
    found = []
    for name in names[-count:]:
        try:
            found.append(load_night(store, suite, name))
        except CheckFailed as error:
            log.warning("night left out of the history", extra={"fields": {"night": name, "why": error.message}})
    return [night for night in found if night is not None]
