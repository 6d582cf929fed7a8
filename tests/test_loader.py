"""The loader: same samples whatever reads them, exact resume, nothing left behind."""

import gc
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from counted_data import read_barcodes, write_counted

from wamlab.config import ConfigError, from_dict, to_dict
from wamlab.data.cache import DecoderCache
from wamlab.data.container import VideoError
from wamlab.data.data_config import DataConfig, Source, open_data
from wamlab.data.embodiment import EMBODIMENTS
from wamlab.data.lerobot import LeRobotDataset
from wamlab.data.loader import Loader
from wamlab.data.metadata import DatasetError
from wamlab.data.sampler import Unions
from wamlab.data.windows import WindowDataset

COUNTED = replace(
    EMBODIMENTS["toy"],
    name="counted",
    views=("front", "wrist"),
    layout="side_by_side",
    horizon=8,
    blocks=2,
    view_hw=(32, 96),
    language=("annotation.first", "annotation.second"),
)
TASKS = ["pick it", "place it", "push it"]


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("counted") / "data"
    return write_counted(folder, COUNTED, [30, 21, 40], tasks=TASKS)


@pytest.fixture(autouse=True)
def known(monkeypatch):
    monkeypatch.setitem(EMBODIMENTS, "counted", COUNTED)


@pytest.fixture
def make(root):
    """Makes loaders of the counted data set and closes them."""
    made = []

    def loader(global_batch=4, micro_batch=2, rank=0, world_size=1, seed=3, start_step=0, **config):
        fields = {"root": str(root), "embodiment": "counted", "decoder": "pyav", "train": False}
        ranks = {"rank": rank, "world_size": world_size}
        sizes = {"global_batch": global_batch, "micro_batch": micro_batch}
        place = {"seed": seed, "start_step": start_step}
        made.append(Loader(DataConfig(**fields | config), **sizes, **ranks, **place))
        return made[-1]

    yield loader
    for one in made:
        one.close()


def take(loader: Loader, count: int) -> list[dict]:
    return [next(loader) for _ in range(count)]


def assert_equal(left: list[dict], right: list[dict]) -> None:
    for a, b in zip(left, right, strict=True):
        assert a.keys() == b.keys()
        for name, value in a.items():
            same = torch.equal(value, b[name]) if torch.is_tensor(value) else value == b[name]
            assert same, name


def test_a_batch_holds_its_samples(make, root):
    loader = make(augment="device")
    batch, ids = next(loader), loader.ids_of_step(0)[:2]
    data = WindowDataset(LeRobotDataset(root, COUNTED), open_video=DecoderCache("pyav"))
    want = [data.sample(int(i)) for i in ids]
    assert batch["sample_id"].tolist() == ids.tolist()
    assert batch["prompt"] == [w["prompt"] for w in want]
    for name in ("state", "state_mask", "action", "action_mask", "has_real_action"):
        assert torch.equal(batch[name], torch.stack([w[name] for w in want])), name
    assert batch["video"].shape == (2, 17, 32, 192, 3)
    assert batch["video"].dtype == torch.uint8
    assert "views" not in batch
    left = batch["video"][0, :, :, :96].permute(0, 3, 1, 2)
    assert [s for _, _, s in read_barcodes(left)] == [
        s for _, _, s in read_barcodes(want[0]["views"][0])
    ]


def test_both_places_of_augmentation_agree(make):
    cpu, device = (take(make(augment=a, train=True), 2) for a in ("cpu", "device"))
    for a, b in zip(cpu, device):
        assert (a["video"].int() - b["video"].int()).abs().max() <= 1


WAYS = [
    {"world_size": 2},
    {"world_size": 4, "micro_batch": 1},
    {"micro_batch": 4},
    {"prefetch": 2},
    {"decoder_cache": 4, "view_threads": 2, "decoder": "torchcodec"},
]


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_neither_ranks_nor_batches_nor_speed_change_what_a_step_sees(way, make):
    want = take(make(train=True), 4)
    world, micro = way.get("world_size", 1), way.get("micro_batch", 2)
    ranks = [make(**way, train=True, rank=r) for r in range(world)]
    found = []
    for _ in range(2):
        for loader in ranks:
            found += take(loader, 4 // world // micro)
    for name in ("sample_id", "video", "action"):
        whole = torch.cat([b[name] for b in want])
        assert torch.equal(torch.cat([b[name] for b in found]), whole), name
    assert [p for b in found for p in b["prompt"]] == [p for b in want for p in b["prompt"]]


def test_ranks_get_disjoint_samples_and_one_epoch_holds_all(make):
    loader = make(global_batch=4)
    size = len(loader.data)
    ids = np.concatenate([loader.ids_of_step(s) for s in range(size)])
    assert sorted(ids[:size]) == list(range(size))
    assert not np.array_equal(ids[:size], ids[size : 2 * size])
    other = make(seed=4)
    assert not np.array_equal(ids[:size], np.concatenate([other.ids_of_step(s) for s in range(9)]))


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("done", [2, 3])
def test_resume_is_no_interruption(done, prefetch, make):
    whole = take(make(), 6)
    first = make(prefetch=prefetch)
    take(first, done)
    again = make(prefetch=prefetch)
    again.load_state_dict(first.state_dict())
    assert_equal(take(again, 6 - done), whole[done:])
    assert_equal(take(make(start_step=2), 2), whole[4:])


def test_resume_on_another_number_of_ranks(make):
    whole = take(make(), 4)
    first = make()
    take(first, 2)
    for rank in range(2):
        again = make(rank=rank, world_size=2)
        again.load_state_dict(first.state_dict())
        assert_equal([next(again)], [whole[2 + rank]])


def test_a_state_of_another_order_is_refused(make):
    loader = make()
    take(loader, 2)
    state = loader.state_dict()
    for change, name in (({"seed": 4}, "seed 3"), ({"sampling": "union"}, r"sampling .'Steps'")):
        with pytest.raises(ConfigError, match=rf"was saved with {name}.*this run has"):
            make(**change).load_state_dict(state)
    take(loader, 1)
    with pytest.raises(ConfigError, match="micro_batch 2, this run has 1"):
        make(micro_batch=1).load_state_dict(loader.state_dict())


def test_loading_a_state_winds_a_running_loader_back(make):
    loader = make(prefetch=2)
    state, whole = loader.state_dict(), take(loader, 3)
    loader.load_state_dict(state)
    assert_equal(take(loader, 3), whole)


def test_waiting_is_counted_and_prefetch_removes_it(make):
    slow, fast = make(), make(prefetch=2)
    for loader in (slow, fast):
        next(loader)
        loader.wait_s = 0.0
        for _ in range(3):
            time.sleep(0.5)
            next(loader)
    assert 0 < fast.wait_s < slow.wait_s


def test_close_ends_the_thread_and_iterating_goes_on(make):
    before = threading.active_count()
    loader = make(prefetch=1)
    first = take(loader, 1)
    loader.close()
    assert threading.active_count() == before
    assert_equal(first + take(loader, 1), take(make(), 2))


def test_a_forgotten_loader_ends_its_thread(make, root):
    before = threading.active_count()
    config = DataConfig(root=str(root), embodiment="counted", decoder="pyav", prefetch=1)
    loader = Loader(config, global_batch=1, micro_batch=1, seed=0)
    next(loader)
    del loader
    gc.collect()
    assert threading.active_count() == before


@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_broken_file_is_named_with_the_sample(prefetch, make, tmp_path):
    folder = write_counted(tmp_path / "data", COUNTED, [20], tasks=TASKS)
    video = next(folder.rglob("*wrist*/*.mp4"))
    data = video.read_bytes()
    loader = make(root=str(folder), prefetch=prefetch)
    video.write_bytes(data[: len(data) * 6 // 10])
    for _ in range(2):  # the place stays, and the file stays broken
        with pytest.raises(VideoError, match=r"^sample \d+ \(step 0\): .*wrist/epi.*truncated"):
            next(loader)


def test_unions_are_decoded_once_for_several_batches(make, monkeypatch):
    calls = []
    own = WindowDataset._views
    monkeypatch.setattr(
        WindowDataset, "_views", lambda self, *args: calls.append(args) or own(self, *args)
    )
    loader = make(micro_batch=1, sampling=Unions(starts=4))
    batches = take(loader, 4)
    assert len(calls) == 1
    assert torch.cat([b["sample_id"] for b in batches]).tolist() == loader.ids_of_step(0).tolist()


def test_paraphrases_are_drawn_in_training_only(make):
    # the counted data set's second language column says task 1 throughout
    def prompts(train: bool) -> set:
        loader = make(train=train, augment="device", episodes=(0, 1))
        return {p for b in take(loader, 8) for p in b["prompt"]}

    assert len(prompts(train=True)) == 2
    assert len(prompts(train=False)) == 1


def test_episodes_hold_some_out(make, root):
    kept, out = make(episodes=(0, 2)), make(episodes=(2, 3))
    assert len(kept.data) + len(out.data) == len(make().data)
    assert out.data.index.locate(0)[0] == 2
    assert {kept.data.index.locate(i)[0] for i in range(len(kept.data))} == {0, 1}
    with pytest.raises(ConfigError, match=r"episodes \[2, 9\).*it has 3 episodes"):
        make(episodes=(2, 9))


def test_a_mixture_draws_by_weight(make, root):
    loader = make(mixture=(Source(root=str(root), embodiment="counted", weight=3.0),))
    half = len(loader.data) // 2
    ids = np.concatenate([loader.ids_of_step(s) for s in range(250)])
    assert (ids >= half).mean() == pytest.approx(0.75, abs=0.002)
    assert next(loader)["video"].shape[0] == 2


def test_a_mixture_of_two_grids_is_refused(make, root, monkeypatch):
    monkeypatch.setitem(EMBODIMENTS, "other", replace(COUNTED, view_hw=(16, 48)))
    with pytest.raises(DatasetError, match=r"one size of view.*16x48 side_by_side and 32x96"):
        make(mixture=(Source(root=str(root), embodiment="other"),))


def test_the_configuration_survives_json():
    config = DataConfig(
        root="x",
        mixture=(Source(root="y", embodiment="toy", weight=2.0),),
        sampling=Unions(starts=2),
        episodes=(1, 5),
    )
    assert from_dict(DataConfig, to_dict(config)) == config
    assert from_dict(DataConfig, to_dict(DataConfig())) == DataConfig()


REFUSED = [
    ({"decoder": "pyavv"}, "unknown decoder 'pyavv'.*did you mean 'pyav'"),
    ({"embodiment": "toi"}, "unknown embodiment 'toi'.*did you mean 'toy'"),
    ({"augment": "gpu"}, "unknown place of augmentation 'gpu': allowed are cpu, device"),
    ({"sampling": "steps"}, "unknown sampling strategy 'steps'.*did you mean 'step'"),
    ({"workers": -1}, "workers must be 0 or more, got -1"),
    ({"view_threads": 0}, "view_threads must be 1 or more, got 0"),
    ({"decoder": "torchcodec-cuda"}, "leaves its frames on the GPU: it takes workers=0"),
]


@pytest.mark.parametrize(("fields", "message"), REFUSED, ids=lambda x: str(x)[:30])
def test_what_a_configuration_refuses(fields, message):
    with pytest.raises(ConfigError, match=message):
        DataConfig(**fields)


def test_batches_that_do_not_divide_are_refused(make):
    with pytest.raises(ConfigError, match="global_batch 4 must be a multiple of 1 ranks times"):
        make(micro_batch=3)
    with pytest.raises(ConfigError, match="multiple of 3 ranks times micro_batch 1"):
        make(world_size=3, micro_batch=1)


def test_a_missing_data_set_is_named(make, tmp_path):
    with pytest.raises(DatasetError, match="nowhere: no such folder"):
        make(root=str(tmp_path / "nowhere"))


# ---- worker processes: they know the embodiments of EMBODIMENTS, and so not `counted`


def workers_of(process: psutil.Process) -> list[psutil.Process]:
    """The processes of the data loader; a fork server and Python's own trackers are none."""
    mine = []
    for child in process.children(recursive=True):
        with_parent = child.parent()
        if with_parent and "forkserver" in " ".join(with_parent.cmdline()):
            mine.append(child)
    return mine


@pytest.fixture(scope="module")
def toy(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("toy") / "data"
    return write_counted(folder, EMBODIMENTS["toy"], [99, 98])


def test_the_process_that_workers_fork_from_starts_on_call():
    code = (
        "from multiprocessing import forkserver;"
        "from wamlab.data.data_config import DataConfig, prepare_workers;"
        "server = forkserver._forkserver;"
        "prepare_workers(DataConfig()); print(server._forkserver_pid);"
        "prepare_workers(DataConfig(workers=2)); print(server._preload_modules);"
        "print(server._forkserver_pid > 0)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.splitlines() == ["None", "['wamlab.data.loader']", "True"]


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test_d9_workers_read_the_same_and_leave_nothing(toy):
    """D9: more workers than cores; one thread each, a bound on decoders, the same batches."""
    fields = {"root": str(toy), "decoder": "torchcodec", "augment": "device", "train": False}
    sizes = {"global_batch": 2, "micro_batch": 2, "seed": 1}
    plain = Loader(DataConfig(**fields), **sizes)
    config = DataConfig(**fields, workers=4, prefetch=1, decoder_cache=2)
    loader = Loader(config, **sizes)
    want, found = take(plain, 2), take(loader, 2)
    workers = workers_of(psutil.Process())
    assert len(workers) == 4
    assert all(w.num_threads() <= 8 for w in workers)
    assert_equal(found, want)
    loader.close()
    psutil.wait_procs(workers, timeout=10)
    assert not workers_of(psutil.Process())


def test_a_workers_error_names_file_and_sample(toy, tmp_path):
    folder = tmp_path / "data"
    write_counted(folder, EMBODIMENTS["toy"], [98])
    config = DataConfig(root=str(folder), workers=1, augment="device")
    loader = Loader(config, global_batch=1, micro_batch=1, seed=1)
    next(folder.rglob("*wrist*/*.mp4")).write_bytes(b"")
    with pytest.raises(VideoError, match=r"^sample \d \(step 0\): .*episode_000000.mp4: empty"):
        next(loader)
    loader.close()


INTERRUPTED = """
import sys
from wamlab.data.data_config import DataConfig
from wamlab.data.loader import Loader
if __name__ == "__main__":
    config = DataConfig(root=sys.argv[1], workers=2, prefetch=2, augment="device")
    for number, _ in enumerate(Loader(config, global_batch=1, micro_batch=1, seed=0)):
        print(number, flush=True)
"""


def test_ctrl_c_leaves_no_process(toy, tmp_path):
    script = tmp_path / "endless.py"
    script.write_text(INTERRUPTED)
    run = subprocess.Popen(
        [sys.executable, str(script), str(toy)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        # a suite that a shell runs in the background ignores SIGINT, and so would this process
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert run.stdout.readline() == "0\n"
    family = psutil.Process(run.pid).children(recursive=True)
    assert len(family) >= 3
    os.killpg(run.pid, signal.SIGINT)  # as the terminal does it
    _, errors = run.communicate(timeout=30)
    assert errors.count("Traceback") == 1
    assert "KeyboardInterrupt" in errors
    _, alive = psutil.wait_procs(family, timeout=10)
    assert not alive


def test_the_data_is_opened_with_a_bar_only_where_asked(root, capsys):
    open_data(DataConfig(root=str(root), embodiment="counted"))
    assert capsys.readouterr().err == ""
