"""Whole runs that several tests look at: made once, kept on disk, and handed out as copies.

A run is looked up by its settings and by the content of the files that they name.
"""

import json
import os
import shutil
from dataclasses import replace
from hashlib import sha256
from itertools import count
from pathlib import Path
from types import SimpleNamespace

from filelock import FileLock

from fednas_flwr.base.foreign import dump_yaml
from fednas_flwr.data.prepared import make_data
from fednas_flwr.deploy.client_app import make_client_app
from fednas_flwr.deploy.grids import InProcessGrid
from fednas_flwr.deploy.server_app import serve
from fednas_flwr.runs.events import read_events
from fednas_flwr.runs.numbers import CONFIG_FILE
from fednas_flwr.runs.run_folder import create_run_folder
from fednas_flwr.settings import dump_config


def named(events, *kinds):
    """Return the events of some kinds."""
    return [event for event in events if event["event"] in kinds]


class Told(SimpleNamespace):
    """What a test looks at, with the ``events`` that were told of it."""

    def named(self, *kinds):
        """Return the events of some kinds."""
        return named(self.events, *kinds)

    def the(self, kind):
        """Return the only event of a kind."""
        (event,) = self.named(kind)
        return event

    @property
    def failed(self):
        """The events of clients that have failed or left."""
        return self.named("client_failed", "client_left")


def in_process(config, number=None, **terms):
    """Return a grid of the client apps of a configuration: as many as it says, or a number."""
    return InProcessGrid(make_client_app(dump_config(config), **terms), number or config.clients)


def whole_run(config, *, resumed=False, sites=(), grid=InProcessGrid, listeners=()):
    """Make or continue a run in this process: its folder, configuration, events and error.

    ``sites`` are the files of real sites, or what their nodes are told.
    """
    own, error = grid(make_client_app(dump_config(config)), config.clients), None
    for context, site in zip(own._contexts.values(), sites, strict=False):
        context.node_config |= site if isinstance(site, dict) else {"data-path": str(site)}
    try:
        serve(config, own, listeners=listeners, resumed=resumed)
    except (Exception, KeyboardInterrupt) as raised:
        error = raised
    folder = Path(str(config.run_dir))
    events = read_events(folder / "events.jsonl")
    return Told(folder=folder, config=config, events=events, error=error)


def stop_at(kind, **place):
    """A listener that ends a run as a person does, at events of a kind and place."""

    def stop(event):
        if {"event": kind, **place}.items() <= event.items():
            raise KeyboardInterrupt

    return stop


def looked_at(run, **own):
    """Return a finished run with its test set, its central scores and each kind's last event."""
    last = {event["event"]: event for event in run.events}
    test, central = make_data(run.config)[0].server_test, last["evaluated"]["central"]
    return Told(**vars(run), **last, test=test, central=central, **own)


def copy_without(run, folder, *checkpoints):
    """Return a copy of a run's folder that lacks some checkpoints, to be resumed."""
    shutil.copytree(run.folder, folder)
    text = (folder / "config.yaml").read_text().replace(str(run.folder), str(folder))
    (folder / "config.yaml").write_text(text)
    for pattern in checkpoints:
        for path in (folder / "checkpoints").glob(pattern):
            path.unlink()
    return folder


def assert_same_files(one, other, *names):
    """Check that files of two folders have the same bytes, those of what was found unless named."""
    for name in names or ("genotype.json", "model.safetensors"):
        assert (one / name).read_bytes() == (other / name).read_bytes(), name


def digest_of(path):
    """Return the SHA-256 of the names and contents of a file, or of all files in a folder."""
    total = sha256()
    for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
        if file.is_file() and file.suffix != ".pyc":
            content = sha256(file.read_bytes()).hexdigest()
            total.update(f"{file.relative_to(path)} {content}\n".encode())
    return total.hexdigest()


def name_of(config):
    """Return the name of a run: of its settings, and of the content of the files they name."""

    def without_paths(value):
        if isinstance(value, dict):
            return {key: without_paths(one) for key, one in value.items()}
        if isinstance(value, list):
            return [without_paths(one) for one in value]
        if isinstance(value, str) and os.path.isabs(value) and os.path.exists(value):
            return digest_of(Path(value))
        return value

    settings = json.loads(dump_config(config))
    del settings["run_dir"], settings["dataset"]["cache"]
    return sha256(json.dumps(without_paths(settings), sort_keys=True).encode()).hexdigest()[:24]


class FinishedRuns:
    """Runs on disk.

    Args:
        place: Where they are kept, for all processes of this call of pytest.
        copies: Where copies of them are put.
    """

    def __init__(self, place, copies):
        self._place, self._copies, self._numbers = place, copies, count()
        place.mkdir(exist_ok=True)

    def get(self, config):
        """Return a copy of the run of these settings, made if there is none.

        Its ``made_in`` is the folder that it was made in. A run that ends with an error is not
        kept, but returned as it is.
        """
        copy = self._copies / str(next(self._numbers))
        kept = self._place / name_of(config)
        with FileLock(f"{kept}.lock"):
            if not kept.exists():
                made_in = kept.with_name(f"{kept.name}.{os.getpid()}")
                shutil.rmtree(made_in, ignore_errors=True)
                done = whole_run(create_run_folder(replace(config, run_dir=str(made_in))))
                if done.error is not None:
                    shutil.move(made_in, copy)
                    return Told(**vars(done) | {"folder": copy}, made_in=made_in)
                (made_in / ".made_in").write_text(str(made_in))
                made_in.rename(kept)
            shutil.copytree(kept, copy)
        config = replace(config, run_dir=str(copy))
        (copy / CONFIG_FILE).write_text(dump_yaml(json.loads(dump_config(config))))
        made_in = Path((copy / ".made_in").read_text())
        (copy / ".made_in").unlink()
        events = read_events(copy / "events.jsonl")
        return Told(folder=copy, config=config, events=events, error=None, made_in=made_in)
