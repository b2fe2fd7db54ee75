"""A model that sites have trained takes raw data, and is as good on it as was reported."""

import json
import math
from types import SimpleNamespace

import pytest
import yaml

from fednas_flwr import load
from fednas_flwr.deploy.sites.provision import Deployment, Server
from fednas_flwr.privacy.books.ledger import Ledger
from fednas_flwr.runs.events import read_events

from ..data_sets import digit_files, save_pixels
from ..finished_runs import Told
from ..patients import patients

pytestmark = pytest.mark.slow

SITES = ("north", "south", "east")
OWNERS = (*SITES, "test")
NETWORK = ("algorithm=fedavg", "algorithm.network=linear", "stages=[retrain,evaluate,export]")
NETWORK += ("retrain.rounds=4", "retrain.weights.lr=0.05", "trackers=[]")
NAMES = [f"digit{digit}" for digit in range(10)]


def image_folder(folder):
    """Digits as files of two sizes, some in colours."""
    files = {owner: folder / owner for owner in OWNERS}
    for i, (image, label) in enumerate(digit_files()):
        save_pixels(image, files[OWNERS[i // 2 % 4]] / NAMES[label] / f"{i}.png")
    own = {"class_names": NAMES, "image_size": 8, "channels": 1}
    plain = ("dataset.crop_padding=0", "dataset.flip=false", "dataset.cutout=0")
    dataset = {"name": "image_folder", **own}
    return SimpleNamespace(files=files, dataset=dataset, overrides=(*NETWORK, *plain))


def csv(folder):
    """A table with decimal commas, missing cells, texts and dates, and its public numbers."""
    table, files = patients(), {owner: folder / f"{owner}.csv" for owner in OWNERS}
    for place, file in enumerate(files.values()):
        table[place::4].to_csv(file, sep=";", index=False)
    own = {"label": "outcome", "id_column": None, "class_names": ["died", "left"]}
    own |= {"numeric": ["age"], "dates": ["seen"], "categorical": ["ward"], "decimal": "comma"}
    own |= {"categories": {"ward": ["north", "south", "west"]}, "missing": "indicator"}
    own |= {"statistics": {"age": [60, 12], "seen": [19300, 200]}}  # days since 1970
    size = ("search_space=mlp_small", "search_space.channels=16", "retrain.channels=16")
    overrides = ("algorithm=fed_darts", *size, "rounds=1", "retrain.rounds=4")
    return SimpleNamespace(files=files, dataset={"name": "csv", **own}, overrides=overrides)


def private_csv(folder):
    """The same table, of which the sites release noised means and deviations within ranges."""
    made = csv(folder)
    del made.dataset["statistics"]
    made.dataset["ranges"] = {"age": [0, 120], "seen": [15000, 22000]}
    own = [f"privacy.{kind}.noise_multiplier=1" for kind in ("weights", "alphas", "retrain")]
    own += ["privacy=dp", "privacy.data_set=my-data", "privacy.epsilon=90", "privacy.delta=1e-4"]
    own += ["privacy.statistics_noise_multiplier=1", "search_space.norm=group"]
    made.overrides += (*own, "retrain.norm=group", "retrain.rounds=2")
    return made


def override(value):
    """Return a setting's value as ``fednas run`` takes it: keys of a mapping without quotes."""
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key}: {override(own)}' for key, own in value.items())}}}"
    return json.dumps(value)


KINDS = {made.__name__: made for made in (image_folder, csv, private_csv)}


@pytest.fixture(scope="module", params=KINDS)
def finished(request, loopback, tmp_path_factory):
    """A finished run of a server and three sites, each with processes and data of its own."""
    base = tmp_path_factory.mktemp(request.param)
    (base / "data").mkdir()
    kind = KINDS[request.param](base / "data")
    data = {site: kind.files[site] for site in SITES}
    records = 200 if "csv" in request.param else 450
    deployment = Deployment("local", Server(("127.0.0.1",), loopback.free_ports(1)[0]), SITES)
    machines = loopback.Machines(base, deployment, data, records=records, class_names=["x", "y"])
    machines.make_private(request.param.startswith("private"))
    for site in SITES:
        (machines.folder / site / "dataset.yaml").write_text(yaml.safe_dump(kind.dataset))
    shown = {name: value for name, value in kind.dataset.items() if name not in ("name", "ranges")}
    read = [f"dataset.{name}={override(value)}" for name, value in shown.items()]
    folder = base / "run"
    try:
        machines.begin()
        read += [f"dataset={kind.dataset['name']}", f"dataset.root={kind.files['test']}"]
        own = ("runtime=deployment", "runtime.superlink=server", "partition=sites", "clients=3")
        machines.operate("fednas", "run", *own, *read, *kind.overrides, f"run_dir={folder}")
    finally:
        left = machines.stop()
    assert left == []
    events = read_events(folder / "events.jsonl")
    return Told(
        kind=request.param, folder=folder, events=events, machines=machines, files=kind.files
    )


def test_raw_data_has_the_reported_accuracy(finished, tmp_path, prints):
    reported = finished.the("evaluated")["central"]["accuracy"]
    assert load(finished.folder).predict(finished.files["test"]).accuracy == reported
    assert reported > 0.5 or finished.kind == "private_csv"  # which hardly learns
    output = tmp_path / "predictions.csv"
    printed = prints("predict", finished.folder, finished.files["test"], "--output", output)
    assert f"{100 * reported:.1f} %" in printed


def test_every_site_has_the_model_and_its_own_test_is_what_was_reported(finished):
    evaluated = finished.the("evaluated")
    assert (not evaluated["clients"]) == finished.kind.startswith("private")
    told = {client["client"]: client["accuracy"] for client in evaluated["clients"]}
    for index, site in enumerate(SITES):
        (kept,) = (finished.machines.folder / site / "state" / "models").iterdir()
        own = json.loads((kept / "test.json").read_text())
        assert own["num_examples"] > 10
        assert told.get(index, own["accuracy"]) == pytest.approx(own["accuracy"])
        model, raw = load(kept), finished.files["test"]
        assert model.predict(raw).accuracy == load(finished.folder).predict(raw).accuracy


def test_private_sites_release_by_what_all_standardise(finished):
    found = finished.named("statistics")
    assert len(found) == (finished.kind == "private_csv")
    if not found:
        return
    mean, std = found[0]["mean"], found[0]["std"]
    assert list(load(finished.folder).inputs.mean) == mean
    assert 0 < std[0] < 120 / math.sqrt(12)  # the range's
    assert mean[0] == pytest.approx(60, abs=10)
    for site in SITES:
        state = finished.machines.folder / site / "state"
        with Ledger(state / "ledger" / "ledger.sqlite", state / "ledger.key") as ledger:
            booked = [row.entry.action for row in ledger.entries()]
        assert booked.count("query.statistics:statistics") == 1
        assert booked[0] == "query.statistics:statistics"
