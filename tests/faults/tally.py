"""How many faults were tried and how each ended, for the line at the end of the test run."""

from __future__ import annotations

from collections import Counter

ENDED: Counter[str] = Counter()
FUZZED: Counter[str] = Counter()


def lines() -> list[str]:
    """What to print; nothing where no such test ran."""
    said = []
    if ENDED:
        how = ", ".join(f"{count} {name}" for name, count in sorted(ENDED.items()))
        said.append(f"injection points tried: {sum(ENDED.values())}; faults survived: {how}")
    if FUZZED:
        how = ", ".join(f"{count} {name}" for name, count in sorted(FUZZED.items()))
        said.append(f"inputs fuzzed: {sum(FUZZED.values())} ({how})")
    return said
