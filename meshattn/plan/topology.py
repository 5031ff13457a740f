"""A cluster in numbers: nodes, links, kernels. Given by the user, read from a file, measured, or a preset.

Bandwidths are of one direction, in gigabytes (10^9 bytes) a second; times are in microseconds.

A file is JSON or, with the optional PyYAML, YAML (of which JSON is a part):

    name: two racks
    gpus_per_node: 8
    inside: {gb_per_s: 370, latency_us: 10}
    between: {gb_per_s: 50, latency_us: 20}
    kernels: h200

``kernels`` is the name of a table that comes with the package or a table (see `kernel_times`); `meshattn
calibrate` writes such files.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from typing import Any

from .kernel_times import KernelTimes

PRESETS = Path(__file__).parent / "presets"


def _check_number(value: object, what: str, least: float) -> None:
    """ValueError unless it is a number that times can be computed with."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not least <= value <= 1e12:
        raise ValueError(f"{what} is {value!r}, but must be a number from {least:g} to 1e12")


@dataclass(frozen=True)
class Link:
    """What an exchange goes through: a GPU's port inside a node, or a network card between nodes."""

    gb_per_s: float
    latency_us: float = 0.0
    sm_share: float = 0.0
    """Part of the GPU's multiprocessors that an exchange takes from kernels as long as it runs."""
    copy_engines: bool = False
    """Whether the GPUs' copy engines serve it, which pass chunks on while kernels are busy; other transports
    wait for the kernels that were queued before."""

    def __post_init__(self) -> None:
        _check_number(self.gb_per_s, "gb_per_s of a link", 1e-9)
        _check_number(self.latency_us, "latency_us of a link", 0.0)
        _check_number(self.sm_share, "sm_share of a link", 0.0)
        if not isinstance(self.copy_engines, bool):
            raise ValueError(f"copy_engines of a link is {self.copy_engines!r}, but must be true or false")
        if not self.sm_share < 1:
            raise ValueError(f"sm_share of a link is {self.sm_share}, but must be from 0 up to below 1")


@dataclass(frozen=True)
class Topology:
    """GPUs of one kind in nodes of one size, numbered node by node.

    Inside a node every GPU has a port to all others. Between nodes ``gpus_per_nic`` neighbouring GPUs share a
    network card. Both directions of a port or a card work at once.
    """

    name: str
    gpus_per_node: int
    inside: Link
    kernels: KernelTimes
    between: Link | None = None
    """None where nobody knows it: then only meshes inside a node can be planned."""
    gpus_per_nic: int = 1
    memory_gb_per_s: float = 4000.0
    """What merges and casts read and write."""
    start_us: float = 0.0
    """What the host takes to queue a kernel or an exchange."""

    def __post_init__(self) -> None:
        for name in ("gpus_per_node", "gpus_per_nic"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise ValueError(f"{name} of a topology is {value!r}, but must be a whole number from 1 on")
        if not isinstance(self.name, str):
            raise ValueError(f"name of a topology is {self.name!r}, but must be text")
        _check_number(self.memory_gb_per_s, "memory_gb_per_s of a topology", 1e-9)
        _check_number(self.start_us, "start_us of a topology", 0.0)

    @property
    def across(self) -> Link:
        """``between``; ValueError without one."""
        if self.between is None:
            raise ValueError(
                f"topology {self.name} has no link between nodes: plan at most the {self.gpus_per_node} "
                "ranks of one, add 'between' to its file, or calibrate on several nodes"
            )
        return self.between

    @classmethod
    def read(cls, data: Mapping[str, Any], where: str = "topology") -> Topology:
        """From the contents of a file; ValueError names what is missing, unknown or wrong."""
        known = {part.name for part in fields(cls)}
        needed = known - {"between", "gpus_per_nic", "memory_gb_per_s", "start_us"}
        if not isinstance(data, Mapping):
            raise ValueError(f"{where}: this is not a topology, which has {', '.join(sorted(needed))}")
        for wrong, what in (
            (needed - set(data), "lacks"),
            (set(data) - known - {"about"}, "has the unknown"),
        ):
            if wrong:
                raise ValueError(f"{where} {what} {', '.join(sorted(map(str, wrong)))}")
        values = {name: data[name] for name in known & set(data)}
        try:
            for name in ("inside", "between"):
                if name == "inside" or values.get(name) is not None:
                    values[name] = Link(**values[name])
            kernels = values["kernels"]
            values["kernels"] = (
                kernel_times(kernels) if isinstance(kernels, str) else KernelTimes.read(kernels)
            )
            return cls(**values)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{where}: {error}") from error

    def as_data(self) -> dict[str, Any]:
        """What ``read`` reads."""
        return {**asdict(self), "kernels": self.kernels.as_data()}

    def text(self) -> str:
        """The contents of a file, one block of the table a line."""
        data = self.as_data()
        blocks = ",\n".join("  " + json.dumps(block) for block in data["kernels"].pop("block_us"))
        kernels = json.dumps(data.pop("kernels"))[:-1]
        head = ",\n".join(f"{json.dumps(name)}: {json.dumps(value)}" for name, value in data.items())
        return f'{{\n{head},\n"kernels": {kernels}, "block_us": [\n{blocks}\n]}}\n}}\n'


def load_topology(source: str | Path) -> Topology:
    """A preset by its name, or the topology of a file.

    Raises ValueError for a name that is neither, for text that is neither JSON nor (with PyYAML) YAML, and as
    ``Topology.read``.
    """
    path = Path(source)
    if str(source) in presets():
        path = PRESETS / f"{source}.json"
    if not path.is_file():
        raise ValueError(f"topology {source}: no such file, nor a preset; presets are {', '.join(presets())}")
    return _read(path, path.stat().st_mtime_ns)


@lru_cache(maxsize=16)
def _read(path: Path, _: int) -> Topology:
    return Topology.read(_parse(path), str(path))


@lru_cache(maxsize=16)
def kernel_times(name: str) -> KernelTimes:
    """A table that comes with the package; ValueError for an unknown name."""
    known = {each.stem.removeprefix("kernels-"): each for each in sorted(PRESETS.glob("kernels-*.json"))}
    if name not in known:
        raise ValueError(f"kernels {name!r}: there is no such table; there are {', '.join(known)}")
    return KernelTimes.read(json.loads(known[name].read_text()))


def presets() -> tuple[str, ...]:
    """Names of the topologies that come with the package."""
    return tuple(sorted(p.stem for p in PRESETS.glob("*.json") if not p.stem.startswith("kernels-")))


def _parse(path: Path) -> Any:
    try:
        text = path.read_text()
        return json.loads(text)
    except json.JSONDecodeError as error:
        try:
            yaml = import_module("yaml")
        except ImportError:
            raise ValueError(f"{path} is not JSON ({error}); YAML takes PyYAML: pip install PyYAML") from None
        try:
            return yaml.safe_load(text)
        except (yaml.YAMLError, ValueError, RecursionError) as wrong:  # a date of no calendar is the second
            raise ValueError(f"{path} is neither JSON nor YAML: {wrong}") from None
    except (ValueError, RecursionError) as error:  # no text, or a number of thousands of digits
        raise ValueError(f"{path} is no topology: {error}") from None
