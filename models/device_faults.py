"""What a device's or a compiler's own error means: text -> (kind, message), one table of documented codes.

Kinds are those of `batch_gen.errors`. The runtime's code alone is ambiguous (an SRAM error may show as 1004 or 1202, a
memory error of the chip as 5, 1201 or 1205): the runtime's log line and dmesg decide, and the message says so. Source:
the Neuron SDK's troubleshooting pages and the compiler's error list. Not run on a device.
"""

import re
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Fault:
    """One documented code: the kind that it leads to, what it means, what to do."""

    kind: str
    meaning: str
    remedy: str


_REPLACE: Final = "replace the machine; dmesg shows NEURON_HW_ERR with the suggested action"
_SMALLER: Final = "use a larger mesh or a smaller size"
_RESTART: Final = "all ranks of the replica start again; if it returns, look in dmesg for the rank that stopped first"
_CORES: Final = "another process holds the core, or the visible cores are wrong; see neuron-ls -w, batch-gen doctor"
_REPORT: Final = "this is a defect of batch-gen; please report it with the rank's log"

RUNTIME: Final[dict[int, Fault]] = {
    1: Fault("device", "failure", _RESTART),
    2: Fault("bug", "invalid argument or group of ranks", f"a group that the fabric cannot route, or: {_REPORT}"),
    3: Fault("bug", "invalid handle", _REPORT),
    4: Fault("oom", "out of a device resource, most often memory", _SMALLER),
    5: Fault("device", "timeout", _RESTART),
    6: Fault("device", "hardware error", _RESTART),
    7: Fault("device", "execution queue full", _RESTART),
    9: Fault("environment", "not enough cores", _CORES),
    10: Fault(
        "environment", "a graph of another runtime version", "compile again with this installation (batch-gen compile)"
    ),
    11: Fault("oom", "out of memory", _SMALLER),
    13: Fault("bug", "runtime not initialised", _REPORT),
    14: Fault("device", "runtime closed", _RESTART),
    15: Fault("device", "execution queue empty", _RESTART),
    101: Fault("device", "an execution unit cannot recover", _RESTART),
    1002: Fault("bug", "bad input to a graph", _REPORT),
    1003: Fault("nonfinite", "NaN during execution", "try another seed or dtype"),
    1004: Fault("device", "completed with an error", _RESTART),
    1005: Fault("environment", "core busy", _CORES),
    1006: Fault("bug", "memory access out of bounds", _REPORT),
    1100: Fault("device", "a collective is still pending", _RESTART),
    1200: Fault("device", "hardware error in a collective", _RESTART),
    1201: Fault("hardware", "device memory error that cannot be corrected", _REPLACE),
    1202: Fault("hardware", "core error that cannot be corrected", _REPLACE),
    1203: Fault("hardware", "DMA aborted", _REPLACE),
    1204: Fault("device", "notification queue overflow", _RESTART),
    1205: Fault("hardware", "device memory error that a reset repairs", "reload the driver or reboot the machine"),
    1206: Fault("device", "network proxy failure", _RESTART),
}

_BLOCK: Final = "use --compile block, a larger mesh or a smaller size"
_ALLOW: Final = "the operator list of this version forbids it; please report it with the graph's name"
COMPILER: Final[dict[str, Fault]] = {
    "EARG001": Fault("environment", "LNC differs between runtime and compiler", "unset NEURON_LOGICAL_NC_CONFIG"),
    "EBVF030": Fault("unsupported", "too many instructions", _BLOCK),
    "EVRF007": Fault("unsupported", "too many instructions", _BLOCK),
    "EOOM001": Fault("memory", "the graph does not fit in device memory", _SMALLER),
    "EOOM002": Fault("memory", "the graph does not fit in device memory", _SMALLER),
    "EVRF009": Fault("memory", "the graph does not fit in device memory", _SMALLER),
    "EMOD025": Fault("bug", "dynamic shape", _REPORT),
    "EVRF004": Fault("bug", "complex dtype", _ALLOW),
    "EVRF035": Fault("bug", "integer dot product", _ALLOW),
    "EVRF051": Fault("unsupported", "float8_e4m3fn does not exist on trn2", "use --quantization none, or trn3"),
    "EVRF005": Fault("unsupported", "an fnuz FP8 format", "use --quantization none"),
    "ESPP047": Fault("unsupported", "an fnuz FP8 format", "use --quantization none"),
    "EVRF010": Fault("bug", "convolution with this dilation", _ALLOW),
    "EVRF011": Fault("bug", "convolution with this dilation", _ALLOW),
    "EVRF016": Fault("bug", "integer scatter-reduce", _ALLOW),
    "EVRF031": Fault("bug", "scatter out of bounds", _ALLOW),
    "EUOC002": Fault("unsupported", "unsupported operator", _ALLOW),
    "EVRF001": Fault("unsupported", "unsupported operator", _ALLOW),
    "EHCA005": Fault("environment", "unknown custom call", "nki and neuronx-cc do not belong together: install again"),
    "EVRF015": Fault("environment", "unknown custom call", "nki and neuronx-cc do not belong together: install again"),
    "EBIR023": Fault("unsupported", "a library kernel's width limit", _BLOCK),
}

# phrases of logs and exceptions that decide more than the code beside them; the first that fits wins
PHRASES: Final[tuple[tuple[str, Fault], ...]] = (
    (r"no_hier no_mesh|replica id .{0,40}not seen", Fault("bug", "a group that the fabric cannot route", _REPORT)),
    (r"mc_alloc|CUDA out of memory", Fault("oom", "out of device memory", _SMALLER)),
    (r"suspected hang in collectives", Fault("device", "a collective hangs", _RESTART)),
    (r"NEURON_HW_ERR", Fault("hardware", "the driver reports a hardware error", _REPLACE)),
    (r"CUDA error: (device-side assert|an illegal memory access)", Fault("device", "the CUDA device failed", _RESTART)),
    (r"(uncorrectable ECC|CUDA error: ECC)", Fault("hardware", "memory error of the CUDA device", _REPLACE)),
    (r"waiting for RX", Fault("device", "a rank waited long for another", _RESTART)),
)

# What torch.compile itself raises, after all codes inside its text were looked for: every clip would fail alike.
_UNCOMPILED: Final = (
    re.compile(r"BackendCompilerFailed|InductorError|CppCompileError|InvalidCxxCompiler|TorchDynamoError|Unsupported:"),
    Fault("unsupported", "a part of the model could not be compiled", "use --compile off, or see the rank's log"),
)

_NAMES: Final = {  # spellings of the runtime's status in place of its number
    "NRT_FAILURE": 1, "NRT_INVALID": 2, "NRT_INVALID_HANDLE": 3, "NRT_RESOURCE": 4, "NRT_TIMEOUT": 5,
    "NRT_HW_ERROR": 6, "NRT_QUEUE_FULL": 7, "NRT_LOAD_NOT_ENOUGH_NC": 9, "NRT_UNSUPPORTED_NEFF_VERSION": 10,
    "NRT_FAIL_HOST_MEM_ALLOC": 11, "NRT_UNINITIALIZED": 13, "NRT_CLOSED": 14, "NRT_QUEUE_EMPTY": 15,
    "NRT_EXEC_UNIT_UNRECOVERABLE": 101, "NRT_EXEC_BAD_INPUT": 1002, "NRT_EXEC_COMPLETED_WITH_NUM_ERR": 1003,
    "NRT_EXEC_COMPLETED_WITH_ERR": 1004, "NRT_EXEC_NC_BUSY": 1005, "NRT_EXEC_OOB": 1006, "NRT_COLL_PENDING": 1100,
    "NRT_EXEC_HW_ERR_COLLECTIVES": 1200, "NRT_EXEC_HW_ERR_HBM_UE": 1201, "NRT_EXEC_HW_ERR_NC_UE": 1202,
    "NRT_EXEC_HW_ERR_DMA_ABORT": 1203, "NRT_EXEC_SW_NQ_OVERFLOW": 1204, "NRT_EXEC_HW_ERR_REPAIRABLE_HBM_UE": 1205,
    "NRT_NETWORK_PROXY_FAILURE": 1206,
}  # fmt: skip
_STATUS: Final = re.compile(
    r"(?:NRT_STATUS|nrt status|nrt_\w+ (?:failed|returned)|status(?:_code)?|Nrt(?:py)?Error)\D{0,24}?(\d{1,4})\b",
    re.IGNORECASE,
)
_NAME: Final = re.compile(r"\bNRT_[A-Z_]+\b")
_CODE: Final = re.compile(r"\b(?:NCC_)?(E[A-Z]{3}\d{3})\b")


def classify(text: str) -> tuple[str, str] | None:
    """Kind and message of a device's or compiler's error text; None when no documented code stands in it.

    The message is one line: code, meaning, what to do, then the first line of the text itself.
    """
    found = _fault(text)
    if found is None:
        return None
    code, fault = found
    said = next((line.strip() for line in text.splitlines() if line.strip()), "")[:300]
    return fault.kind, f"{code}: {fault.meaning}; {fault.remedy} (said: {said})"


def _fault(text: str) -> tuple[str, Fault] | None:
    for pattern, fault in PHRASES:
        if match := re.search(pattern, text, re.IGNORECASE):
            return match[0], fault
    for match in _CODE.finditer(text):
        if match[1] in COMPILER:
            return f"compiler error {match[1]}", COMPILER[match[1]]
    for match in _NAME.finditer(text):
        if match[0] in _NAMES:
            return match[0], RUNTIME[_NAMES[match[0]]]
    if re.search(r"nrt|neuron", text, re.IGNORECASE):
        for match in _STATUS.finditer(text):
            if int(match[1]) in RUNTIME:
                return f"runtime status {match[1]}", RUNTIME[int(match[1])]
    raised = _UNCOMPILED[0].search(text)
    return None if raised is None else (raised[0].rstrip(":"), _UNCOMPILED[1])
