"""Commands about machines: provision, key, doctor, latency."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from fednas_flwr.api import compose
from fednas_flwr.base.errors import ConfigError
from fednas_flwr.cli import RUN_FAILED, Handler
from fednas_flwr.settings.parser import Between


def measure_latency(
    *,
    shape: tuple[int, int, int] = (3, 32, 32),
    classes: int = 10,
    batch_size: int = 1,
    passes: int = 21,
    output: Path,
    overrides: Sequence[str],
) -> None:
    """Time every op on this machine, write the table, and try it on three random networks.

    Takes overrides of `fednas run`: search_space, device and threads matter.

    Args:
        shape: channels, height and width of an image
        classes: number of classes
        batch_size: images in a batch
        passes: measurements of each op
        output: JSON file to write
        overrides: see above
    """
    config = compose(*overrides)
    Between(1).check("--batch-size", batch_size)
    Between(2).check("--passes", passes)
    from fednas_flwr.base.files import write_atomically
    from fednas_flwr.base.randomness import make_generator
    from fednas_flwr.models.networks import make_device, make_space
    from fednas_flwr.spaces.costs import measure_space, space_costs, timed_space
    from fednas_flwr.spaces.latency_tables import Conditions, to_json

    space = timed_space(
        make_space(**asdict(config.search_space), input_shape=tuple(shape), num_classes=classes)
    )
    generator = make_generator(config.seed, "latency")
    device, threads = make_device(config.runtime.device), config.runtime.threads
    under = Conditions(device, threads, batch_size, passes)
    genotypes = [space.random_genotype(generator) for _ in range(3)]
    table, predictions = measure_space(space, under, genotypes)
    write_atomically(output, to_json(table))
    costs = space_costs(space, table)
    print(
        f"{len(table.timings)} layers on {table.machine}, {table.threads} thread(s), batch "
        f"{table.batch_size}, {table.clock}: networks take {costs.lowest:.3g} to "
        f"{costs.highest:.3g} ms.\n{output}"
    )
    for predicted_ms, measured in predictions:
        print(
            f"a random network: predicted {predicted_ms:.3g} ms, measured {measured.median_ms:.3g} "
            f"ms (spread {measured.spread_ms:.2g}), ratio {predicted_ms / measured.median_ms:.2f}"
        )


def predict_latency(run_folder: Path, tables: tuple[Path, ...]) -> None:
    """Print the latency of a run's network on each machine, by its table.

    Args:
        run_folder: folder of a finished run, or of a group's run
        tables: files made by `fednas latency measure`
    """
    from fednas_flwr.models.networks import described_space, load_description
    from fednas_flwr.spaces.costs import read_table, space_costs, timed_space

    description = load_description(run_folder)
    if description["name"] != "derived":
        raise ConfigError(f"{run_folder} holds a {description['name']}: no table fits it.")
    described, genotype = described_space(description)
    space = timed_space(described)
    for path in tables:
        table = read_table(path)
        latency_ms = space_costs(space, table).of_path(space.path(genotype))
        print(
            f"{latency_ms:.3g} ms on {table.machine}, {table.device}, {table.threads} thread(s), "
            f"batch {table.batch_size} ({path})"
        )


def provision_machines(
    sites: Path, *, output: Path = Path("deployment"), sum_keys: Path | None = None
) -> None:
    """Write the files that each machine of a deployment needs, into one folder per machine.

    Args:
        sites: YAML file; see docker/README.md
        output: folder for these folders
        sum_keys: folder of the sites' <site>.pub, for secure sums
    """
    from fednas_flwr.deploy.sites.provision import AUTHORITY, load_sites, provision, read_roster

    deployment = load_sites(sites)
    roster = read_roster(deployment, sum_keys) if sum_keys else None
    for path in provision(deployment, output, roster=roster):
        print(path)
    if roster is not None:
        print(f"roster {roster.fingerprint}: for secure_sum.roster of every site's policy, once")
        print("people at the sites have compared it over a channel that is not the server's.")
    print(f"{output / AUTHORITY} stays with you: its key signs the server's certificates.")


def make_key(path: Path, *, sum: bool = False) -> None:
    """Make the key by which a server recognises this site's node.

    Args:
        path: file of the new key
        sum: make the keys of secure sums instead, by which other sites recognise this one
    """
    from fednas_flwr.deploy.sites.provision import make_node_key, make_sum_key

    knows = "other sites" if sum else "the server"
    try:
        public = (make_sum_key if sum else make_node_key)(path)
    except FileExistsError as error:
        raise ConfigError(f"{path} exists: {knows} may know the site by it.") from error
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error}.") from error
    then = "whoever provisions." if sum else "the server's operator and"
    print(f"{path} is made and stays here. Send {public} to {then}")
    if not sum:
        print("start again when it is registered.")


def doctor(folder: Path = Path()) -> int:
    """Print what is wrong with this machine and how to fix it; exit code 1 if anything is wrong.

    Args:
        folder: folder of a provisioned machine
    """
    from fednas_flwr.deploy.sites.doctor import examine

    findings = examine(folder)
    for finding in findings:
        print(f"{'BROKEN' if finding.broken else 'ok':6}  {finding.name:11}  {finding.text}")
    return RUN_FAILED if any(finding.broken for finding in findings) else 0


COMMANDS: dict[str, Handler] = {"provision": provision_machines, "key": make_key, "doctor": doctor}
GROUPS: dict[str, tuple[str, dict[str, Handler]]] = {
    "latency": (
        "what the ops of a search space cost on a machine",
        {"predict": predict_latency, "measure": measure_latency},
    )
}
