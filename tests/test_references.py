"""What code, tests and settings refer to is in the repository."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDERS = ("fednas_flwr", "conf", "docker", "scripts", "tests")
WRITTEN = {"MODEL_CARD.md", "compare.md"}  # by runs
TEMPLATE = ".j2"


def test_every_document_that_is_named_is_there():
    files = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*") if path.is_file()]
    files += [path for path in ROOT.iterdir() if path.is_file()]
    names = {path.name.removesuffix(TEMPLATE) for path in files} | WRITTEN
    texts = [path for path in files if path.suffix in (".py", ".yaml", ".toml", ".sh", ".md")]
    missing = {
        (path.relative_to(ROOT).as_posix(), name)
        for path in texts
        for name in re.findall(r"\b[\w.-]+\.md\b", path.read_text(encoding="utf-8"))
        if name not in names
    }
    assert missing == set()
