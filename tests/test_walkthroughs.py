"""Every block of the walk-throughs runs, in order, as it stands on the page."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from fednas_flwr.base.processes import ALONE
from fednas_flwr.deploy.sites.doctor import is_open

PAGES = Path(__file__).parent.parent / "scripts" / "walkthroughs"
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
PORTS = ("8000", "9094")  # as the page has them; of the second kind three in a row


class Walk:
    """What a page's blocks have written and printed.

    Attributes:
        folder: Where they ran.
        printed: By all of them.
        env: Their environment: each run stays in one process, as other cores have other tests.
    """

    def __init__(self, folder):
        self.folder, self.printed, self._shells = folder, "", []
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        self.env = os.environ | {"PATH": path, ALONE: "1"}

    def through(self, page, **replaced):
        """Write and run the blocks of a page."""
        text = (PAGES / page).read_text(encoding="utf-8")
        for old, new in replaced.items():
            text = text.replace(old.strip("_"), new)
        blocks = BLOCK.findall(text)
        assert len(blocks) == text.count("```") / 2 > 2
        for language, block in blocks:
            if name := re.match(r"# file: ([\w.]+)\n", block):
                (self.folder / name[1]).write_text(block)
            else:
                assert language == "bash", block
                self._run(block)

    def _run(self, commands):
        output = self.folder / "printed.txt"  # a pipe would wait for what goes on in the background
        with output.open("w") as file:
            own = {"cwd": self.folder, "env": self.env}
            own |= {"stdout": file, "stderr": subprocess.STDOUT, "start_new_session": True}
            shell = subprocess.Popen(["bash", "-euo", "pipefail", "-c", commands], **own)
            self._shells.append(shell.pid)
            code = shell.wait()
        printed = output.read_text()
        assert code == 0, f"{commands}\n{printed}"
        self.printed += printed

    def end(self):
        """End what runs in the background."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            for group in self._shells:
                with suppress(ProcessLookupError):
                    os.killpg(group, number)


@pytest.fixture
def walk(tmp_path):
    """Blocks run in a folder of their own, and end with the test."""
    own = Walk(tmp_path)
    yield own
    own.end()


def free_port(count=1):
    """Return the first of some ports in a row that nobody listens on."""
    while True:
        with socket.socket() as first:
            first.bind(("127.0.0.1", 0))
            port = first.getsockname()[1]
        if port + count < 2**16 and not any(is_open(port + i) for i in range(count)):
            return port


def test_every_page_has_a_test():
    pages = {page.name for page in PAGES.glob("*.md")}
    assert len(pages) == 10
    text = Path(__file__).read_text()
    assert all(f'through("{page}"' in text for page in pages - {*PRINTED})


PRINTED = {  # by the pages of developers, data scientists and those who know Flower
    "add_an_algorithm.md": (
        *(r"accuracy 0\.\d\d", "algorithm.rest=-1 is out of range: expected 0 to 1000"),
    ),
    "add_an_op.md": (
        *(r"labels \['\d', '\d', '\d'\]", r"turns \[2, 8, 5, 5\] into \[2, 8, 1, 1\] at stride 1"),
    ),
    "add_a_loss.md": ("2 of 2 jobs completed", r"refused\n\Z"),
    "add_a_network.md": ("2 of 2 jobs completed",),
    "add_a_metric.md": (r"Brier 0\.\d*[1-9]",),
    "from_a_dataframe.md": (r"0 +found +0\.9", "alike True"),
    "for_flower_users.md": ("Flower's strategies train one model and know no search",),
}


@pytest.mark.run
@pytest.mark.parametrize("page", PRINTED)
def test_what_a_page_shows_is_printed(page, walk):
    if page == "add_an_op.md":  # an op is computed by the processes of all cores, too
        del walk.env[ALONE]
    walk.through(page)
    assert all(re.search(words, walk.printed) for words in PRINTED[page]), walk.printed


@pytest.mark.slow
def test_an_engineer_needs_a_network_for_a_phone(walk):
    walk.through("fit_a_phone.md")
    fronts = re.findall(r"^(?:found|front_\d) [\d.]+ (\d+) ([\d.]+)$", walk.printed, re.MULTILINE)
    assert len(fronts) == 5
    assert all(0 < float(latency) < 100 for _, latency in fronts)


@pytest.mark.slow
def test_a_researcher_compares_algorithms(walk):
    walk.through("compare_algorithms.md")
    assert len(json.loads((walk.folder / "comparison" / "compare.json").read_text())) >= 3
    assert "random_search" in walk.printed
    assert "resnet8" in walk.printed


@pytest.mark.slow
def test_hospitals_find_a_model(walk):
    ports = dict(zip(PORTS, (str(free_port()), str(free_port(3))), strict=True))
    walk.through("find_a_model_together.md", **{f"_{old}_": new for old, new in ports.items()})
    assert "per person, add/remove" in (walk.folder / "run" / "MODEL_CARD.md").read_text()
    lines = (walk.folder / "predictions.csv").read_text().splitlines()
    assert len(lines) == 191  # with the head, as records at north
    for site in ("north", "south", "east"):
        (test,) = (walk.folder / "deployment" / site / "state" / "models").glob("*/test.json")
        assert json.loads(test.read_text())["accuracy"] > 0.5


@pytest.mark.slow
def test_the_notebook_runs(tmp_path):
    nbclient = pytest.importorskip("nbclient", reason="needs the extra `notebook`")
    nbformat = pytest.importorskip("nbformat", reason="needs the extra `notebook`")
    notebook = nbformat.read(PAGES.parent / "walkthrough.ipynb", as_version=4)
    resources = {"metadata": {"path": str(tmp_path)}}
    nbclient.NotebookClient(notebook, timeout=None, resources=resources).execute()
    outputs = [cell.outputs for cell in notebook.cells if cell.get("outputs")]
    (table,) = [
        text for (*_, last) in outputs if "label" in (text := last["data"].get("text/plain", ""))
    ]
    found = re.findall(r"^\d+ +\d+ +(\d)", table, re.MULTILINE)
    right = sum(str(i) == label for i, label in enumerate(found))
    assert len(found) == 10
    assert right >= 8
