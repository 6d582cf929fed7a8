"""README keeps its word: its tree shows every file, its run.json trains."""

import json
import re
from pathlib import Path

import pytest

from wamlab.__main__ import COMMANDS
from wamlab.config import from_dict
from wamlab.train.config import TrainConfig

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def tree() -> list[tuple[str, str]]:
    """Return (path or glob, what README says of it) of each line of the file tree."""
    block = re.search(r"## The house\n\n```\n(.*?)```", README, re.DOTALL)[1]
    folders: dict[int, str] = {}
    entries = []
    for line in block.splitlines():
        indent = len(line) - len(line.lstrip())
        name, _, text = line.strip().partition(" ")
        folder = "".join(path for depth, path in folders.items() if depth < indent)
        if name.endswith("/"):
            folders = {d: p for d, p in folders.items() if d < indent} | {indent: name}
        entries.append((folder + name, text.strip()))
    return entries


def test_the_tree_shows_every_file_once():
    shown = [p for name, _ in tree() if not name.endswith("/") for p in ROOT.glob(name)]
    files = {p for p in (ROOT / "wamlab").rglob("*.py") if p.name != "__init__.py"}
    assert not files - set(shown), "README's tree lacks files"
    twice = {p.name for p in shown if shown.count(p) > 1 and p.name != "__init__.py"}
    assert not twice, f"README's tree shows files twice: {twice}"


@pytest.mark.parametrize(("name", "text"), tree())
def test_a_line_of_the_tree_names_something_and_ends_as_a_phrase(name, text):
    assert list(ROOT.glob(name.rstrip("/"))), f"{name}: no such file"
    assert text or name.endswith("/"), f"{name}: no words"
    assert not re.search(r"([,:;(]|\b(and|from|of|the|a|with|or))$", text), f"{name}: cut: {text}"


def test_run_json_is_a_run_and_the_data_set_is_there():
    block = re.search(r"```json\n(\{.*?\})\n```", README, re.DOTALL)[1]
    config = from_dict(TrainConfig, json.loads(block))
    assert (ROOT / config.data.root).is_dir()


def test_every_command_is_named():
    assert not [name for name in COMMANDS if not re.search(rf"\bwamlab {name}\b|`{name}`", README)]


def test_every_record_file_says_how_to_make_it_again():
    folder = ROOT / "notebooks" / "measurements"
    text = (folder / "README.md").read_text(encoding="utf-8")
    assert [p.name for p in sorted(folder.glob("*.jsonl")) if f"`{p.name}`" not in text] == []
    commands = re.findall(r"`wamlab (\w+)", text)
    assert commands
    assert set(commands) <= set(COMMANDS)
