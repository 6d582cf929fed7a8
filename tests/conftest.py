"""What every test may use."""

import shutil
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def shared_dir(*parts: str) -> Path | None:
    """Return a path in the optional folder of clips and goldens beside the repository, or None."""
    path = ROOT.parent.joinpath("shared", *parts)
    return path if path.exists() else None


# what torch says of any compiled network and of fp32 products on a GPU: no fault of the caller's
SAID_ON_GPUS = (
    "ignore:The .grad attribute of a Tensor that is not a leaf",
    "ignore:TensorFloat32 tensor cores for float32 matrix multiplication available",
    "ignore:Synchronization debug mode is a prototype feature",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("gpu"):
            for said in SAID_ON_GPUS:
                item.add_marker(pytest.mark.filterwarnings(said))


@pytest.fixture
def data_samples() -> Path:
    return ROOT / "data_samples"


@pytest.fixture
def copy(made, tmp_path):
    """Return what copies one of a module's data sets, `made`, without its converted columns."""

    def make(name: str = "v2.1") -> Path:
        shutil.copytree(made[name], tmp_path / name, ignore=shutil.ignore_patterns(".wamlab"))
        return tmp_path / name

    return make


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--goldens",
        action="append",
        default=[],
        help="a further folder of golden tensors (*.safetensors with a JSON sidecar each)",
    )
