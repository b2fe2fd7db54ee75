"""Run a search on a server and three sites on this machine, as made by `fednas provision`.

Each has its own folder, TLS and a registered key, and runs its `start.sh`. Parts that fail are
restarted, as systemd would do. Arguments are overrides of `fednas run`, e.g. rounds=2
retrain.rounds=2; with `--lose-a-site` the second site is killed (SIGKILL) after the first round.
The noise of a private run never repeats, so its ledgers are checked (with secure_sum=true every
site's policy names the roster of all sites' keys). Any other run is repeated in one process and
must end in the same bits, if no site was lost.

Results, logs and the machines' folders stay in runs/deploy_local_<time>, or the new folder that
FEDNAS_RESULTS names; every process is stopped at the end.
"""

from __future__ import annotations

import filecmp
import json
import os
import re
import signal
import sys
import threading
import time
from datetime import datetime
from pathlib import Path
from statistics import fmean

import numpy as np
from loopback import RESTART_S, SITES, Machines, free_ports, until
from sklearn.datasets import load_digits

from fednas_flwr.cli import main as fednas
from fednas_flwr.client.audit_trail import verify_trail
from fednas_flwr.deploy.sites.provision import Deployment, Server
from fednas_flwr.privacy.books.ledger import Ledger
from fednas_flwr.runs.events import Event, read_events
from fednas_flwr.runs.numbers import EVENTS_FILE
from fednas_flwr.settings import DifferentialPrivacy
from fednas_flwr.settings.configuration import parse_config
from fednas_flwr.settings.hydra_config import compose_tree

STARTED = time.monotonic()
SUM_TERMS = "least_sites: 2, colluding: 0"  # of three sites, one of which may be lost


def main(arguments: list[str]) -> int:
    """Deploy, search and check; return the exit code."""
    lose = "--lose-a-site" in arguments
    overrides = [argument for argument in arguments if argument != "--lose-a-site"]
    name = f"deploy_local_{datetime.now():%Y%m%d-%H%M%S}_{os.getpid()}"
    results = Path(os.environ.get("FEDNAS_RESULTS", Path("runs") / name)).resolve()
    common = ["partition=sites", "dataset=npz", f"dataset.root={results / 'data'}", "clients=3"]
    common += ["dataset.server_test=false", *overrides]
    config = parse_config(compose_tree(common))
    private = isinstance(config.privacy, DifferentialPrivacy)
    deployed = ["runtime=deployment", "runtime.superlink=server", f"run_dir={results / 'deployed'}"]
    # Without one of the sites bits could not agree; a lost site must not end the run.
    deployed += [f"runtime.quorum={0.6 if lose else 1}", "runtime.deadline_s=600", *common]
    deployed += ["privacy.data_set=my-data"] if private else []
    machines = local_machines(results)
    machines.make_private(private)
    if config.by_client:
        machines.protect_sites()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        machines.begin(sums=SUM_TERMS if config.secure_sum else None)
        say(f"a server and {', '.join(SITES)} are up: TLS, registered keys, ports {machines.ports}")
        code = search(machines, deployed, lost=SITES[1] if lose else None)
        if private:
            check_books(machines)
        elif code == 0 and not lose:
            check_models(machines, results / "deployed")
    finally:
        left = machines.stop()
    noun = "process was" if len(left) == 1 else "processes were"
    say(f"all is stopped, {len(left)} {noun} left")
    if code or left:
        return code or len(left)
    print_times(machines, read_events(results / "deployed" / EVENTS_FILE))
    if private or lose:
        return 0
    fednas(["run", "runtime=inline", f"run_dir={results / 'inline'}", *common])
    return compare(results / "deployed", results / "inline")


def say(text: str) -> None:
    """Print a line with the seconds since the script was started."""
    print(f"{time.monotonic() - STARTED:6.1f} s  {text}", flush=True)


def write_data(folder: Path) -> tuple[dict[str, Path], int]:
    """Write scikit-learn's digits, a third to each site; return the files and a third's size."""
    folder.mkdir(parents=True)
    digits = load_digits()
    images = (digits.images * 255 / 16).round().astype(np.uint8)[:, None]
    files = {}
    for index, site in enumerate(SITES):
        files[site] = folder / f"{index}-{site}.npz"  # a site's place is its partition
        np.savez(files[site], x_train=images[index::3], y_train=digits.target[index::3])
    return files, len(images) // 3


def local_machines(folder: Path) -> Machines:
    """Return a server and three sites that hold digits, in a folder."""
    data, records = write_data(folder / "data")
    deployment = Deployment("local", Server(("127.0.0.1",), free_ports(1)[0]), SITES)
    names = [str(digit) for digit in range(10)]
    return Machines(folder, deployment, data, records=records, class_names=names)


def search(machines: Machines, overrides: list[str], lost: str | None) -> int:
    """Run ``fednas run`` and print its output; kill the site ``lost`` after the first round."""
    process = machines.launch("fednas", "run", *overrides)
    assert process.stdout is not None
    killed = False
    for line in process.stdout:
        say(line.rstrip())
        if lost and not killed and re.match(r"search 1/", line):
            machines.kill(lost)
            killed = True
            say(f"{lost}: killed with SIGKILL, started again after {RESTART_S:g} s")
            threading.Thread(target=tell_return, args=(machines, lost), daemon=True).start()
    return process.wait()


def tell_return(machines: Machines, site: str) -> None:
    """Print when a site that was killed is on-line again."""
    until("its end", lambda: "SuperNode ID" not in machines.read(site))
    machines.wait_online(site)
    say(f"{site}: is back, with the same key and ledger")


def check_books(machines: Machines) -> None:
    """Verify the ledger and audit trail of every site."""
    for site in SITES:
        state = machines.folder / site / "state"
        with Ledger(state / "ledger" / "ledger.sqlite", state / "ledger.key") as ledger:
            rows = ledger.verify()
        lines = verify_trail(state / "ledger" / "audit.jsonl", state / "ledger.key")
        say(f"{site}: ledger of {rows} releases and audit trail of {lines} lines are intact")


def check_models(machines: Machines, run: Path) -> None:
    """Check that every site keeps the run's model, if there is one, and has tested it."""
    if not (run / "model.safetensors").exists():
        return
    for site in SITES:
        (folder,) = (machines.folder / site / "state" / "models").iterdir()
        if (folder / "model.safetensors").read_bytes() != (run / "model.safetensors").read_bytes():
            raise RuntimeError(f"{site} keeps another model than the run's")
        tested = json.loads((folder / "test.json").read_text())
        say(f"{site}: keeps the model, which it has tested on {tested['num_examples']} records")


def print_times(machines: Machines, events: list[Event]) -> None:
    """Print the parts of an exchange's time, from the run's events and the sites' logs."""
    failed = {(e["stage"], e["round"]) for e in events if e["event"] == "client_failed"}
    rounds = [e for e in events if e["event"] == "round" and (e["stage"], e["round"]) not in failed]
    logs = "".join((machines.logs / name).read_text(errors="replace") for name in machines.parts)
    begun = re.findall(r"train\.\S+: begun ([\d.]+) s", logs)
    answered = re.findall(r"train\.\S+: answered within ([\d.]+) s, after ([\d.]+) s of CPU", logs)
    if not rounds or not begun or not answered:
        return
    exchanges = sum(event["exchanges"] for event in rounds)
    whole = sum(event["seconds"] for event in rounds) / exchanges
    start = fmean(map(float, begun))
    work, cpu = (fmean(map(float, times)) for times in zip(*answered, strict=True))
    print(
        f"time of an exchange (mean of {exchanges} in rounds without a fault): {whole:.1f} s, of "
        f"which {start:.1f} s start-up of client processes, {work:.1f} s ours, "
        f"{whole - start - work:.1f} s Flower's and waiting for the slowest site\n"
        f"CPU time of a client process, its work included: {cpu:.1f} s"
    )


def compare(deployed: Path, inline: Path) -> int:
    """Print equal and different results; return the exit code."""
    patterns = ("genotype.json", "model.safetensors", "checkpoints/*.safetensors")
    found = {
        path.relative_to(folder)
        for folder in (deployed, inline)
        for pattern in patterns
        for path in folder.glob(pattern)
    }
    names = sorted(map(str, found))
    equal, unequal, missing = filecmp.cmpfiles(deployed, inline, names, shallow=False)
    for name in equal:
        print(f"equal: {name}")
    wrong = [f"{name} differs" for name in unequal]
    wrong += [f"{name} is missing in one of the runs" for name in missing]
    wrong += [] if found else ["neither run left a result to compare"]
    for text in wrong:
        print(f"deploy_local: {text}", file=sys.stderr)
    if not wrong:
        print("deployment and inline agree in every bit.")
    return len(wrong)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
