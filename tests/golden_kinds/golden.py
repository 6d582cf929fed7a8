"""One golden: a file of tensors, its JSON sidecar, and how far a result may lie from it."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor


@dataclasses.dataclass(frozen=True)
class Golden:
    """`path` is the *.safetensors file; `folders` are the places of files it may refer to."""

    path: Path
    folders: tuple[Path, ...]

    @property
    def name(self) -> str:
        return self.path.stem

    @property
    def sidecar(self) -> dict[str, Any]:
        return json.loads(self.path.with_suffix(".json").read_text())

    def tensors(self, prefix: str = "") -> dict[str, Tensor]:
        """Return the tensors whose name starts with `prefix`, under the rest of their name."""
        with safe_open(self.path, "pt") as file:
            return {
                key.removeprefix(prefix): file.get_tensor(key)
                for key in file.keys()  # noqa: SIM118 (safe_open is no mapping)
                if key.startswith(prefix)
            }

    def sibling(self, name: str) -> "Golden":
        """Return another golden by name, of the same folder first, else of any known folder."""
        for folder in (self.path.parent, *self.folders):
            path = folder / f"{name}.safetensors"
            if path.is_file():
                return Golden(path, self.folders)
        raise FileNotFoundError(f"{self.path.name} refers to {name}.safetensors, which is nowhere")


def relative_l2(got: Tensor, want: Tensor, floor: float = 1e-30) -> float:
    """Return |got - want| / max(|want|, floor) in double precision."""
    got, want = got.detach().cpu().double(), want.cpu().double()
    assert got.shape == want.shape, f"shape {tuple(got.shape)}, expected {tuple(want.shape)}"
    return float(torch.linalg.norm(got - want)) / max(float(torch.linalg.norm(want)), floor)


def assert_close(got: Tensor, want: Tensor, tolerance: float, what: str) -> None:
    """Assert a relative L2 distance, naming the tensor."""
    error = relative_l2(got, want)
    assert error <= tolerance, f"{what}: relative L2 {error:.2e}, allowed {tolerance:.0e}"


def assert_gradients_close(
    got: dict[str, Tensor | None], want: dict[str, Tensor], tolerance: float = 1e-4
) -> None:
    """Assert every gradient; the denominator is at least 1e-3 of the largest gradient norm."""
    floor = 1e-3 * max(float(torch.linalg.norm(g.double())) for g in want.values())
    errors = {
        name: 1.0 if got.get(name) is None else relative_l2(got[name], w, floor)
        for name, w in want.items()
    }
    worst = max(errors, key=errors.get)
    assert errors[worst] <= tolerance, (
        f"gradient of {worst}: relative L2 {errors[worst]:.2e}, allowed {tolerance:.0e}"
    )


def smallest_of_kind(golden: Golden) -> bool:
    """Whether no known golden of its kind is smaller."""
    files = {path.stem: path for folder in golden.folders for path in folder.glob("*.safetensors")}
    same = [path for path in files.values() if _kind(path) == _kind(golden.path)]
    return golden.name == min(same, key=lambda path: (path.stat().st_size, path.name)).stem


def _kind(path: Path) -> str | None:
    return json.loads(path.with_suffix(".json").read_text()).get("kind")
