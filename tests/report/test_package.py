"""What is installed: a wheel has all files that the package reads, for a bundle as well."""

import io
import zipfile
from pathlib import Path

import pytest
from flwr.cli.build import build_fab_from_files

from fednas_flwr.deploy.bundle import bundle_files

from ..processes import told

pytestmark = pytest.mark.run
ROOT = Path(__file__).parents[2]
TEMPLATES = ["report.html.j2", "card.md.j2", "compare.html.j2", "sentences.j2"]
VERBATIM = ["style.css", "script.js", "figures.js"]  # stand in the page as they are
FROM_A_BUNDLE = """
import sys
from pathlib import Path
from flwr.supercore.object_ref import load_app
app = load_app("fednas_flwr.deploy.server_app:app", ImportError, sys.argv[2])
import fednas_flwr
from fednas_flwr.report.html_report import write_report

print(fednas_flwr.__file__, write_report(Path(sys.argv[1])), sep="\\n")
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """A folder with what a wheel of this tree installs."""
    folder = tmp_path_factory.mktemp("wheel")
    told("-m", "hatchling", "build", "-t", "wheel", "-d", folder, cwd=ROOT)
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / "site")
    return folder / "site"


def test_a_wheel_has_every_file_of_the_package_and_of_conf(installed):
    for folder, place in ((ROOT / "fednas_flwr", ""), (ROOT / "conf", "conf")):
        files = [p for p in folder.rglob("*") if p.is_file() and "__pycache__" not in p.parts]
        wheel = installed / "fednas_flwr" / place
        assert files
        assert [p for p in files if not (wheel / p.relative_to(folder)).is_file()] == []
    page = installed / "fednas_flwr" / "report" / "page"
    assert all((page / name).is_file() for name in TEMPLATES + VERBATIM)


@pytest.mark.filterwarnings("ignore:GitWildMatchPattern")  # within flwr
def test_what_runs_from_a_bundle_finds_the_page_of_the_package(installed, make_run, tmp_path):
    fab, _ = build_fab_from_files(bundle_files())
    with zipfile.ZipFile(io.BytesIO(fab)) as archive:
        archive.extractall(tmp_path / "bundle")
    run = make_run("run")
    own = {"PYTHONPATH": str(installed)}
    printed = told("-P", "-c", FROM_A_BUNDLE, run, tmp_path / "bundle", cwd=tmp_path, env=own)
    package, report = printed.split()
    assert Path(package).is_relative_to(installed)
    html = Path(report).read_text(encoding="utf-8")
    page = installed / "fednas_flwr" / "report" / "page"
    for name in VERBATIM:
        assert (page / name).read_text(encoding="utf-8") in html


def test_an_installed_wheel_runs_provisions_and_reports(installed, tmp_path):
    """The quickstart of one round, without the checkout."""
    sites = tmp_path / "sites.yaml"
    sites.write_text((ROOT / "docker" / "sites.yaml").read_text())
    brief = ["rounds=1", "retrain.rounds=1", "dataset.limit_train=200", "run_dir=run"]
    commands = {"run": brief, "report": ["run"], "provision": [str(sites), "--output", "machines"]}
    for command, arguments in commands.items():
        own = {"PYTHONPATH": str(installed), "OMP_NUM_THREADS": "1"}
        told("-P", "-m", "fednas_flwr", command, *arguments, cwd=tmp_path, env=own)
    assert (tmp_path / "run" / "model.onnx").is_file()
    assert "<html" in (tmp_path / "run" / "report.html").read_text(encoding="utf-8")
    assert (tmp_path / "machines" / "north" / "start.sh").is_file()
