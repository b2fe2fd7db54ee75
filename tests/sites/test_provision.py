"""What ``fednas provision`` writes, what ``fednas doctor`` says of it, which code a site runs."""

import io
import os
import re
import shutil
import ssl
import subprocess
import sys
import threading
import time
import zipfile
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
import yaml
from flwr.cli.build import build_fab_from_files
from hypothesis import assume, given
from hypothesis import strategies as st

from fednas_flwr.cli import main
from fednas_flwr.deploy.bundle import bundle_files, check_bundle
from fednas_flwr.deploy.sites import provision as provisioning
from fednas_flwr.deploy.sites.doctor import examine, read_settings
from fednas_flwr.deploy.sites.provision import Deployment, Server, issue_certificate, provision

from ..archives import zipped
from ..refusals import refuses

SITES = """
federation: heart
server: {addresses: [fl.example.org, 10.0.0.7], port: 8000}
sites: [north, south]
"""
TWO = Deployment("heart", Server(("fl.example.org", "10.0.0.7"), 8000), ("north", "south"))


@pytest.fixture
def folder(tmp_path):
    provision(TWO, tmp_path / "out")
    return tmp_path / "out"


# --- folders


@pytest.mark.parametrize("mask", [0, 0o077])
def test_modes_are_set_whatever_the_umask(tmp_path, mask):
    """Of new folders and, at the second time, of those that were open before."""
    (tmp_path / "sites.yaml").write_text(SITES)
    command = [sys.executable, "-m", "fednas_flwr", "provision", "sites.yaml"]
    for _ in range(2):
        subprocess.run([*command, "--output", "out"], cwd=tmp_path, umask=mask, check=True)
        folder = tmp_path / "out"
        modes = {str(p.relative_to(folder)): p.stat().st_mode & 0o777 for p in folder.rglob("*")}
        for name in ("ca", "server/state", "north/state", "south/state"):
            assert modes[name] == 0o700, name
        for path in (*folder.glob("*/policy.yaml"), *folder.glob("*/ca.crt")):
            path.chmod(0o666)
        for name, mode in modes.items():
            expected = {0o644} if "." in name else {0o755, 0o700}
            expected = {0o600} if name.endswith(".key") else expected
            expected = {0o755} if name.endswith(("start.sh", "operate")) else expected
            assert mode in expected, f"{name} has {mode:o}"


@pytest.mark.parametrize("mask", [0, 0o077])
def test_the_public_half_of_a_key_cannot_be_written_by_others(tmp_path, mask):
    """Who writes it before it is sent is known to the server in the site's place."""
    for kind in ([], ["--sum"]):
        path = tmp_path / f"state{len(kind)}" / "own.key"
        path.parent.mkdir()
        command = [sys.executable, "-m", "fednas_flwr", "key", *kind, str(path)]
        subprocess.run(command, umask=mask, check=True)
        modes = {p.suffix: p.stat().st_mode & 0o777 for p in path.parent.iterdir()}
        assert modes[".key"] == 0o600
        assert modes[".pub"] & 0o022 == 0


def test_no_folder_holds_a_secret_of_another(tmp_path):
    (tmp_path / "sites.yaml").write_text(SITES)
    output = tmp_path / "out"
    assert main(["provision", str(tmp_path / "sites.yaml"), "--output", str(output)]) == 0
    assert (output / "server" / "server.key").stat().st_mode & 0o777 == 0o600
    keys = {path.relative_to(output).as_posix(): path for path in output.rglob("*.key")}
    secrets = {name: path.read_bytes().splitlines()[1] for name, path in keys.items()}
    signing = {"ca/signing.key", "server/signing.key"}  # the operator keeps it for later
    assert set(secrets) == {"ca/ca.key", "server/server.key", *signing}
    assert len({path.read_bytes() for path in output.glob("*/signing.pub")}) == 1
    for path in output.glob("*/**/*"):
        if path.is_file():
            content, name = path.read_bytes(), path.relative_to(output).as_posix()
            assert (b"PRIVATE KEY" in content) == (name in secrets)
            for owner, secret in secrets.items():
                owners = signing if owner in signing else {owner}
                assert (secret in content) == (name in owners)


def test_provisioning_again_renews_the_certificate_and_keeps_authority_state_and_settings(folder):
    names = "ca/ca.key north/ca.crt server/signing.key server/state/x server/server.env "
    names += "north/site.env north/policy.yaml north/dataset.yaml"
    kept = [folder / name for name in names.split()]
    for edited in kept[3:]:
        edited.write_text("by the site's engineer")
    before = [path.read_bytes() for path in kept]
    certificate = (folder / "server" / "server.crt").read_bytes()
    more = Deployment("heart", Server(("fl.example.org",), 8000), ("north", "south", "east"))
    provision(more, folder)
    assert [path.read_bytes() for path in kept] == before
    assert (folder / "server" / "server.crt").read_bytes() != certificate
    assert (folder / "east" / "ca.crt").read_bytes() == before[1]
    settings = read_settings(folder / "east" / "site.env")
    assert (settings["PARTITION_ID"], settings["NUM_PARTITIONS"]) == ("2", "3")
    assert settings["SUPERLINK"] == "fl.example.org:8000"


def test_scripts_are_bash_and_can_be_executed(folder):
    scripts = [*folder.glob("*/*.sh"), *folder.glob("*/operate")]
    assert len(scripts) == 3 + 2 * 2 + 1
    for script in scripts:
        subprocess.run(["bash", "-n", str(script)], check=True)
        assert script.name in ("parts.sh", "common.sh") or script.stat().st_mode & 0o100


WRONG_LISTS = [
    ("port: 8000", "port: 80000", "server.port=80000 is out of range: expected 1 to 65535"),
    ("10.0.0.7", "10.0.0.7:80", "addresses=10.0.0.7:80 .* without port"),
    ("[north, south]", "[north, north]", "holds north more than once"),
    ("[north, south]", "[ca, south]", "sites=ca .* expected names of small letters"),
    ("[north, south]", "[../x]", "sites=../x is out of range"),
    ("[north, south]", "[]", r"sites=\[\] is out of range: expected 1 to"),
    ("federation:", "federatoin:", "nearest: federation"),
    ("federation: heart", "federation: ' '", "federation=  is out of range"),
    ("federation: heart", "federation: [", "is not valid YAML"),
]


@pytest.mark.parametrize(("old", "new", "words"), WRONG_LISTS)
def test_wrong_list_of_sites_is_one_sentence(tmp_path, old, new, words):
    path = tmp_path / "sites.yaml"
    path.write_text(SITES.replace(old, new))
    refuses(words, provisioning.load_sites, path)


# --- the code that a site runs


FILES = bundle_files()


@pytest.mark.filterwarnings("ignore:GitWildMatchPattern")  # within flwr
def test_own_bundle_passes_however_it_is_compressed():
    fab, _ = build_fab_from_files(FILES)
    check_bundle(fab)
    with zipfile.ZipFile(io.BytesIO(fab)) as archive:
        stored = zipped((name, archive.read(name)) for name in archive.namelist())
    assert stored != fab
    check_bundle(stored)


names = st.sampled_from([*FILES, "fednas_flwr/__init__.py", "x.py"])


@given(names, st.one_of(st.none(), st.binary()))
def test_a_bundle_with_other_files_is_refused(name, content):
    files = {**FILES, name: content}
    left = {name: content for name, content in files.items() if content is not None}
    assume(left != FILES)
    refuses("is refused: this site runs the fednas_flwr", check_bundle, zipped(left.items()))


@pytest.mark.filterwarnings("ignore:Duplicate name")
@pytest.mark.parametrize("first", [True, False])
def test_a_bundle_that_holds_two_files_of_one_name_is_refused(first):
    """Whichever of them is ours: readers differ in which one they take."""
    name, other = "hatch_build.py", b"import os"
    files = [*FILES.items()]
    files.insert(0 if first else len(files), (name, other))
    refuses("is refused", check_bundle, zipped(files))


@given(st.binary())
def test_what_is_no_bundle_is_refused(fab):
    refuses("is refused", check_bundle, fab)


def test_a_bundle_that_unpacks_to_gigabytes_is_refused_unread():
    bomb = zipped([("pyproject.toml", bytes(50_000_000))], zipfile.ZIP_DEFLATED)
    refuses("is refused", check_bundle, bomb)


# --- fednas doctor without a server; with one in test_identity


def broken(folder):
    return {finding.name: finding.text for finding in examine(folder) if finding.broken}


def test_doctor_finds_a_new_server_well(folder, prints):
    settings = folder / "server" / "server.env"
    settings.write_text(settings.read_text().replace("8000", "1"))  # where nothing listens
    words = "for fl.example.org, 10.0.0.7, localhost, 127.0.0.1, valid 36"
    assert words in prints("doctor", folder / "server")


def test_doctor_needs_to_write_into_the_state_only(folder, monkeypatch):
    """As in a container, where all else is mounted read-only."""
    writable = {folder / name / "state" for name in ("server", "north")}
    monkeypatch.setattr(os, "access", lambda path, mode: mode != os.W_OK or path in writable)
    assert "disk" not in broken(folder / "server").keys() | broken(folder / "north").keys()
    writable.clear()
    for name in ("server", "north"):
        assert f"{name}/state cannot be written" in broken(folder / name)["disk"]


def test_doctor_names_what_is_wrong_with_a_server(folder, capsys):
    server = folder / "server"
    (server / "server.key").chmod(0o644)
    (server / "server.env").write_text("HOST=0.0.0.0\nPORT=http\n")
    issue_certificate(folder / "ca", folder / "south", addresses=["x"], days=-3)
    shutil.copy(folder / "south" / "server.crt", server)
    assert main(["doctor", str(server)]) == 1
    assert broken(server).keys() == {"secrets", "certificate", "port"}
    assert "server.key does not belong to server.crt" in capsys.readouterr().out
    shutil.copy(folder / "south" / "server.key", server)
    words = "expired 3 days ago: make a new one by `fednas provision`"
    assert words in broken(server)["certificate"]
    provision(Deployment("other", Server(("x",), 1), ("north",)), folder / "else")
    shutil.copy(folder / "else" / "ca" / "ca.crt", server)
    assert "is not of the authority ca.crt" in broken(server)["certificate"]


def test_doctor_names_what_is_wrong_with_a_site(folder):
    site = folder / "north"
    settings = (site / "site.env").read_text().replace("fl.example.org:8000", "127.0.0.1:1")
    (site / "site.env").write_text(settings.replace("DEVICE=auto", "DEVICE=cpu"))
    found = broken(site)
    assert found.keys() == {"server", "clock", "key", "data", "records"}
    assert found["records"] == "see data"
    assert "127.0.0.1:1 cannot be reached" in found["server"]
    assert found["clock"] == "see server"
    assert "make it by `fednas key" in found["key"]
    assert "DATA_PATH is empty" in found["data"]
    (site / "site.env").write_text(settings.replace("DATA_PATH=", "DATA_PATH=/none"))
    assert "DATA_PATH=/none is not an absolute path" in broken(site)["data"]
    (site / "site.env").write_text(settings.replace("my-data", "ours"))
    assert "DATA_SET=ours is not in policy.yaml, which has my-data" in broken(site)["data"]
    (site / "policy.yaml").write_text("data_sets: {}\n")
    assert "data_sets={} is out of range: expected 1 to" in broken(site)["data"]
    (site / "state" / "ledger.key").write_text("x")
    assert "mark" in broken(site)["ledger"]


def site_with_table(folder, text, **dataset):
    """Return a site's folder whose data is a table of that text."""
    site = folder / "north"
    (folder / "ward.csv").write_text(text)
    path = f"DATA_PATH={folder / 'ward.csv'}"
    (site / "site.env").write_text(re.sub("DATA_PATH=.*", path, (site / "site.env").read_text()))
    given = {"name": "csv", "label": "ill", "class_names": ["no", "yes"], "id_column": None}
    given |= {"numeric": ["age"], "statistics": {"age": [50, 20]}}
    (site / "dataset.yaml").write_text(yaml.safe_dump(given | dataset))
    policy = (site / "policy.yaml").read_text()
    (site / "policy.yaml").write_text(policy.replace("records: 5000", "records: 100"))
    return site


def records_of(site):
    """Return what doctor says of a site's records."""
    (found,) = (f for f in examine(site) if f.name == "records")
    return f"BROKEN {found.text}" if found.broken else found.text


TABLE = "age,ill\n" + "".join(f"{30 + i % 40},{'yes' if i % 3 else 'no'}\n" for i in range(99))


def test_doctor_checks_a_sites_own_records(folder):
    found = records_of(site_with_table(folder, TABLE))
    assert found.startswith("99 records, ")
    assert " of them to train on; numbers: age" in found
    assert "label ill: no 33, yes 66" in found
    in_months = site_with_table(folder, TABLE, statistics={"age": [600, 240]})
    assert "numbers far from the usual ones, as in another unit" in records_of(in_months)
    policy = folder / "north" / "policy.yaml"
    policy.write_text(re.sub("delta: .*", "delta: 0.02", policy.read_text()))
    assert records_of(folder / "north").startswith("BROKEN privacy.delta=0.02 with 99 records of")


def test_doctor_tells_the_share_of_records_that_are_left_out(folder):
    found = records_of(site_with_table(folder, TABLE + "unknown,yes\n61,maybe\n1e39,\n"))
    assert found.startswith("99 records, ")
    assert (
        "3 of 102 records left out (2.9%), which cannot be read: "
        "age 2 (records 100, 102); ill 2 (records 101, 102)" in found
    )
    for content in (f"3e38,yes\n{TABLE[8:]}", TABLE[8:]):  # one record keeps no site from starting
        site = site_with_table(folder, "age,ill\n" + content, statistics={"age": [0, 1e-17]})
        assert "is beyond 1e+18 after normalisation" in records_of(site)
        assert not records_of(site).startswith("BROKEN")


WRONG_RECORDS = [
    (TABLE + '61,"yes\n', {}, "a quote in row 100 is open"),
    (TABLE + "61\n", {}, "row 100 has 1 cells, but the header 2"),
    (TABLE + "61,yes,no\n", {}, "row 100 has 3 cells, but the header 2"),
    ("age,ill\nold,yes\n", {}, r"no record that can be read; 1 of 1 records left out \(100.0%"),
    ("age,ill\n61,yes\nold,yes\n", {}, "none of the 1 records .* to train on; 1 of 2 records left"),
    (TABLE, {"label": "last"}, "must give dataset.label or labels"),
    (TABLE, {"corrupt": "refuse"}, "see data"),
    (TABLE.replace("age", "years"), {}, "age"),
    (TABLE, {"statistics": {}}, "dataset.statistics"),
    (TABLE * 1 + TABLE[8:] * 3, {}, "declares 100, and answers of more than 2 times as many"),
    (TABLE[:20], {}, "declares 100: more noise than need be|train part"),
    ("age,ill\n", {}, "."),
]


@pytest.mark.parametrize(("text", "dataset", "words"), WRONG_RECORDS)
def test_doctor_says_what_a_run_would_find_wrong_with_the_records(folder, text, dataset, words):
    found = records_of(site_with_table(folder, text, **dataset))
    assert re.search(words, found)
    assert found.startswith("BROKEN") or "more noise" in words


CLOCKS = [
    *((seconds, None) for seconds in (0, -3, 200)),
    (-20, r"1?\d s ahead of the server's|20 s ahead"),
    (900, r"(8\d\d|900) s behind the server's"),
]


@pytest.mark.parametrize(("server_is_ahead_s", "said"), CLOCKS)
def test_doctor_compares_clocks_with_flowers_limits(folder, server_is_ahead_s, said):
    class Health(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.end_headers()

        def date_time_string(self, timestamp=None):
            return super().date_time_string(time.time() + server_is_ahead_s)

        def log_message(self, *_):
            pass

    issue_certificate(folder / "ca", folder / "server", addresses=["127.0.0.1"], days=1)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "server" / "server.crt", folder / "server" / "server.key")
    with HTTPServer(("127.0.0.1", 0), Health) as server:
        server.socket = context.wrap_socket(server.socket, server_side=True)
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            settings = (folder / "north" / "site.env").read_text()
            settings = settings.replace("fl.example.org:8000", f"127.0.0.1:{server.server_port}")
            (folder / "north" / "site.env").write_text(settings)
            found = broken(folder / "north")
        finally:
            server.shutdown()
            thread.join()
    assert "server" not in found
    assert ("clock" in found) == (said is not None)
    assert re.search(said or "", found.get("clock", ""))


KEYS = [
    ([], provisioning.make_node_key, "own.key.pub to the server's operator", "the server"),
    (["--sum"], provisioning.make_sum_key, "own.pub to whoever provisions", "other sites"),
]


@pytest.mark.parametrize(("kind", "make", "sent", "known"), KEYS)
def test_a_sites_keys_are_made_once(tmp_path, prints, kind, make, sent, known):
    key = tmp_path / "own.key"
    assert sent in prints("key", *kind, key)
    content = key.read_bytes()
    (public,) = tmp_path.glob("*.pub")
    assert content.splitlines()[len(content.splitlines()) // 2][:64] not in public.read_bytes()
    assert f"exists: {known} may know the site by it" in prints("key", *kind, key, code=2)
    assert (key.read_bytes(), key.stat().st_mode & 0o777) == (content, 0o600)
    refuses("", make, key, error=FileExistsError)
    refuses("give a folder of `fednas provision`", examine, tmp_path)
