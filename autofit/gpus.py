"""The catalogue of GPUs: what a prediction needs to know of one that is not here.

`total_bytes` is what the driver reports as the device's memory, below the size on the box. Where torch's own messages
in public bug reports give it ("GPU 0 has a total capacity of …"), it is marked `seen`; those figures are rounded to
10 MiB and move a little with the driver. The others are estimated: 98 % of the size on the box, or 92 % where error
correction is on by default and kept in the same memory, as on the L4 and L40. Rates are the vendor's dense figures,
with float32 accumulation where tensor cores offer both; None where a GPU does not compute in that dtype.
"""

from __future__ import annotations

from dataclasses import dataclass
from difflib import get_close_matches

from autofit.errors import ConfigError
from autofit.units import GiB

Capability = tuple[int, int]

_GB = 1000**3
_TERA = 1000**4


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One model of GPU. Bandwidth in bytes per second, rates in floating point operations per second, dense."""

    name: str
    total_bytes: int
    capability: Capability
    bandwidth: float
    float32: float
    tf32: float | None
    bfloat16: float | None
    float16: float | None


def _seen(gib: float) -> int:
    return round(gib * GiB)


def _nominal(gib: int) -> int:
    return round(gib * GiB * 0.98)


def _corrected(gib: int) -> int:
    return round(gib * GiB * 0.92)


def _gpu(
    name: str,
    total_bytes: int,
    capability: Capability,
    *,
    gb_per_second: float,
    float32: float,
    tf32: float | None = None,
    bfloat16: float | None = None,
    float16: float | None = None,
) -> Gpu:
    """Rates in TFLOP/s."""
    rates = [None if rate is None else rate * _TERA for rate in (tf32, bfloat16, float16)]
    return Gpu(
        name=name,
        total_bytes=total_bytes,
        capability=capability,
        bandwidth=gb_per_second * _GB,
        float32=float32 * _TERA,
        tf32=rates[0],
        bfloat16=rates[1],
        float16=rates[2],
    )


# One line a GPU, its source above.
# fmt: off
_ENTRIES = (
    # "NVIDIA Pascal GP102" whitepaper; float16 runs at 1/64 of float32.
    _gpu("GTX 1080 Ti", _nominal(11), (6, 1), gb_per_second=484, float32=11.3, float16=0.177),
    # Turing TU116 data: no tensor cores, float16 at twice the rate of float32. The memory is a GTX 1660 Ti's.
    _gpu("GTX 1660", _seen(5.81), (7, 5), gb_per_second=192, float32=5.0, float16=10.0),
    # "NVIDIA Turing GPU Architecture" whitepaper, appendices; reference clocks.
    _gpu("RTX 2060", _seen(5.79), (7, 5), gb_per_second=336, float32=6.5, float16=25.8),
    _gpu("RTX 2080 Ti", _nominal(11), (7, 5), gb_per_second=616, float32=13.4, float16=53.8),
    # "NVIDIA Ampere GA102" whitepaper, tables 2 and 9. The RTX 3060's bytes are the driver's own figure.
    _gpu("RTX 3060", 12_622_168_064, (8, 6), gb_per_second=360, float32=12.7, tf32=12.7, bfloat16=25.4, float16=25.4),
    _gpu("RTX 3070", _seen(7.78), (8, 6), gb_per_second=448, float32=20.3, tf32=20.3, bfloat16=40.6, float16=40.6),
    _gpu("RTX 3080", _seen(9.78), (8, 6), gb_per_second=760, float32=29.8, tf32=29.8, bfloat16=59.5, float16=59.5),
    _gpu("RTX 3090", _nominal(24), (8, 6), gb_per_second=936, float32=35.6, tf32=35.6, bfloat16=71.0, float16=71.0),
    # "NVIDIA Ada GPU Architecture" whitepaper, appendix A, and product pages. The RTX 4060's bytes are the driver's.
    _gpu("RTX 4060", 8_318_222_336, (8, 9), gb_per_second=272, float32=15.1, tf32=15.1, bfloat16=30.2, float16=30.2),
    _gpu("RTX 4070", _nominal(12), (8, 9), gb_per_second=504, float32=29.1, tf32=29.1, bfloat16=58.3, float16=58.3),
    _gpu("RTX 4080", _nominal(16), (8, 9), gb_per_second=717, float32=48.7, tf32=48.7, bfloat16=97.5, float16=97.5),
    _gpu("RTX 4090", _seen(23.64), (8, 9), gb_per_second=1008, float32=82.6, tf32=82.6, bfloat16=165.2, float16=165.2),
    # "NVIDIA RTX Blackwell GPU Architecture" whitepaper, appendix A.
    _gpu("RTX 5080", _nominal(16), (12, 0), gb_per_second=960, float32=56.3, tf32=56.3, bfloat16=112.6, float16=112.6),
    _gpu("RTX 5090", _seen(31.37), (12, 0), gb_per_second=1792, float32=104.8, tf32=104.8, bfloat16=209.5,
         float16=209.5),
    # "NVIDIA Tesla P100" datasheet, PCIe 16 GB.
    _gpu("P100", _nominal(16), (6, 0), gb_per_second=732, float32=9.3, float16=18.7),
    # "NVIDIA V100" datasheet, SXM2.
    _gpu("V100 16GB", _nominal(16), (7, 0), gb_per_second=900, float32=15.7, float16=125),
    _gpu("V100 32GB", _seen(31.74), (7, 0), gb_per_second=900, float32=15.7, float16=125),
    # "NVIDIA T4" datasheet.
    _gpu("T4", _seen(14.56), (7, 5), gb_per_second=320, float32=8.1, float16=65),
    # "NVIDIA A100" datasheet; 80 GB is the SXM module.
    _gpu("A100 40GB", _seen(39.50), (8, 0), gb_per_second=1555, float32=19.5, tf32=156, bfloat16=312, float16=312),
    _gpu("A100 80GB", _seen(79.25), (8, 0), gb_per_second=2039, float32=19.5, tf32=156, bfloat16=312, float16=312),
    # "NVIDIA A30", "A10" and "A40" datasheets; the A10G as AWS and NVIDIA describe it for the G5 instances.
    _gpu("A30", _seen(23.53), (8, 0), gb_per_second=933, float32=10.3, tf32=82, bfloat16=165, float16=165),
    _gpu("A10", _corrected(24), (8, 6), gb_per_second=600, float32=31.2, tf32=62.5, bfloat16=125, float16=125),
    _gpu("A10G", _corrected(24), (8, 6), gb_per_second=600, float32=35, tf32=35, bfloat16=70, float16=70),
    _gpu("A40", _corrected(48), (8, 6), gb_per_second=696, float32=37.4, tf32=74.8, bfloat16=149.7, float16=149.7),
    # "NVIDIA RTX A5000", "RTX A6000" and "RTX 6000 Ada" datasheets; the last with error correction on.
    _gpu("RTX A5000", _seen(23.68), (8, 6), gb_per_second=768, float32=27.8, tf32=55.6, bfloat16=111.1, float16=111.1),
    _gpu("RTX A6000", _nominal(48), (8, 6), gb_per_second=768, float32=38.7, tf32=77.4, bfloat16=154.8, float16=154.8),
    _gpu("RTX 6000 Ada", _seen(44.43), (8, 9), gb_per_second=960, float32=91.1, tf32=182, bfloat16=364, float16=364),
    # "NVIDIA L4", "L40" and "L40S" datasheets; tensor rates are half of the sparse ones.
    _gpu("L4", _seen(22.03), (8, 9), gb_per_second=300, float32=30.3, tf32=60, bfloat16=121, float16=121),
    _gpu("L40", _seen(44.40), (8, 9), gb_per_second=864, float32=90.5, tf32=90.5, bfloat16=181, float16=181),
    _gpu("L40S", _seen(44.42), (8, 9), gb_per_second=864, float32=91.6, tf32=183, bfloat16=362, float16=362),
    # "NVIDIA H100" and "H200" datasheets, SXM and PCIe; tensor rates are half of the sparse ones.
    _gpu("H100", _seen(79.10), (9, 0), gb_per_second=3350, float32=67, tf32=494, bfloat16=989, float16=989),
    _gpu("H100 PCIe", _seen(79.10), (9, 0), gb_per_second=2000, float32=51, tf32=378, bfloat16=756, float16=756),
    _gpu("H200", _seen(139.80), (9, 0), gb_per_second=4800, float32=67, tf32=494, bfloat16=989, float16=989),
    # "NVIDIA DGX B200" datasheet, one GPU of eight; 180 GB of memory are usable.
    _gpu("B200", _nominal(180), (10, 0), gb_per_second=8000, float32=75, tf32=1125, bfloat16=2250, float16=2250),
)
# fmt: on

GPUS: dict[str, Gpu] = {entry.name: entry for entry in _ENTRIES}


def find_gpu(name: str) -> Gpu:
    """The GPU of that name; the maker's prefixes, case, spaces and hyphens do not count.

    Raises ConfigError, with the names that come closest, for a GPU that is not in the catalogue.
    """
    wanted = _key(name)
    keys = {_key(known): gpu for known, gpu in GPUS.items()}
    if wanted in keys:
        return keys[wanted]
    variants = [known for known in GPUS if _key(known).startswith(wanted)] if len(wanted) > 1 else []
    close = variants or [keys[key].name for key in get_close_matches(wanted, keys, n=3, cutoff=0.4)]
    hint = f"Did you mean {' or '.join(map(repr, close))}?" if close else f"Known: {', '.join(GPUS)}."
    raise ConfigError(f"The catalogue has no GPU {name!r}. {hint}")


def _key(name: str) -> str:
    words = name.lower().replace("-", " ").split()
    return "".join(word for word in words if word not in ("nvidia", "geforce", "tesla", "quadro"))
