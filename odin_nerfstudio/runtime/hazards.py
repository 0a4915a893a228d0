"""The three hazards, each as a named check.

- RAW: a task reads a primitive with a pending older update. `raw_rows` finds them; gates wait for them.
- WAW: two steps' updates to one primitive out of order. Excluded by staging per step and publishing a row for step s
  only at version s; `check_publication` and `check_arrival` prove it where it could break.
- WAR: publishing over rows that a running task still reads. Excluded by the shadow's own copy; `check_shadow` proves
  it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from torch import Tensor

from odin_nerfstudio.runtime import rows

if TYPE_CHECKING:
    from odin_nerfstudio.runtime.store import RowTable


class HazardError(RuntimeError):
    """A hazard that the runtime excludes has happened: a bug, or candidate sets that are not complete."""


def raw_rows(versions: Tensor, ids: Tensor, step: int, pending: Tensor) -> Tensor:
    """RAW: the ids whose update of `step` is not applied and may still change. versions [N], pending [N] -> [m]
    int32."""
    return rows.blocked(versions, ids, step, pending)


def check_read(table: RowTable, ids: Tensor, step: int, max_delay: int = 0) -> None:
    """RAW: every row that a task of `step` is about to read has version `step`, or lacks at most `max_delay` updates.

    Raises:
        HazardError: Some row lacks more, or is newer.
    """
    old, new = rows.count_older(table.versions, ids, step - max_delay), rows.count_newer(table.versions, ids, step)
    if old or new:
        late = f" (more than {max_delay} steps)" if max_delay else ""
        raise HazardError(
            f"RAW: a task of step {step} would read {old} older{late} and {new} newer of {ids.shape[0]} rows of table"
            f" {table.name}"
        )


def check_delayed(table: RowTable, ids: Tensor, step: int, admitted: int) -> None:
    """RAW: the rows that a task of `step` is about to read late are as many as its gate has admitted and counted.

    Raises:
        HazardError: They are not.
    """
    late = rows.count_older(table.versions, ids, step)
    if late != admitted:
        raise HazardError(
            f"RAW: a task of step {step} would read {late} rows of table {table.name} late, {admitted} were admitted"
        )


def check_arrival(table: RowTable, ids: Tensor, step: int, lane: int) -> None:
    """WAW: no row of an arriving contribution has been published for its step already.

    Raises:
        HazardError: Some row has; the candidates that held the row back were not complete.
    """
    if not ids.shape[0]:
        return
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= table.count:
        raise HazardError(
            f"step {step} lane {lane}: ids {low} to {high} leave table {table.name} of {table.count} rows;"
            " the ranks' numbers of rows differ"
        )
    newer = rows.count_newer(table.versions, ids, step)
    if newer:
        raise HazardError(
            f"WAW: step {step} lane {lane} contributes to {newer} rows of table {table.name} that were published"
            " without it"
        )


def check_within_candidates(table: RowTable, candidates: Tensor, ids: Tensor, step: int, lane: int) -> None:
    """The active set lies within the candidate set, on which everything else rests.

    Raises:
        HazardError: It does not.
    """
    outside = rows.count_outside(candidates, ids)
    if outside:
        raise HazardError(
            f"step {step} lane {lane}: {outside} active rows of table {table.name} were not candidates;"
            " the read rule is wrong"
        )


def check_candidates_first(step: int, started: bool) -> None:
    """WAW: candidates of a step are taken before any of its rows is published.

    Raises:
        HazardError: Rows of the step have been published.
    """
    if started:
        raise HazardError(f"WAW: candidates of step {step} were asked for after some of its rows were published")


def check_publication(table: RowTable, step: int) -> None:
    """WAW: a whole step is published only over rows that all have its version.

    Raises:
        HazardError: Some have not.
    """
    low, high = int(table.versions.min()), int(table.versions.max())
    if low != step or high != step:
        raise HazardError(f"WAW: step {step} would be published over versions {low} to {high} of table {table.name}")


def check_shadow(table: RowTable, leaves: Mapping[str, Tensor]) -> None:
    """WAR: a task's leaves share no memory with the published state.

    Raises:
        HazardError: One does.
    """
    stored = {p.untyped_storage().data_ptr() for p in table.parameters.values()}
    filled = {name: leaf for name, leaf in leaves.items() if leaf.numel() > 0}  # those without columns have no memory
    shared = [name for name, leaf in filled.items() if leaf.untyped_storage().data_ptr() in stored]
    if shared:
        raise HazardError(f"WAR: the shadow of table {table.name} shares memory with the published {', '.join(shared)}")
