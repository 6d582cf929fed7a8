"""The import law of the house, read from the syntax tree."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "wamlab"
LEVEL = {"model": 1, "data": 1, "motion": 1, "train": 2, "evaluate": 2, "jupyter": 3, "cli": 4}
DISPLAY = {"matplotlib", "IPython", "ipywidgets"}
# inside a package a module imports only those that stand before it
ORDER = {
    "": "config draws hardware measure dist ffmpeg trace memory_timeline profiler",
    "model": "stored reference fused kernels_triton attention plan init dit flow_matching flops "
    "frozen vae_blocks vae vae_still text prompt_cache image latent_cache wam "
    "bench_encode weights lora sampling",
    "data": "normalize embodiment codec container matroska bitstream frame_times decoder video "
    "meta_files metadata columns lerobot lerobot_write cache windows sampler augment eviction "
    "loader check_tables check_meta check_video check transcode toy_arm toy_render toy_env "
    "toy_play corpus toy bench_decode bench_workers",
    "motion": "skeleton bvh segments streams features dynamics augment synthetic windows "
    "model claims",
    "train": "optim optimizations topology communication compression wire wait memory checkpoint "
    "metrics config trainer profile motion_loader motion bench_motion deepspeed",
    "evaluate": "wire worlds policy closed_loop toy_corpus load open_loop film server libero_loop",
}
FILES = sorted(PACKAGE.rglob("*.py"))


def package_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE).parts
    return parts[0] if len(parts) > 1 else ""


def level_of(path: Path) -> int:
    if path.name == "__main__.py":
        return 4
    return LEVEL.get(package_of(path), 0)


def imports(path: Path) -> list[str]:
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            found.append(node.module)
            found += [f"{node.module}.{alias.name}" for alias in node.names]
    return found


def module_file(name: str) -> Path | None:
    path = ROOT.joinpath(*name.split("."))
    return path.with_suffix(".py") if path.with_suffix(".py").is_file() else None


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_a_module_imports_only_lower_levels(path):
    for name in imports(path):
        target = module_file(name) if name.startswith("wamlab.") else None
        if target is None:
            continue
        here, there = package_of(path), package_of(target)
        if here == there:
            order = ORDER.get(here, "").split()
            if path.stem in order and target.stem in order:
                assert order.index(target.stem) < order.index(path.stem), f"{path} imports {name}"
        else:
            assert level_of(target) < level_of(path), f"{path} imports {name}"


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_display_packages_live_in_jupyter_alone(path):
    if package_of(path) == "jupyter":
        return
    found = DISPLAY & {name.split(".")[0] for name in imports(path)}
    assert not found, f"{path} imports {found}: drawing belongs in wamlab/jupyter/"


def test_packages_hold_no_code():
    for path in PACKAGE.rglob("__init__.py"):
        kinds = {type(node) for node in ast.parse(path.read_text()).body}
        assert kinds <= {ast.Expr, ast.ImportFrom}, f"{path} holds code"


def test_no_file_is_over_400_lines():
    lines = {str(p.relative_to(ROOT)): len(p.read_text().splitlines()) for p in FILES}
    assert not {name: n for name, n in lines.items() if n > 400}


def test_no_function_is_over_60_lines():
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                body = node.body[1:] if ast.get_docstring(node) else node.body
                length = node.end_lineno - body[0].lineno + 1 if body else 0
                assert length <= 60, f"{path}: {node.name} is {length} lines long"
