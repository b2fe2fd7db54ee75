"""Commands about machines: provision, key, doctor, latency."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path

from fednas_flwr.api import compose
from fednas_flwr.base.errors import ConfigError
from fednas_flwr.cli import RUN_FAILED, Commands, add_command
from fednas_flwr.settings.parser import Between


def add_commands(commands: Commands) -> None:
    """Add them."""
    parser = add_command(commands, "provision", provision_machines)
    parser.add_argument("sites", type=Path, help="YAML file; see docker/README.md")
    parser.add_argument("--output", type=Path, default=Path("deployment"), help="folder")
    parser.add_argument(
        "--sum-keys", type=Path, help="folder of the sites' <site>.pub, for secure sums"
    )
    parser = add_command(commands, "key", make_key)
    parser.add_argument("path", type=Path, help="file of the new key")
    parser.add_argument(
        "--sum",
        action="store_true",
        help="make the keys of secure sums, by which other sites know this one",
    )
    parser = add_command(commands, "doctor", doctor)
    parser.add_argument("folder", type=Path, nargs="?", default=Path(), help="default: this one")
    latency = commands.add_parser(
        "latency", description="what the ops of a search space cost on a machine"
    )
    actions = latency.add_subparsers(dest="action", required=True, metavar="action")
    parser = add_command(actions, "predict", predict_latency)
    parser.add_argument("run_folder", type=Path, help="of a finished run, or of a group's")
    parser.add_argument("tables", type=Path, nargs="+", help="made by `fednas latency measure`")
    parser = add_command(actions, "measure", measure_latency, takes_overrides=True)
    shape = ("CHANNELS", "HEIGHT", "WIDTH")
    parser.add_argument("--shape", type=int, nargs=3, metavar=shape, default=[3, 32, 32])
    parser.add_argument("--classes", type=int, default=10, help="default: %(default)d")
    parser.add_argument("--batch-size", type=int, default=1, help="default: %(default)d")
    parser.add_argument(
        "--passes", type=int, default=21, help="measurements of each op (default: %(default)d)"
    )
    parser.add_argument("--output", type=Path, required=True, help="JSON file to write")


def measure_latency(options: argparse.Namespace, overrides: list[str]) -> int:
    """Time every op on this machine, write the table, and try it on three random networks.

    Takes overrides of `fednas run`: search_space, device and threads matter.
    """
    config = compose(*overrides)
    Between(1).check("--batch-size", options.batch_size)
    Between(2).check("--passes", options.passes)
    from fednas_flwr.base.files import write_atomically
    from fednas_flwr.base.randomness import make_generator
    from fednas_flwr.models.networks import make_device, make_space
    from fednas_flwr.spaces.costs import measure_space, space_costs, timed_space
    from fednas_flwr.spaces.latency_tables import Conditions, to_json

    space = timed_space(
        make_space(
            **asdict(config.search_space),
            input_shape=tuple(options.shape),
            num_classes=options.classes,
        )
    )
    generator = make_generator(config.seed, "latency")
    device, threads = make_device(config.runtime.device), config.runtime.threads
    under = Conditions(device, threads, options.batch_size, options.passes)
    genotypes = [space.random_genotype(generator) for _ in range(3)]
    table, predictions = measure_space(space, under, genotypes)
    write_atomically(options.output, to_json(table))
    costs = space_costs(space, table)
    print(
        f"{len(table.timings)} layers on {table.machine}, {table.threads} thread(s), batch "
        f"{table.batch_size}, {table.clock}: networks take {costs.lowest:.3g} to "
        f"{costs.highest:.3g} ms.\n{options.output}"
    )
    for predicted_ms, measured in predictions:
        print(
            f"a random network: predicted {predicted_ms:.3g} ms, measured {measured.median_ms:.3g} "
            f"ms (spread {measured.spread_ms:.2g}), ratio {predicted_ms / measured.median_ms:.2f}"
        )
    return 0


def predict_latency(options: argparse.Namespace, overrides: list[str]) -> int:
    """Print what a run's network takes on each machine, by its table."""
    from fednas_flwr.models.networks import described_space, load_description
    from fednas_flwr.spaces.costs import read_table, space_costs, timed_space

    description = load_description(options.run_folder)
    if description["name"] != "derived":
        raise ConfigError(f"{options.run_folder} holds a {description['name']}: no table fits it.")
    described, genotype = described_space(description)
    space = timed_space(described)
    for path in options.tables:
        table = read_table(path)
        latency_ms = space_costs(space, table).of_path(space.path(genotype))
        print(
            f"{latency_ms:.3g} ms on {table.machine}, {table.device}, {table.threads} thread(s), "
            f"batch {table.batch_size} ({path})"
        )
    return 0


def provision_machines(options: argparse.Namespace, overrides: list[str]) -> int:
    """Write what each machine of a deployment needs, in a folder for each."""
    from fednas_flwr.deploy.sites.provision import AUTHORITY, load_sites, provision, read_roster

    deployment = load_sites(options.sites)
    roster = read_roster(deployment, options.sum_keys) if options.sum_keys else None
    for path in provision(deployment, options.output, roster=roster):
        print(path)
    if roster is not None:
        print(f"roster {roster.fingerprint}: for secure_sum.roster of every site's policy, once")
        print("people at the sites have compared it over a channel that is not the server's.")
    print(f"{options.output / AUTHORITY} stays with you: its key signs the server's certificates.")
    return 0


def make_key(options: argparse.Namespace, overrides: list[str]) -> int:
    """Make the key by which a server knows this site's node."""
    from fednas_flwr.deploy.sites.provision import make_node_key, make_sum_key

    knows = "other sites" if options.sum else "the server"
    try:
        public = (make_sum_key if options.sum else make_node_key)(options.path)
    except FileExistsError as error:
        raise ConfigError(f"{options.path} exists: {knows} may know the site by it.") from error
    except OSError as error:
        raise ConfigError(f"{options.path} cannot be written: {error}.") from error
    then = "whoever provisions." if options.sum else "the server's operator and"
    print(f"{options.path} is made and stays here. Send {public} to {then}")
    if not options.sum:
        print("start again when it is registered.")
    return 0


def doctor(options: argparse.Namespace, overrides: list[str]) -> int:
    """Print what is wrong with this machine, and what to do; exit code 1 if anything is."""
    from fednas_flwr.deploy.sites.doctor import examine

    findings = examine(options.folder)
    for finding in findings:
        print(f"{'BROKEN' if finding.broken else 'ok':6}  {finding.name:11}  {finding.text}")
    return RUN_FAILED if any(finding.broken for finding in findings) else 0
