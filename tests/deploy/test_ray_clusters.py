"""A Ray that is silent or too small, or an unknown SuperLink, is refused before a run begins."""

import os
import socket

import pytest

from fednas_flwr import api
from fednas_flwr.deploy.grids import check_cluster

from ..refusals import refuses


@pytest.mark.parametrize("kind", [pytest.param("silent", marks=pytest.mark.slow), "closed"])
def test_a_cluster_that_does_not_answer_is_refused(compose_config, kind):
    """A host that takes connections and says nothing, or a port where nobody listens."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        if kind == "closed":
            server.close()
        config = compose_config("runtime=ray", f"runtime.ray_address='{address}'")
        refuses(f"^runtime.ray_address={address}: no Ray cluster answer", api.check, config)


@pytest.mark.parametrize("address", ["nowhere", "127.0.0.1:port", "127.0.0.1:99999999"])
def test_what_is_no_address_is_refused(compose_config, address):
    config = compose_config("runtime=ray", f"runtime.ray_address='{address}'")
    refuses(f"^runtime.ray_address={address}: ", check_cluster, config)


@pytest.mark.parametrize("kind", ["client_cpus", "client_gpus"])
def test_clients_that_fit_on_no_machine_are_refused(compose_config, kind):
    config = compose_config("runtime=ray", f"runtime.{kind}=5000")
    refuses(rf"runtime.{kind}=5000.*there are {os.cpu_count()} CPUs", check_cluster, config)
    check_cluster(compose_config("runtime=inline"))
    check_cluster(compose_config("runtime=ray"))


SUPERLINKS = [
    (None, "local", "local, supergrid"),  # as Flower writes it then
    ('[superlink]\ndefault = "a"\n[superlink.a]\naddress = "x"', "a", "a"),
]


@pytest.mark.parametrize(("text", "good", "known"), SUPERLINKS)
def test_an_unknown_superlink_is_refused(compose_config, tmp_path, monkeypatch, text, good, known):
    monkeypatch.setenv("FLWR_HOME", str(tmp_path))
    if text is not None:
        (tmp_path / "config.toml").write_text(text)
    api.check(compose_config("runtime=deployment", f"runtime.superlink={good}"))
    for wrong in ("nothing", "default"):
        own = (f"runtime.superlink={wrong}", f"run_dir={tmp_path / 'run'}")
        assert refuses("", api.run, compose_config("runtime=deployment", *own)) == (
            f"runtime.superlink={wrong} is unknown: choose one of {known}, or add "
            f"[superlink.{wrong}] with its address to {tmp_path / 'config.toml'}."
        )
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("text", ["=", "superlink = 3", "", "\x00"])
def test_a_broken_configuration_of_flower_is_named(compose_config, tmp_path, monkeypatch, text):
    monkeypatch.setenv("FLWR_HOME", str(tmp_path))
    (tmp_path / "config.toml").write_text(text)
    config = compose_config("runtime=deployment", "runtime.superlink=a")
    refuses(f"^runtime.superlink=a: {tmp_path / 'config.toml'} has", check_cluster, config)
