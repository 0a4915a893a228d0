"""Operations on gradient mass: numba kernels on the CPU, torch operations with the same meaning elsewhere.

A view's mass is a pair of tensors: rows, unique, in any order ([n] int32), and their shares ([n] bfloat16).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from odin_nerfstudio.runtime import evidence_kernels as kernels
from odin_nerfstudio.runtime.rows import on_cpu

Mass = tuple[Tensor, Tensor]


def halves(shares: Tensor) -> np.ndarray:
    """The bits of bfloat16 shares on the CPU, sharing memory. [n] uint16."""
    return shares.view(torch.int16).numpy().view(np.uint16)


def _shares(bits: np.ndarray) -> Tensor:
    return torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16)


def of_rows(parts: Sequence[Mass], spans: Sequence[tuple[int, int]], tail: float, largest: float) -> Mass:
    """Mass of a contribution: the L1 norm of each row over some columns, as shares of their sum, without the smallest.

    Args:
        parts: Ids [n] int32 and gradient rows [n, C] of each part.
        spans: First column and width of what counts.
        tail: Sum of the shares that may be dropped.
        largest: No share of this size or above is dropped.
    """
    ids = torch.cat([p for p, _ in parts]) if parts else torch.empty(0, dtype=torch.int32)
    if on_cpu(ids):
        mass, at = np.empty(ids.shape[0], np.float32), 0
        columns = np.array(spans, np.int64).reshape(-1, 2)
        for part, values in parts:
            kernels.row_mass(values.numpy(), columns, mass[at : at + part.shape[0]])
            at += part.shape[0]
        kept, shares = np.empty(ids.shape[0], np.int32), np.empty(ids.shape[0], np.uint16)
        n = kernels.distil(ids.numpy(), mass, tail, largest, kept, shares)
        return torch.from_numpy(kept[:n].copy()), _shares(shares[:n].copy())
    rows = torch.cat([values for _, values in parts])
    total = torch.stack([rows[:, first : first + width].abs().sum(1) for first, width in spans]).sum(0)
    share = (total.double() / total.double().sum().clamp(min=1e-300)).float()
    exponent = (share.view(torch.int32) >> 23) & 255
    sums = torch.zeros(kernels.EXPONENTS, dtype=torch.float64, device=share.device).index_add_(
        0, exponent.long(), share.double()
    )
    bound = int(np.float32(largest).view(np.uint32) >> 23)
    cut = min(int((sums.cumsum(0) <= tail).sum()), bound)
    keep = (share > 0) & (exponent >= cut)
    return ids[keep], share[keep].to(torch.bfloat16)


class Children:
    """Where rows went in a structural step."""

    def __init__(self, parents: Tensor, before: int) -> None:
        """parents: old row of each new one [N_new] int64; before: number of old rows."""
        self.same = parents.shape[0] == before and bool(
            torch.equal(parents, torch.arange(before, device=parents.device))
        )
        self._starts = torch.zeros(before + 1, dtype=torch.int64, device=parents.device)
        if self.same:
            self._children = parents
        elif on_cpu(parents):
            self._children = torch.empty(parents.shape[0], dtype=torch.int32)
            kernels.children_of(parents.numpy(), self._starts.numpy(), self._children.numpy())
        else:
            torch.cumsum(torch.bincount(parents, minlength=before), 0, out=self._starts[1:])
            self._children = torch.argsort(parents, stable=True).int()

    def follow(self, mass: Mass) -> Mass:
        """A view's mass over the new rows: children share their parent's in equal parts, pruned rows are gone."""
        ids, shares = mass
        if self.same:
            return mass
        if on_cpu(ids):
            starts = self._starts.numpy()
            n = kernels.count_children(ids.numpy(), starts)
            new_ids, new_shares = np.empty(n, np.int32), np.empty(n, np.uint16)
            kernels.follow(ids.numpy(), halves(shares), starts, self._children.numpy(), new_ids, new_shares)
            return torch.from_numpy(new_ids), _shares(new_shares)
        begin = self._starts[ids.long()]
        counts = self._starts[ids.long() + 1] - begin
        source = torch.repeat_interleave(torch.arange(ids.shape[0], device=ids.device), counts)
        within = torch.arange(source.shape[0], device=ids.device) - (counts.cumsum(0) - counts)[source]
        return self._children[begin[source] + within], (shares[source].float() / counts[source]).to(torch.bfloat16)


def mark_late(
    versions: Tensor, ids: Tensor, step: int, pending: Tensor, delay: int, late: Tensor, out: Tensor, n: int
) -> int:
    """late[i] = delay for ids that wait for `step` and are not marked yet; appends them to out[n:], returns the end.

    versions [N] int32, ids [m] int32, pending [N] uint8, late [N] uint8, out [>= m] int32.
    """
    if on_cpu(versions):
        args = (versions.numpy(), ids.numpy(), step, pending.numpy(), delay, late.numpy(), out.numpy(), n)
        return int(kernels.mark_late(*args))
    index = ids.long()
    new = ids[(versions[index] <= step) & (pending[index] != 0) & (late[index] == 0)]
    late[new.long()] = delay
    out[n : n + new.shape[0]] = new
    return n + int(new.shape[0])


def add(total: Tensor, mass: Mass, member: Tensor) -> None:
    """total[i] += share of i, for rows whose byte in `member` is not zero. total [N] float32, member [N] uint8."""
    ids, shares = mass
    if on_cpu(total):
        kernels.add_known(total.numpy(), ids.numpy(), halves(shares), member.numpy())
    else:
        inside = ids[member[ids.long()] != 0].long()
        total.index_add_(0, inside, shares[member[ids.long()] != 0].float())


def add_unknown(total: Tensor, ids: Tensor, member: Tensor) -> None:
    """total[i] += 1 for the ids whose byte in `member` is not zero."""
    if on_cpu(total):
        kernels.add_unknown(total.numpy(), ids.numpy(), member.numpy())
    else:
        total[ids[member[ids.long()] != 0].long()] += 1


def meets(ids: Tensor, member: Tensor, total: Tensor) -> bool:
    """Whether one of the ids has a byte in `member` and a `total` above zero."""
    if on_cpu(total):
        return bool(kernels.meets(ids.numpy(), member.numpy(), total.numpy()))
    return bool(((member[ids.long()] != 0) & (total[ids.long()] > 0)).any())


def overlap(mass: Mass | None, late_ids: Tensor, late: Tensor, total: Tensor) -> tuple[float, float, int]:
    """Over late rows: sum of min(share, total), the largest of these, and how many are not zero.

    mass: the reader's; None: a share of 1 everywhere. late_ids [m] int32, late [N] uint8: the same rows marked.
    """
    if on_cpu(total):
        if mass is None:
            harm, peak, n = kernels.overlap_unknown(late_ids.numpy(), total.numpy())
        else:
            harm, peak, n = kernels.overlap_known(mass[0].numpy(), halves(mass[1]), late.numpy(), total.numpy())
        return float(harm), float(peak), int(n)
    if mass is None:
        least = total[late_ids.long()].clamp(max=1)
    else:
        index = mass[0].long()
        least = torch.minimum(mass[1].float(), total[index]) * (late[index] != 0)
    return float(least.double().sum()), float(least.max()) if least.numel() else 0.0, int((least > 0).sum())
