"""Energy of the processors, where the machine tells it: Linux' counters under /sys/class/powercap (RAPL), which most
systems let only root read. A counter is of a whole processor: all cores, what idles and other programs included."""

from __future__ import annotations

from pathlib import Path

ZONES = Path("/sys/class/powercap")
Counters = dict[str, tuple[int, int]]  # of each processor: microjoules so far, and where the counter begins anew


def counters() -> Counters:
    """Empty where there are none, or where they may not be read.

    Of the zones intel-rapl:N (AMD's have the same name) those named package-N are processors; one named psys is the
    whole machine, intel-rapl:N:M are parts of a zone, and intel-rapl-mmio:N is a processor once more.
    """
    found = {}
    try:
        for zone in sorted(ZONES.glob("intel-rapl:*")):
            if (zone / "name").read_text().startswith("package"):
                now, most = (int((zone / f"{what}_uj").read_text()) for what in ("energy", "max_energy_range"))
                found[zone.name] = (now, most)
    except (OSError, ValueError):
        return {}
    return found


def joules(before: Counters, after: Counters) -> float | None:
    """What was spent in between, if every counter began anew at most once; None where it is not told."""
    if not before or before.keys() != after.keys():
        return None
    spent = 0
    for name, (now, most) in after.items():
        change = now - before[name][0]
        spent += change if change >= 0 else change + most
    return spent / 1e6
