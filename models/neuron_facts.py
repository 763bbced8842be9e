"""What is known about Neuron, as data and pure functions for `models.device`: environment, stack, compiler arguments.

Names follow the documentation of SDK 2.33 and, where it is silent, what public projects use. Imports no torch and reads
no environment. Nothing here was run on a device.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Final, Literal

from models.errors import ModelError

Role = Literal["transformer", "vae", "text", "combine"]

LNC: Final = 2  # physical cores of one logical core; kernels and layouts mean 2
SCRATCHPAD_PAGE_MIB: Final = 2048  # the runtime's page and the compiler's flag must be equal
CORE_BYTES: Final = {"trn2": 24_000_000_000, "trn3": 36_000_000_000}
CORES_PER_DEVICE: Final = 4  # logical ones, with LNC = 2
CC_FLAGS: Final = "NEURON_CC_FLAGS"
NEFF_CACHE: Final = "TORCH_NEURONX_NEFF_CACHE_DIR"
CORES: Final = "NEURON_RT_VISIBLE_CORES"
LNC_NAMES: Final = ("NEURON_LOGICAL_NC_CONFIG", "NEURON_RT_VIRTUAL_CORE_SIZE")  # today's and the older name
DROPPED: Final = ("NEURON_RT_NUM_CORES", "NEURON_RT_ROOT_COMM_ID", "NEURON_LIBRARY_PATH")
SYSFS: Final = Path("/sys/devices/virtual/neuron_device")

_LNC_FLAG: Final = "--logical-nc-config"
_ALL_ROLES: Final = (
    "--auto-cast=none", "-O1", f"--hbm-scratchpad-page-size={SCRATCHPAD_PAGE_MIB}", f"{_LNC_FLAG}={LNC}"
)  # fmt: skip
COMPILER_ARGS: Final[Mapping[Role, tuple[str, ...]]] = {
    "transformer": ("--model-type=transformer", *_ALL_ROLES),
    "text": ("--model-type=transformer", *_ALL_ROLES),
    "vae": ("--model-type=unet-inference", "--internal-max-instruction-limit=15000000", *_ALL_ROLES),
    "combine": ("--model-type=generic", *_ALL_ROLES),
}

PACKAGE: Final = "torch_neuronx"
# distribution -> the first version that is the real thing; PyPI holds placeholders below these
REAL: Final = {"torch-neuronx": (2, 13), "neuronx-cc": (2, 28), "nki": (0, 6)}
FOREIGN: Final = {
    "libtorch-neuronx-lite": "vLLM's stack; the two break each other in one environment",
    "torch-xla": "the XLA stack, which SDK 2.32 dropped",
    "libneuronxla": "the XLA stack, which SDK 2.32 dropped",
}
EXTRA: Final = "in a fresh environment install batch-gen[neuron] from AWS's own package index (docs/trainium.md)"


def environment(core: int | None, cache: Path | None, given: Mapping[str, str]) -> dict[str, str]:
    """Variables that must stand before the runtime is imported.

    Args:
        core: logical core of this rank; None leaves all visible.
        cache: folder of compiled graphs; its neighbour `<name>.local` takes what belongs to this machine alone.
        given: the environment that this process started with.

    Raises:
        ModelError: "environment", a variable contradicts what the kernels or the launcher need.
    """
    for name in LNC_NAMES:  # first of all: the compiler would say so 40 minutes later
        if given.get(name, str(LNC)) != str(LNC):
            raise ModelError("environment", f"{name} is {given[name]}; the kernels need {LNC}: unset it")
    wanted = {
        LNC_NAMES[0]: str(LNC),
        "NEURON_SCRATCHPAD_PAGE_SIZE": str(SCRATCHPAD_PAGE_MIB),
        "NEURON_RT_DBG_INTRA_RDH_CHANNEL_BUFFER_SIZE": str(160 << 20),
        "NEURON_RT_DBG_CC_DMA_PACKET_SIZE": "2048",
        "TORCH_NEURONX_DISABLE_FALLBACK_EXECUTION": "1",  # what does not compile is an error, never host work
        CC_FLAGS: compiler_flags("transformer", given),
    }
    if core is not None:
        wanted[CORES] = str(_allowed(core, given.get(CORES)))
    if cache is not None:
        local = cache.parent / f"{cache.name}.local"
        wanted |= {
            NEFF_CACHE: str(cache / "neff"),
            "NKI_COMPILE_CACHE_URL": str(cache / "nki"),
            "TORCH_NEURONX_NEFF_LOCAL_CACHE_DIR": str(local / "neff"),
            "TORCH_NEURONX_DEBUG_DIR": str(local / "debug"),
            # Ranks wait while one of them compiles what all need, which takes longer than the default 20 minutes.
            "TORCH_NEURONX_NEFF_CACHE_LOCK_TIMEOUT": "7200",
        }
    return wanted


def _allowed(core: int, visible: str | None) -> int:
    """The core, if whoever started us left it to us (`0-3,7`)."""
    if visible:
        spans = [part.partition("-") for part in visible.split(",")]
        if not any(int(first) <= core <= int(last or first) for first, _, last in spans):
            raise ModelError("environment", f"{CORES} is {visible}, but this rank runs on core {core}: unset it")
    return core


def compiler_flags(role: Role, given: Mapping[str, str]) -> str:
    """The value of NEURON_CC_FLAGS for graphs of a role: the user's own flags, then ours.

    Raises:
        ModelError: "environment", the user's flags contradict ours.
    """
    ours = {flag.partition("=")[0]: flag for flag in _ALL_ROLES if flag != "-O1"}
    kept = []
    for flag in given.get(CC_FLAGS, "").split():
        mine = ours.get(flag.partition("=")[0])
        if flag.startswith("-lnc"):
            mine = ours[_LNC_FLAG]
        if mine is not None and mine != flag:
            raise ModelError("environment", f"{CC_FLAGS} holds {flag}, batch-gen needs {mine}: leave it out")
        if mine is None and flag not in {known for args in COMPILER_ARGS.values() for known in args}:
            kept.append(flag)
    return " ".join([*kept, *COMPILER_ARGS[role]])


def check_stack(versions: Mapping[str, str], python: tuple[int, int]) -> None:
    """Refuse every stack but native torch-neuronx of SDK 2.33 or later; the message says how to get it.

    Args:
        versions: distribution -> version, of those in `REAL`, `FOREIGN` and torch that are installed.
        python: version of the interpreter.

    Raises:
        ModelError: "unsupported" when nothing is installed, "environment" when the wrong things are.
    """
    if "torch-neuronx" not in versions:
        old = "" if python >= (3, 12) else f" (needs Python 3.12 or later, this is {python[0]}.{python[1]})"
        raise ModelError("unsupported", f"device 'neuron': the extra 'neuron' is not installed{old}; {EXTRA}")
    for name, what in FOREIGN.items():
        if name in versions and not versions[name].startswith("0.0."):
            raise ModelError("environment", f"{name} {versions[name]} is installed: {what}; {EXTRA}")
    for name, first in REAL.items():
        version = versions.get(name)
        if version is None or _numbers(version)[:2] < first:
            what = "missing" if version is None else f"{version}, a placeholder or too old"
            raise ModelError("environment", f"{name} is {what}; {EXTRA}")
    if _numbers(versions.get("torch", "0.0"))[:2] != _numbers(versions["torch-neuronx"])[:2]:
        pair = f"torch {versions.get('torch')} and torch-neuronx {versions['torch-neuronx']}"
        raise ModelError("environment", f"{pair} do not belong together; {EXTRA}")


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.partition("+")[0].split(".") if part.isdigit())


def core_bytes(core: int, what: Literal["present", "peak"], root: Path = SYSFS) -> int | None:
    """Device memory of a logical core from the driver's files; None where the driver shows none."""
    device, place = divmod(core, CORES_PER_DEVICE)
    values = []
    for physical in range(place * LNC, place * LNC + LNC):
        path = root / f"neuron{device}" / f"neuron_core{physical}" / "stats" / "memory_usage" / "device_mem" / what
        try:
            values.append(int(path.read_text("ascii")))
        except (OSError, ValueError):
            return None
    return sum(values)
