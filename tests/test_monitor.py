"""The live monitor: what it reads and says, and in a real kernel how often and how it stops."""

import json

import pytest
from live_kernel import kernel

from wamlab.config import ConfigError
from wamlab.jupyter._folder import RunFolder
from wamlab.jupyter.monitor import Monitor, StepFile, picture
from wamlab.measure import append_jsonl


def step(number, **more):
    row = {"step": number, "loss": 2.0 / (number + 1), "dynamics_loss": None}
    return row | {"step_ms": 500.0, "samples_per_s": 4.0, "data_wait_ms": 50.0, **more}


def finished_run(path, steps):
    folder = RunFolder(path)
    folder.prepare()
    folder.write("job.json", {"target": "a:b", "nproc": 2, "config": {"steps": 30}})
    folder.write("guard.json", {"pid": 2**22, "created": 0.0})
    folder.write("end.json", {"status": "done"})
    append_jsonl(path / "steps.jsonl", steps)
    return folder


def test_new_lines_are_read_once_and_whole(tmp_path):
    file = StepFile(tmp_path / "steps.jsonl")
    assert not file.update()
    append_jsonl(file.path, [step(0), step(1)])
    with file.path.open("a") as half:
        half.write('{"step": 2, "lo')
    assert file.update()
    assert not file.update()
    assert len(file.rows) == 2
    with file.path.open("a") as rest:
        rest.write('ss": 1.5}\n')
    assert file.update()
    assert file.last("loss") == 1.5
    assert file.last("mfu") is None


def test_the_line_says_what_is_known(tmp_path):
    finished_run(tmp_path, [step(0), step(1, mfu=0.412, peak_gib=1.5)])
    monitor = Monitor(tmp_path)
    assert monitor.summary() == "2 ranks"
    monitor.steps.update()
    assert monitor.summary() == (
        "2 ranks, step 2 of 30 · 0:00:14 left · loss 1 · 4 samples/s · MFU 41.2% · "
        "peak 1.50 GiB · data wait 10%"
    )


def test_a_long_run_is_drawn_in_little_time():
    rows = [step(n) for n in range(50_000)]
    assert picture(rows).startswith(b"\x89PNG")
    assert picture([step(0, loss=None)]).startswith(b"\x89PNG")


def test_a_folder_without_a_run_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="holds no run"):
        Monitor(tmp_path)


def click(made, button):
    content = {"comm_id": button, "data": {"method": "custom", "content": {"event": "click"}}}
    message = made.client.session.msg("comm_msg", content)
    made.client.shell_channel.send(message)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # jupyter_client's own
def test_the_monitor_lives_and_stops_in_a_kernel(tmp_path):
    """The cell returns at once, at most 4 redraws a second, Stop ends the run, a picture stays."""
    with kernel() as made:
        config = {"steps": 2000, "pause": 0.02}
        cell = f"job = launch('rank_targets:train', {config}, 1, out={str(tmp_path)!r})"
        made.send(cell)
        opened = []
        while not (tmp_path / "steps.jsonl").exists():
            opened += made.messages(0.5)
        assert any(m["content"].get("execution_state") == "idle" for m in opened)
        seconds = 4.0
        live = made.messages(seconds)
        drawn = [m for m in live if m["msg_type"] == "update_display_data"]
        assert 1 <= len(drawn) <= 4 * seconds
        assert all("image/png" in m["content"]["data"] for m in drawn)
        changed = [m for m in live if m["msg_type"] == "comm_msg"]
        assert len(changed) <= 4 * 4 * seconds  # label, bar and their acknowledgements
        click(made, button_of(opened))
        ended = made.run("status = job.wait()\nprint(status)")
        assert ended.text == "stopped\n"
        made.run("from wamlab.jupyter.monitor import Monitor")
        again = made.run(f"Monitor({str(tmp_path)!r}).show().finish()")
        assert "stopped: 1 rank, step" in json.dumps(again.displays)
        assert "image/png" in again.displays[-1] or "image/png" in again.displays[-2]


def button_of(messages):
    for message in messages:
        if message["msg_type"] == "comm_open":
            state = message["content"]["data"]["state"]
            if state.get("_model_name") == "ButtonModel":
                return message["content"]["comm_id"]
    raise AssertionError("no button was opened")
