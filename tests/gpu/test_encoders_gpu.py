"""The encoders on a GPU: bf16 near fp32, every fast way near the plain one, one CUDA graph."""

import dataclasses

import pytest
import torch

from wamlab.draws import Draws
from wamlab.model.bench_encode import EncodeCase, ladder, measure_encode
from wamlab.model.image import ImageEncoder
from wamlab.model.text import TextEncoder
from wamlab.model.vae import load_vae
from wamlab.model.vae_still import StillEncoder
from wamlab.model.wam import WAMConfig, WorldActionModel, first_frame_alone
from wamlab.train.train_vae import Learner, Shape, VAETrainConfig

pytestmark = pytest.mark.gpu
BASE = EncodeCase(
    vae="wan2.2", batch=2, frames=9, hw=(64, 96), precision="bf16", device="cuda", repeats=2
)


def cases() -> list:
    """Every row of the ladder for one size, a few for the others: a compilation takes a minute."""
    rows = ladder(BASE, conditioning=True)
    few = ("official", "channels_last", "chunks of 16, channels_last, cuda graph")
    chosen = [("wan2.2", case) for case in rows]
    chosen += [(vae, case) for vae in ("wan2.1", "tiny") for case in rows if case.name in few]
    return [pytest.param(vae, case, id=f"{vae}-{case.name}") for vae, case in chosen]


@pytest.mark.parametrize(("vae", "case"), cases())
def test_every_way_stays_near_the_public_fp32_latents(vae, case):
    record = measure_encode(dataclasses.replace(case, vae=vae))
    assert record.reason is None
    assert record.extra["latents_rel_diff"] < 0.03


@pytest.mark.parametrize("vae", ["wan2.2", "wan2.1"])
@torch.no_grad()
def test_whole_clip_chunks_and_layouts_agree_in_fp32(vae, monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    model = load_vae(vae, device="cuda")
    clip = torch.rand(2, 3, 9, 64, 96, device="cuda") * 2 - 1
    whole = model.encode(clip)
    scale = whole.abs().max()
    torch.testing.assert_close(model.encode(clip, 4) / scale, whole / scale, atol=1e-4, rtol=0)
    still = StillEncoder(model).encode(clip[:, :, :1], 9)
    want = model.encode(first_frame_alone(clip))
    torch.testing.assert_close(still / scale, want / scale, atol=1e-4, rtol=0)
    video = model.decode(whole)
    torch.testing.assert_close(model.decode(whole, 4), video, atol=1e-3, rtol=0)
    model.channels_last()
    torch.testing.assert_close(model.encode(clip) / scale, whole / scale, atol=1e-4, rtol=0)


def test_the_captured_training_step_of_the_vae_learns(monkeypatch):
    config = VAETrainConfig(datasets=("none",), latent_noise=0.0, device="cuda")
    vae = load_vae("tiny", device="cuda").requires_grad_(True).train()
    vae.channels_last()
    vae.compile_norms()
    monkeypatch.setattr(torch._dynamo.config, "recompile_limit", 64)
    learner = Learner(vae, config, torch.device("cuda"))
    clips = torch.zeros(2, 9, 48, 64, 3, dtype=torch.uint8, device="cuda")
    clips[:, :, 10:30, 20:50, 0] = 230
    kinds = (Shape(9, (32, 64), 0.5), Shape(5, (48, 64), 0.5))
    losses = {kind: [] for kind in kinds}
    for _ in range(30):
        for kind in kinds:
            losses[kind].append(float(learner.step(clips[:, : kind.frames], kind, 2e-3)))
    for kind in kinds:
        assert losses[kind][-1] < 0.5 * losses[kind][0]
        assert losses[kind][-1] != losses[kind][-2]  # a replay goes on from the last one


def test_text_and_image_are_near_their_cpu_twins():
    prompts = ["lift the cup", "put the ball on the red plate"]
    want, length = TextEncoder("tiny").encode(prompts)
    twin = TextEncoder("tiny")
    twin.network.to("cuda")
    got, same = twin.encode(prompts)
    assert got.device.type == "cuda"
    assert torch.equal(length, same)
    torch.testing.assert_close(got.cpu(), want, atol=2e-3, rtol=2**-6)
    image = torch.rand(2, 3, 64, 128) * 2 - 1
    encoder = ImageEncoder("tiny")
    features = encoder(image)
    near = encoder.to("cuda")(image.to("cuda")).cpu()
    torch.testing.assert_close(near, features, atol=2e-3, rtol=1e-3)


def test_the_models_loss_is_the_cpu_loss_and_encoders_compute_in_bf16_here():
    config = WAMConfig(layers=1, target_hw=(32, 64))
    with torch.device("cuda"):
        assert next(WorldActionModel(config).vae.parameters()).dtype == torch.bfloat16
    model = WorldActionModel(config)
    g = torch.Generator().manual_seed(0)
    batch = {
        "video": torch.randint(0, 256, (2, 9, 40, 72, 3), dtype=torch.uint8, generator=g),
        "prompt": ["lift the cup", "a"],
        "state": torch.randn(2, 1, 64, generator=g),
        "action": torch.rand(2, 24, 32, generator=g) * 2 - 1,
        "action_mask": torch.ones(2, 24, 32, dtype=torch.bool),
        "has_real_action": torch.ones(2, dtype=torch.bool),
        "sample_id": torch.arange(2),
    }
    want = model.loss(batch, Draws(0, 0, batch["sample_id"]))
    model = model.to("cuda")
    moved = {k: v.to("cuda") if torch.is_tensor(v) else v for k, v in batch.items()}
    for options in ((), ("batched_encoders", "skip_unused_y", "prompt_cache")):
        for name in options:
            model.set_option(name, True)
        got = model.loss(moved, Draws(0, 0, moved["sample_id"]))
        for name, value in got.items():
            torch.testing.assert_close(value.cpu(), want[name], atol=2e-3, rtol=2e-3)


def test_an_encoded_batch_needs_no_host_copy_and_can_be_captured():
    with torch.device("cuda"):
        model = WorldActionModel(WAMConfig(layers=1, target_hw=(32, 64)))
    for name in ("batched_encoders", "skip_unused_y"):
        model.set_option(name, True)
    video = torch.randint(0, 256, (2, 9, 40, 72, 3), dtype=torch.uint8, device="cuda")
    with torch.no_grad():
        want = model.encode_video(video)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            model.encode_video(video)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            got = model.encode_video(video)
    graph.replay()
    torch.testing.assert_close(got, want, atol=2e-2, rtol=2e-2)
