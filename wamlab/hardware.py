"""Peak rates of devices, each with its source; a device that is not listed is "n/a", never guessed.

Dense rates, without sparsity. `flops` maps a precision to FLOP/s; `bandwidth` is device memory in
bytes a second, `link` GPU to GPU in bytes a second, one direction.
"""

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class Peak:
    """One device's peak rates and where they were published."""

    flops: dict[str, float]
    bandwidth: float
    link: float | None
    source: str


_HOPPER = {"bf16": 989.4e12, "float8": 1978.9e12, "tf32": 494.7e12, "fp32": 66.9e12}

PEAKS: dict[str, Peak] = {
    "NVIDIA H200": Peak(
        flops=_HOPPER,
        bandwidth=4.8e12,
        link=450e9,
        source="NVIDIA H200 Tensor Core GPU data sheet, 2024",
    ),
    "NVIDIA H100 80GB HBM3": Peak(
        flops=_HOPPER,
        bandwidth=3.35e12,
        link=450e9,
        source="NVIDIA H100 Tensor Core GPU data sheet, 2023",
    ),
    "NVIDIA H100 PCIe": Peak(
        flops={"bf16": 756e12, "float8": 1513e12, "tf32": 378e12, "fp32": 51e12},
        bandwidth=2.0e12,
        link=64e9,
        source="NVIDIA H100 Tensor Core GPU data sheet, 2023",
    ),
    "NVIDIA A100-SXM4-80GB": Peak(
        flops={"bf16": 312e12, "tf32": 156e12, "fp32": 19.5e12},
        bandwidth=2.039e12,
        link=300e9,
        source="NVIDIA A100 data sheet, 2021",
    ),
    "NVIDIA A100-SXM4-40GB": Peak(
        flops={"bf16": 312e12, "tf32": 156e12, "fp32": 19.5e12},
        bandwidth=1.555e12,
        link=300e9,
        source="NVIDIA A100 data sheet, 2021",
    ),
    "NVIDIA L40S": Peak(
        flops={"bf16": 362.05e12, "float8": 733e12, "tf32": 183e12, "fp32": 91.6e12},
        bandwidth=864e9,
        link=None,
        source="NVIDIA L40S data sheet, 2023",
    ),
    "NVIDIA GeForce RTX 4090": Peak(
        flops={"bf16": 165.2e12, "float8": 330.3e12, "tf32": 82.6e12, "fp32": 82.6e12},
        bandwidth=1.008e12,
        link=None,
        source="NVIDIA Ada GPU architecture white paper, version 2.1 (fp32 accumulation)",
    ),
    "NVIDIA GeForce RTX 3090": Peak(
        flops={"bf16": 71e12, "tf32": 35.6e12, "fp32": 35.6e12},
        bandwidth=936e9,
        link=None,
        source="NVIDIA Ampere GA102 GPU architecture white paper, version 2.1 (fp32 accumulation)",
    ),
}


def peak_flops(device: str, precision: str) -> float | None:
    """Return the peak FLOP/s of a device at a precision, or None where no source is listed."""
    peak = PEAKS.get(device)
    return peak.flops.get(precision) if peak else None
