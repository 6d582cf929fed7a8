"""wamlab.hardware: every peak has a source; unknown is unknown."""

from wamlab.hardware import PEAKS, peak_flops


def test_every_row_has_a_source_and_plausible_rates():
    for name, peak in PEAKS.items():
        assert peak.source, name
        assert 1e13 < peak.flops["bf16"] < 1e16, name
        assert 1e11 < peak.bandwidth < 1e13, name


def test_an_unlisted_device_or_precision_gives_none():
    assert peak_flops("Abacus", "bf16") is None
    assert peak_flops("NVIDIA A100-SXM4-80GB", "float8") is None
