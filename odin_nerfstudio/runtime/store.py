"""The published state: tables of rows, each with parameters, stock Adam state and versions.

The parameters and the optimizers stay the user's own objects (``torch.nn.Parameter`` in the model's mapping,
``torch.optim.Adam`` with its stock state), so that strategies, schedulers and checkpoints keep working. The store adds
what the runtime needs per row and sends it through one resize when a structural step changes the number of rows.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor


class ReadRule(Protocol):
    """Which rows of a table a task can read, known before the state is read."""

    def mark(self, step: int, view: int, versions: Tensor, least_lag: int, out: Tensor) -> int:
        """Set out[i] to 1 for every row that the task can read, else to 0; returns how many.

        Args:
            step: Step of the task. The set must hold for the state with every update of older steps applied.
            view: View of the task.
            versions: Version of each row on this rank; row i lacks the updates of steps versions[i] .. step - 1. [N]
            int32. least_lag: Treat every row as lacking at least that many updates.
            out: [N] uint8.
        """
        ...


@dataclass(frozen=True)
class ViewRow:
    """Read rule of a per-view table (camera deltas, bilateral grids): row = view."""

    def mark(self, step: int, view: int, versions: Tensor, least_lag: int, out: Tensor) -> int:
        if not 0 <= view < out.shape[0]:
            raise ValueError(f"view {view} has no row in a per-view table of {out.shape[0]} rows")
        out.zero_()
        out[view] = 1
        return 1


@dataclass(frozen=True)
class AllRows:
    """Read rule of parameters that every task reads (a network): no task starts before the step before is complete."""

    def mark(self, step: int, view: int, versions: Tensor, least_lag: int, out: Tensor) -> int:
        out.fill_(1)
        return int(out.shape[0])


@dataclass(frozen=True)
class DenseTerm:
    """A loss term that touches every row without needing any view; each rank adds its gradient at publication.

    ``gradient(step, total, values)`` gets rows of the parameters (any subset, padded with zero rows) and the number of
    rows of the whole table, and returns the gradient of each of them. It must treat rows independently of each other.
    """

    name: str
    due: Callable[[int], bool]
    gradient: Callable[[int, int, Mapping[str, Tensor]], Mapping[str, Tensor]]
    needs: Sequence[str] | None = None
    """Parameters that the gradient is made of; None: all are handed over."""


class RowNoise(Protocol):
    """What happens to rows after their update, row by row: noise, keyed by (seed, step, row)."""

    def add(self, step: int, mask: Tensor | None) -> None:
        """Change the rows of a mask ([N] uint8; None: all), which have just got their update of `step`."""
        ...


@dataclass(frozen=True)
class RowLayout:
    """Columns of a gradient row on the wire: the first `widths[k]` columns of parameter `names[k]`, concatenated."""

    names: tuple[str, ...]
    widths: tuple[int, ...]
    offsets: tuple[int, ...]
    total: int

    @staticmethod
    def of(names: Sequence[str], widths: Sequence[int]) -> RowLayout:
        offsets, total = [], 0
        for width in widths:
            offsets.append(total)
            total += width
        return RowLayout(tuple(names), tuple(widths), tuple(offsets), total)

    def columns(self) -> Sequence[tuple[str, int, int]]:
        """(name, offset, width) of every parameter."""
        return list(zip(self.names, self.offsets, self.widths))


class RowArrays:
    """Every per-row array of a table beside the parameters; one `resize` for all of them."""

    def __init__(self) -> None:
        self._arrays: dict[str, tuple[Tensor, float | None]] = {}

    def add(self, name: str, array: Tensor, fill: float | None) -> None:
        """Register an array. fill: value after a resize; None: every row takes its parent's."""
        self._arrays[name] = (array, fill)

    def __getitem__(self, name: str) -> Tensor:
        return self._arrays[name][0]

    def __contains__(self, name: str) -> bool:
        return name in self._arrays

    def names(self) -> list[str]:
        return list(self._arrays)

    def drop(self, name: str) -> None:
        """Forget an array."""
        del self._arrays[name]

    def resize(self, parents: Tensor, fills: Mapping[str, float] | None = None) -> None:
        """Follow a structural step. parents: old row of each new row. [N_new] int64. fills: other fill values, by
        name."""
        for name, (array, fill) in self._arrays.items():
            value = (fills or {}).get(name, fill)
            if value is None:
                self._arrays[name] = (array[parents].contiguous(), fill)
            else:
                self._arrays[name] = (array.new_full((parents.shape[0], *array.shape[1:]), value), fill)


class Statistics(Protocol):
    """What a structural step wants to know about each view; see `statistics.DensificationStatistics`."""

    def wanted(self, step: int) -> bool: ...
    def collect(self, info: Mapping[str, Any], rows: int) -> tuple[Tensor, Tensor, Tensor]: ...
    def apply(self, total: int, ids: Tensor, norms: Tensor, radii: Tensor) -> None: ...
    def arrays(self) -> Mapping[str, Tensor]: ...


@dataclass(eq=False)
class RowTable:
    """One table of rows: what it holds, how it is stepped, who reads which of its rows.

    Raises:
        ValueError: Parameters and optimizers do not fit each other.
    """

    name: str
    parameters: MutableMapping[str, Any] | torch.nn.ParameterDict
    """Live mapping name -> Parameter [N, ...]; a structural step may replace its values."""
    optimizers: Mapping[str, torch.optim.Adam]
    """One Adam with one parameter for each name that is trained. Names without one are read, never stepped."""
    reads: ReadRule
    schedule: Callable[[int], Mapping[str, float]]
    """Learning rate of each trained name at a step; the same on every rank."""
    padding: Callable[[int], Mapping[str, Tensor]] | None = None
    """View -> one row per parameter that this view's camera cannot see; fills shadows up to a multiple of
    `multiple`."""
    multiple: int = 1
    """Rows of a shadow are padded to a multiple of this (64 for primitives, so that torch's kernels see no tail)."""
    active_columns: Callable[[int], Mapping[str, int]] | None = None
    """Step -> number of leading columns of a name that can have a gradient (spherical-harmonics bands); others: all."""
    dense_terms: Sequence[DenseTerm] = ()
    statistics: Statistics | None = None
    noise: RowNoise | None = None
    """Changes rows as part of their publication; its reach must be part of `reads`."""
    defer: bool = True
    """Rows may travel in a task's second message."""
    arrays: RowArrays = field(default_factory=RowArrays, init=False)

    def __post_init__(self) -> None:
        if not self.optimizers:
            raise ValueError(f"table {self.name}: no optimizers; leave the table out if nothing of it is trained")
        if self.multiple > 1 and self.padding is None:
            raise ValueError(f"table {self.name}: padding to a multiple of {self.multiple} rows needs a padding row")
        for name, optimizer in self.optimizers.items():
            held = [p for group in optimizer.param_groups for p in group["params"]]
            if len(held) != 1 or held[0] is not self.parameters.get(name):
                raise ValueError(
                    f"table {self.name}: the optimizer of {name!r} must hold exactly the parameter of that name,"
                    f" it holds {len(held)} parameters"
                )
            group = optimizer.param_groups[0]
            unusual = [k for k in ("amsgrad", "maximize", "weight_decay") if group.get(k)]
            if unusual:
                raise ValueError(f"table {self.name}: Adam of {name!r} with {', '.join(unusual)} is not supported")
        sizes = {name: p.shape[0] for name, p in self.parameters.items()}
        if len(set(sizes.values())) != 1:
            raise ValueError(f"table {self.name}: parameters differ in their number of rows: {sizes}")
        self.arrays.add("versions", torch.zeros(self.count, dtype=torch.int32, device=self.device), 0)
        self.arrays.add("mask", torch.zeros(self.count, dtype=torch.uint8, device=self.device), 0)

    @property
    def names(self) -> tuple[str, ...]:
        """Trained parameters, in the order of the optimizers."""
        return tuple(self.optimizers)

    @property
    def count(self) -> int:
        """Number of rows, N."""
        return int(next(iter(self.parameters.values())).shape[0])

    @property
    def device(self) -> torch.device:
        return next(iter(self.parameters.values())).device

    @property
    def versions(self) -> Tensor:
        """Version of each row. [N] int32."""
        return self.arrays["versions"]

    def width(self, name: str) -> int:
        """Columns of a flattened row of a parameter."""
        shape = self.parameters[name].shape
        return int(torch.Size(shape[1:]).numel())

    def layout(self, step: int) -> RowLayout:
        """Columns that a contribution to this table carries at a step."""
        active = self.active_columns(step) if self.active_columns else {}
        names = self.names
        return RowLayout.of(names, [min(active.get(n, self.width(n)), self.width(n)) for n in names])

    def gradient(self, name: str) -> Tensor:
        """The accumulator of a parameter's gradient, zero between publications. [N, ...]."""
        key = f"gradient.{name}"
        if key not in self.arrays:
            self.arrays.add(key, torch.zeros_like(self.parameters[name].detach()), 0)
        return self.arrays[key]

    def adam_state(self, name: str) -> dict[str, Any]:
        """State of a parameter's Adam, initialised as stock Adam does at its first step."""
        optimizer, parameter = self.optimizers[name], self.parameters[name]
        state = optimizer.state[parameter]
        if not state:
            state["step"] = torch.tensor(0.0, dtype=torch.float32)
            state["exp_avg"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
            state["exp_avg_sq"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        return state

    def resize(self, parents: Tensor, version: int) -> None:
        """Follow a structural step that left `parents.shape[0]` rows, all at `version`."""
        if parents.shape[0] != self.count:
            raise RuntimeError(
                f"table {self.name}: a structural step left {self.count} rows but {parents.shape[0]} parents;"
                " the strategy must pass every tensor of its state through its operations"
            )
        self.arrays.resize(parents, {"versions": version})

    def state_tensors(self) -> dict[str, Tensor]:
        """Everything that the result depends on: parameters, moments, statistics. By name, sorted."""
        out: dict[str, Tensor] = {}
        for name, parameter in self.parameters.items():
            out[f"{self.name}.{name}"] = parameter.detach()
        for name in self.names:
            state = self.adam_state(name)
            for key in ("exp_avg", "exp_avg_sq", "step"):
                out[f"{self.name}.{name}.{key}"] = state[key]
        if self.statistics is not None:
            for key, value in self.statistics.arrays().items():
                out[f"{self.name}.statistics.{key}"] = value
        return dict(sorted(out.items()))


@dataclass(eq=False)
class PublishedStore:
    """All tables of a rank's replica. The first one holds the primitives."""

    tables: Sequence[RowTable]

    def __post_init__(self) -> None:
        names = [t.name for t in self.tables]
        if not names or len(set(names)) != len(names):
            raise ValueError(f"tables need different names, got {names}")

    def start(self, step: int) -> None:
        """Declare every row to be at version `step`."""
        for table in self.tables:
            table.versions.fill_(step)

    def digests(self) -> dict[str, int]:
        """A 63-bit hash of each state tensor, by name. Equal bits and shapes give equal hashes."""
        out = {}
        for table in self.tables:
            for name, tensor in table.state_tensors().items():
                data = tensor.detach().cpu().contiguous()
                digest = hashlib.blake2b(str((tuple(data.shape), data.dtype)).encode(), digest_size=8)
                digest.update(data.reshape(-1).view(torch.uint8).numpy().tobytes())
                out[name] = int.from_bytes(digest.digest(), "little") >> 1
        return out
