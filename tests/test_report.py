"""The page stands alone, shows every number, and is honest about rows that do not count."""

import argparse
import re
from pathlib import Path

import pytest

from wamlab.cli import lab
from wamlab.cli import report as command
from wamlab.config import ConfigError, UserError
from wamlab.jupyter.markdown import update
from wamlab.jupyter.report import write_report
from wamlab.jupyter.table import html_table, print_ladder, rich_table
from wamlab.measure import Record, Timing, append_jsonl, stamp


def row(name, dimension, ms, **more):
    step = Timing(median=ms, q25=0.9 * ms, q75=1.2 * ms, n=5)
    numbers = {"samples_per_s": 2000 / ms, "losses": (2.0, 1.5, 1.4, 1.3, 1.2, 1.1, 1.0)}
    parts = {"data_wait": 0.2 * ms, "forward": 0.5 * ms, "backward": 0.3 * ms}
    values = {"step_ms": step, "parts_ms": parts, **numbers, **more}
    return stamp(Record(name=name, dimension=dimension, **values))


RECORDS = [
    row("official", None, 400.0, model="tiny", global_batch=2, precision="fp32", world_size=1),
    row("compute", "compute", 200.0, loss_rel_diff=3e-6, world_size=2),
    Record(name="data <b>", dimension="data", reason="torchcodec needs FFmpeg"),
    row("off", "parallel", 50.0, wrong="losses differ by 0.3"),
    Record(name="pyav", scope="decode", step_ms=Timing(median=9.0, q25=8.0, q75=9.5, n=10)),
]


def test_the_page_stands_alone(tmp_path):
    page = write_report(RECORDS, tmp_path, title="Speed & care")
    text = page.read_text()
    assert page == tmp_path / "report.html"
    assert text.count("data:image/png;base64,") == 4
    assert not re.search(r'(src|href)="(?!data:)', text)
    for name in ("speedup", "breakdown", "losses", "decode"):
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    assert "<h1>Speed &amp; care</h1>" in text
    assert "data &lt;b&gt;" in text


def test_the_page_says_how_it_was_measured(tmp_path):
    text = write_report(RECORDS, tmp_path).read_text()
    assert "compute trains 2.00 times as many samples a second as official" in text  # not "off"
    assert "global batch 2" in text
    assert "2 steps not counted" in text
    assert "5 steps; median and quartiles" in text
    assert "spread by up to 30% (quartiles)" in text
    assert RECORDS[0].machine["cpu"] in text


def test_a_page_without_parts_and_decoders_has_fewer_pictures(tmp_path):
    bare = [row("official", None, 400.0, parts_ms=None, losses=None)]
    text = write_report(bare, tmp_path).read_text()
    assert text.count("data:image/png;base64,") == 1
    assert "Only official could be measured" in text


def test_no_measured_row_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="none of 1 records is a measured row"):
        write_report([RECORDS[2]], tmp_path)


def test_the_table_marks_rows_that_do_not_count(capsys):
    text = html_table(RECORDS[:4])
    assert '<tr class="skipped">' in text
    assert '<tr class="wrong">' in text
    print_ladder(RECORDS[:4])
    shown = capsys.readouterr().out
    assert "400 (360–480)" in shown
    assert "2.00×" in shown
    assert "data <b>: skipped: torchcodec needs FFmpeg" in shown
    assert "off: wrong: losses differ by 0.3" in shown
    assert "compute: 2 ranks" in shown
    narrow = rich_table(RECORDS[:4], narrow=True)
    assert next(iter(narrow.columns[1].cells)) == "400"


def test_the_command_reads_record_files(tmp_path, capsys):
    append_jsonl(tmp_path / "records.jsonl", RECORDS)
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    line = [str(tmp_path / "records.jsonl"), "--out", str(tmp_path / "page")]
    assert command.run(parser.parse_args(line)) == 0
    assert (tmp_path / "page" / "report.html").is_file()
    assert "report: " in capsys.readouterr().out


def test_lab_opens_the_notebooks(tmp_path, monkeypatch):
    parser = argparse.ArgumentParser()
    lab.add_arguments(parser)
    monkeypatch.setattr(lab, "NOTEBOOKS", tmp_path)
    line = lab.command(parser.parse_args(["--port", "8899", "--no-browser"]))
    assert line[1:] == ["-m", "jupyterlab", str(tmp_path), "--port", "8899", "--no-browser"]
    monkeypatch.setattr(lab, "NOTEBOOKS", tmp_path / "absent")
    with pytest.raises(UserError, match="no notebooks at"):
        lab.command(parser.parse_args([]))


def test_readmes_tables_are_those_of_their_records(tmp_path, capsys):
    readme = Path(__file__).parents[1] / "README.md"
    text = readme.read_text()
    copy = tmp_path / "README.md"
    copy.write_text(re.sub(r"(?<=-->\n)\|.*?(?=<!-- end)", "| old |\n", text, flags=re.DOTALL))
    (tmp_path / "notebooks").symlink_to(readme.parent / "notebooks")
    assert command.run(options("--update", str(copy))) == 0
    assert "3 tables" in capsys.readouterr().out
    assert copy.read_text() == text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("no table", "0 of 0 tables stand between"),
        ("<!-- records: r.jsonl step -->\n\n# Next\n\n<!-- end -->", "0 of 1 tables stand"),
        ("<!-- records: a b.jsonl step -->\n<!-- end -->", "0 of 1 tables stand between"),
        ("<!-- records: r.jsonl encode -->\n<!-- end -->", "'encode' lacks a number: 'frames'"),
        ("<!-- records: r.jsonl stpe -->\n<!-- end -->", "did you mean 'step'"),
        ("<!-- records: r.jsonl dit -->\n<!-- end -->", "r.jsonl has no record of scope 'dit'"),
    ],
)
def test_a_file_whose_tables_cannot_be_made_is_refused(tmp_path, text, message):
    bare = Record(name="x", scope="encode")
    append_jsonl(tmp_path / "r.jsonl", [*RECORDS, bare])
    (tmp_path / "a.md").write_text(text)
    with pytest.raises(ConfigError, match=message):
        command.run(options("--update", str(tmp_path / "a.md")))
    assert (tmp_path / "a.md").read_text() == text


def test_rows_that_do_not_count_say_why_in_markdown(tmp_path):
    append_jsonl(tmp_path / "r.jsonl", RECORDS)
    (tmp_path / "a.md").write_text("<!-- records: r.jsonl step -->\n<!-- end -->\n")
    assert update(tmp_path / "a.md") == 1
    text = (tmp_path / "a.md").read_text()
    assert "| compute | 200 | 10.00 | 2.00× | 3e-06 |" in text
    assert "| off | losses differ by 0.3 |" in text
    assert "| data <b> | torchcodec needs FFmpeg |" in text


def test_line_ends_stay_as_they_are(tmp_path):
    append_jsonl(tmp_path / "r.jsonl", RECORDS)
    (tmp_path / "a.md").write_bytes(b"# A\r\n<!-- records: r.jsonl step -->\r\n<!-- end -->\r\n")
    assert update(tmp_path / "a.md") == 1
    stored = (tmp_path / "a.md").read_bytes()
    assert stored.count(b"\r\n") == stored.count(b"\n") == 9


def test_records_of_parts_are_printed_as_their_table(tmp_path, capsys):
    folder = Path(__file__).parents[1] / "notebooks" / "measurements"
    assert command.run(options(str(folder / "dit_h200.jsonl"), "--out", str(tmp_path))) == 0
    assert "| dreamzero-5b, micro-batch 1 | official; recompute full |" in capsys.readouterr().out
    append_jsonl(tmp_path / "r.jsonl", [Record(name="x", scope="augment")])
    with pytest.raises(ConfigError, match=r"nothing to report: scopes augment in 1 records; there"):
        command.run(options(str(tmp_path / "r.jsonl")))


def test_days_of_a_full_run(tmp_path, capsys):
    append_jsonl(tmp_path / "r.jsonl", RECORDS)
    files = [str(tmp_path / "r.jsonl"), "--out", str(tmp_path / "page"), "--samples", "8.64e6"]
    assert command.run(options(*files)) == 0
    printed = capsys.readouterr().out
    assert re.search(r"official +20 days for 8.64e\+06 samples on this machine", printed)
    assert re.search(r"compute +10 days", printed)
    with pytest.raises(ConfigError, match="--samples -5: a number above 0"):
        command.run(options("--samples", "-5", "r.jsonl"))


def test_report_without_anything_to_do_is_refused():
    with pytest.raises(ConfigError, match="takes files of records, or --update"):
        command.run(options())


def options(*line):
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return parser.parse_args(list(line))
