"""Collects every fault of a manifest, with a bound on memory: all are counted, enough are kept."""

from __future__ import annotations

from collections import Counter

from batch_gen.errors import MAX_FAULTS_SHOWN, Fault, ManifestError

MAX_KEPT = 10_000
MAX_KEPT_PER_COLUMN = 1_000


class FaultLog:
    """Faults in the order in which they are found."""

    def __init__(self) -> None:
        self._faults: list[Fault] = []
        self._per_column: Counter[str | None] = Counter()
        self.num_faults = 0

    def room(self, column: str | None) -> int:
        """How many more faults of a column are kept; the rest need only be counted."""
        return max(0, min(MAX_KEPT - len(self._faults), MAX_KEPT_PER_COLUMN - self._per_column[column]))

    def add(self, fault: Fault) -> None:
        """Count one fault, and keep it while there is room."""
        if self.room(fault.column) > 0:
            self._faults.append(fault)
            self._per_column[fault.column] += 1
        self.num_faults += 1

    def count(self, num_faults: int) -> None:
        """Count faults that are not kept."""
        self.num_faults += num_faults

    def raise_if_any(self) -> None:
        """Raise a ManifestError with the faults, by file and row; a frequent column leaves room for the others."""
        if self.num_faults == 0:
            return
        order = {file: k for k, file in enumerate(dict.fromkeys(fault.file for fault in self._faults))}

        def place(fault: Fault) -> tuple[int, int]:
            return order[fault.file], -1 if fault.row is None else fault.row

        faults = sorted(self._faults, key=place)
        share = max(3, MAX_FAULTS_SHOWN // max(1, len(self._per_column)))
        seen: Counter[str | None] = Counter()
        front: list[Fault] = []
        back: list[Fault] = []
        for fault in faults:
            seen[fault.column] += 1
            (front if seen[fault.column] <= share else back).append(fault)
        room = max(0, MAX_FAULTS_SHOWN - len(front))
        shown = sorted(front + back[:room], key=place)
        raise ManifestError([*shown, *back[room:]], num_faults=self.num_faults)
