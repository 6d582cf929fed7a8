"""The encoder benchmark: every way gives the same latents; the command prints and records."""

import dataclasses

import pytest

from wamlab.__main__ import main
from wamlab.config import ConfigError
from wamlab.measure import read_records
from wamlab.model.bench_encode import (
    EncodeCase,
    encode_flops,
    ladder,
    measure_encode,
)

BASE = EncodeCase(frames=5, hw=(32, 32), warmup=0, repeats=1)


@pytest.mark.parametrize("case", ladder(BASE, conditioning=True), ids=lambda case: case.name)
def test_every_way_gives_the_public_latents(case):
    record = measure_encode(case)
    assert record.scope == "encode"
    assert record.extra["latents_rel_diff"] < 1e-5
    assert record.step_ms.median > 0
    assert record.extra["sample_ms"] == pytest.approx(record.step_ms.median / 2)


def test_the_gpu_ladder_holds_what_was_to_be_tried():
    names = {case.name: case for case in ladder(dataclasses.replace(BASE, device="cuda"))}
    assert len(names) == 14
    assert {case.compile for case in names.values()} == {None, "default"}
    assert any(case.cuda_graph and case.chunk == 16 for case in names.values())
    assert any(case.bf16_norms for case in names.values())
    with pytest.raises(ConfigError, match="cuda_graph needs device 'cuda'"):
        dataclasses.replace(BASE, cuda_graph=True)


def test_flops_are_the_specifications():
    for vae, hw, tera in (
        ("wan2.1", (352, 640), 37.7),
        ("wan2.2", (176, 320), 6.55),
        ("wan2.2", (160, 320), 5.96),
    ):
        assert encode_flops(vae, 33, hw) / 1e12 == pytest.approx(tera, rel=0.01)


def test_the_command_prints_rows_and_writes_records(tmp_path, capsys):
    out = tmp_path / "encode.jsonl"
    size = ["--frames", "5", "--hw", "32", "32", "--repeats", "1", "--batch", "1"]
    assert main(["bench", "encode", *size, "--only", "official", "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    assert "TFLOP a clip" in printed
    assert [record.name for record in read_records(out)] == ["official"]
    assert main(["bench", "encode", *size, "--only", "offical"]) == 2
    assert "did you mean 'official'" in capsys.readouterr().err
