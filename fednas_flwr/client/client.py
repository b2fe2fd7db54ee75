"""One data owner, with its records, its device and the networks that it has built so far."""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fednas_flwr.base.errors import ConfigError, check_choice
from fednas_flwr.base.randomness import make_generator
from fednas_flwr.client.release_guard import ReleaseGuard, refused_batch_norm
from fednas_flwr.data import loaders, records
from fednas_flwr.data.statistics import Moments, Statistics, are_within
from fednas_flwr.protocol.messages import Header, Request
from fednas_flwr.protocol.secure_sum.sum_site import SumSite
from fednas_flwr.protocol.states import States, load_states, network_states
from fednas_flwr.search.objective import CLASSIFICATION, Batch, Objective
from fednas_flwr.settings.names import FLOAT32, SPLITS
from fednas_flwr.spaces.space import SearchSpace


@dataclass(frozen=True)
class KeptModels:
    """The folder of the models that a site keeps, and the key that must have signed them.

    Attributes:
        folder: The folder; it is created when the first model arrives.
        signer: File of the public key of the server's operator.
    """

    folder: Path
    signer: Path


@dataclass(frozen=True)
class Client:
    """The client with which an action works.

    Attributes:
        index: Index of the client, from 0.
        seed: The run's seed; every draw comes from (seed, round, client, purpose).
        data: The client's own records, split into train, validation and test.
        inputs: Description of the records, the same for all clients of a run.
        device: Device of tensors during an action.
        threads: Number of torch's threads during an action, the same in every runtime so that sums
            are equal.
        make_network: Builds a network from its description on the CPU.
        make_space: Returns the run's search space.
        augmentation: Settings of :func:`fednas_flwr.data.loaders.augment` for training batches.
        networks: The networks built so far, shared by the clients of one process.
        tag: Name that the site gives itself; empty if it has none.
        moments: Moments of a table's numeric columns over the train part, if no statistics are
            declared; else None.
        has_bounds: True if its records have public bounds, within which it may release noised
            statistics: a table's declared ranges, or the length of a backbone's features.
        objective: Computes losses and hits; its tensors are on the device.
        precision: Precision of plain gradients, see
            :func:`fednas_flwr.search.exact_gradients.computed_in`.
        guard: Guard that releases must pass; a client with a guard answers only private actions.
        wire: Format of float32 vectors in replies, see :mod:`fednas_flwr.protocol.messages`.
        kept_models: Folder for models that return to the site; None keeps no models.
        sums: The client's part of secure sums; a client with one answers in no other way.
        cache: Folder for what can be computed anew, such as results of self-tests; None if there is
            none.
        settings_digest: Hash of the run's settings as the server has sent them, on which the sites
            of a secure sum must agree; empty without secure sums.
        rehearsed: The computations that private actions have tried on made-up records, and for each
            the micro-batch size at which records' results are independent of one another.
    """

    index: int
    seed: int
    data: loaders.ClientData
    inputs: records.Inputs
    device: torch.device
    threads: int
    make_network: Callable[[Mapping[str, Any]], nn.Module]
    make_space: Callable[[], SearchSpace]
    augmentation: Mapping[str, Any]
    networks: dict[str, nn.Module] = field(default_factory=dict)
    tag: str = ""
    moments: list[Moments] | None = None
    has_bounds: bool = False
    objective: Objective = CLASSIFICATION
    precision: str = FLOAT32
    guard: ReleaseGuard | None = None
    wire: str = "float32"
    kept_models: KeptModels | None = None
    sums: SumSite | None = None
    cache: Path | None = None
    settings_digest: str = ""
    rehearsed: dict[str, int] = field(default_factory=dict)

    def network(self, description: Mapping[str, Any], states: States | None = None) -> nn.Module:
        """Return the network of ``description`` on the client's device, with ``states`` loaded."""
        key = json.dumps(description, sort_keys=True)
        if key not in self.networks:
            # A supernet is used again in every round; of derived networks only the newest is.
            for old in [k for k in self.networks if '"supernet"' not in k]:
                del self.networks[old]
            with torch.random.fork_rng():  # an action's draws must not depend on who built it
                self.networks[key] = self.make_network(description).to(self.device)
        network = self.networks[key]
        if states is not None:
            load_states(network, states)
        return network

    def sent_network(self, request: Request) -> nn.Module:
        """Return the network that a request describes, checked, with the states that it carries.

        Raises:
            ConfigError: See :meth:`check_network`.
            ValueError: The states are not those of this network.
        """
        network = self.network(request.network, request.network_states)
        self.check_network(request, network)
        return network

    def check_network(self, request: Request, network: nn.Module) -> None:
        """Refuse, at a private client, a network for which no noised release can be made.

        Raises:
            ConfigError: It has batch norm, or is larger than the run has committed to.
        """
        if self.guard is None:
            return
        if any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in network.modules()):
            raise refused_batch_norm()
        states = network_states(network)
        for kind in request.releases.keys() & states.keys():
            num_values = sum(tensor.numel() for tensor in states[kind].values())
            self.guard.check_size(request.releases[kind], request.header.run, num_values)

    def standardised(self, statistics: Statistics) -> "Client":
        """Return the client with its records standardised by the statistics of all clients.

        Raises:
            ConfigError: The statistics are of another table or, if a private client has declared
                ranges, lie outside them; or the client keeps to statistics that it has declared.
        """
        if self.guard is not None and not self.has_bounds:
            raise ConfigError("refused: a private site standardises by its own dataset.statistics.")
        data = self.data.standardised(statistics)
        ranges = Statistics(self.data.train.mean, self.data.train.std)
        if self.guard is not None and not are_within(
            statistics, ranges, num_columns=self.num_columns
        ):
            raise ConfigError(
                "refused: statistics beyond this site's dataset.ranges, or its features' length."
            )
        return replace(self, data=data, objective=self.objective.standardised(statistics.target))

    @property
    def private_guard(self) -> ReleaseGuard:
        """The guard of a private client.

        Raises:
            ConfigError: The client has none.
        """
        if self.guard is None:
            raise ConfigError("this is for private clients, and the client has no policy.")
        return self.guard

    @property
    def part_of_sums(self) -> SumSite:
        """The client's part of secure sums.

        Raises:
            ConfigError: The client has none.
        """
        if self.sums is None:
            raise ConfigError("refused: this site takes no part in secure sums.")
        return self.sums

    @property
    def data_form(self) -> dict[str, Any]:
        """The declared form of the client's records, the same for all clients of a run."""
        # moments follow from records; the server pools them into one mean
        declared, inputs, train = self.moments is None, self.inputs, self.data.train
        return {
            "input_shape": list(train.features.shape[1:]),
            "image_shape": list(inputs.shape if inputs.transform else ()),
            "transform": list(inputs.transform),
            "schema": [asdict(column) for column in inputs.schema],
            "mean": list(train.mean) if declared else [],
            "std": list(train.std) if declared else [],
            "class_names": list(inputs.class_names),
            "multi_label": inputs.multi_label,
            "target": list(inputs.target),
        }

    @property
    def num_columns(self) -> int:
        """Number of leading features of a table that are numbers to standardise."""
        return sum(column.kind != records.CATEGORY for column in self.inputs.schema)

    def split(self, name: str) -> loaders.Split:
        """Return one split; retraining uses ``train+validation``."""
        check_choice("split", name, (*SPLITS, "train+validation"))
        first, *rest = (getattr(self.data, part) for part in name.split("+"))
        return loaders.concat_splits(first, *rest) if rest else first

    def generator(self, header: Header, *purpose: int | str) -> torch.Generator:
        """Return the generator for one purpose in one exchange of this client."""
        return make_generator(self.seed, header.stage, header.round, self.index, *purpose)

    def epoch(
        self,
        split: loaders.Split,
        *,
        batch_size: int | None,
        generator: torch.Generator,
        augmented: bool = True,
    ) -> Iterator[Batch]:
        """Yield training batches of one shuffled pass over ``split``."""
        for indices in loaders.epoch_batches(len(split), batch_size, generator):
            x, y = split.batch(indices, self.device)
            yield (self.augmented(x, generator) if augmented else x), y

    def augmented(self, x: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        """Return the batch ``x``, augmented as the data set's settings say."""
        if x.dim() != 4:
            return x
        return loaders.augment(x, generator=generator, **self.augmentation)
