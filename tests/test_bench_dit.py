"""`wamlab bench dit`: the whole network, its kernels, and one operation alone."""

import pytest
import torch

from wamlab.__main__ import main
from wamlab.measure import read_records

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="measures a GPU where there is one"
)


def test_a_record_with_what_a_step_runs(tmp_path, capsys):
    torch.set_num_threads(1)
    out = tmp_path / "records.jsonl"
    argv = ["bench", "dit", "--way", "eager", "--layers", "2", "--repeats", "2", "--trace"]
    assert main([*argv, "--out", str(out)]) == 0
    assert "samples/s" in capsys.readouterr().out
    (record,) = read_records(out)
    assert record.extra["split"]["cpu_ms"]["matmul"] > 0
    assert len(record.extra["kernels"]) <= 40
    assert record.extra["kernels"]["aten::addmm"][0] > 10


def test_one_operation_alone_prints_every_way(monkeypatch, capsys):
    monkeypatch.setattr(torch, "compile", lambda call, **_: call)
    argv = ["bench", "dit", "--only", "gated_residual", "--repeats", "2"]
    assert main(argv) == 0
    text = capsys.readouterr().out
    for way in ("reference", "compiled", "triton"):
        assert f"gated_residual, {way}" in text
    assert main([*argv[:3], "gated", *argv[4:]]) == 2
    assert "unknown operation 'gated'" in capsys.readouterr().err
