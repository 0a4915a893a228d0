"""Operations on rows of tensors: numba kernels on the CPU, torch operations with the same meaning elsewhere.

Tables of parameters keep the user's shapes ([N, 3], [N, 15, 3], ...); everything here sees a row as its flattened
trailing dimensions ([N, C]).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from odin_nerfstudio.runtime import row_kernels as kernels


def on_cpu(tensor: Tensor) -> bool:
    """Whether the numba kernels can work on this tensor."""
    return tensor.device.type == "cpu"


def flat(tensor: Tensor) -> Tensor:
    """The rows of a contiguous tensor, flattened, sharing memory and without gradient. [N, C]."""
    plain = tensor.detach()
    return plain.view(plain.shape[0], -1) if plain.numel() else plain.reshape(plain.shape[0], _columns(plain))


def _columns(tensor: Tensor) -> int:
    count = 1
    for size in tensor.shape[1:]:
        count *= size
    return count


def _np(tensor: Tensor) -> np.ndarray:
    return tensor.detach().numpy()


def ids_of_mask(mask: Tensor) -> Tensor:
    """Ascending rows whose mask byte is not zero. mask [N] uint8 -> [n] int32."""
    if on_cpu(mask):
        ids = np.empty(mask.shape[0] + 1, np.int32)
        return torch.from_numpy(ids[: kernels.mask_to_ids(_np(mask), ids)].copy())
    return mask.nonzero().flatten().int()


def gather(source: Tensor, ids: Tensor, out: Tensor) -> None:
    """out[k] = source[ids[k]], or as many of its leading columns as out has; rows of out beyond the ids are left alone.

    source [N, ...], ids [n] int32.
    """
    if on_cpu(source) and source.element_size() == 4:
        kernels.gather(_np(flat(source)), _np(ids), _np(flat(out)))
    else:
        flat(out)[: ids.shape[0]] = flat(source)[ids.long(), : _columns(out)]


def flag_rows(gradient: Tensor, width: int, flags: Tensor) -> None:
    """Raise bit 1 in flags of rows with a non-zero in the first `width` columns, bit 2 of rows with a non-finite
    one. gradient [>= n, ...], flags [n] uint8."""
    part = flat(gradient)[: flags.shape[0], :width]
    flags |= (part != 0).any(1).to(torch.uint8)
    flags |= (~torch.isfinite(part)).any(1).to(torch.uint8) * 2


def any_beyond(gradient: Tensor, width: int, count: int) -> bool:
    """Whether the first `count` rows have a non-zero right of the first `width` columns."""
    if on_cpu(gradient):
        return bool(kernels.any_beyond(_np(flat(gradient)), width, count))
    return bool((flat(gradient)[:count, width:] != 0).any())


def pack_active(
    gradients: Sequence[Tensor | None], widths: Sequence[int], ids: Tensor, first: Tensor | None
) -> tuple[Tensor, int, Tensor, bool]:
    """Rows of which some gradient is not zero, those whose id is marked in `first` in front, ascending within each
    part.

    Args:
        gradients: Gradients of the leaves, contiguous float32, None for zero. [>= n, ...] each.
        widths: How many leading columns of each matter.
        ids: Row of the table of each row of the leaves. [n] int32, ascending.
        first: Rows of the table to put in front. [N] uint8. None: all.

    Returns:
        Ids [m] int32; how many are in front; the leaves' columns side by side [m, sum of widths] float32; whether a
        value is not finite.
    """
    n, total = ids.shape[0], sum(widths)
    if on_cpu(ids):
        from odin_nerfstudio.rendering.cpu import buffers  # defines the rasterizer's kernels: not where CUDA renders

        out = buffers.empty((n + 1, total))
        out_ids = np.empty(n, np.int32)
        plain = [None if g is None else flat(g) for g in gradients]
        leaves = np.array(
            [(0, 0, w) if g is None else (g.data_ptr(), g.shape[1], w) for g, w in zip(plain, widths)], np.int64
        ).reshape(-1, 3)
        marks = np.empty(0, np.uint8) if first is None else _np(first)
        args = (out.view(np.uint32), out_ids)
        front, bad = kernels.pack_active(leaves, _np(ids), marks, True, *args, 0)
        end = front
        if first is not None:
            end, also = kernels.pack_active(leaves, _np(ids), marks, False, *args, front)
            bad = bad or also
        return torch.from_numpy(out_ids[:end]), int(front), torch.from_numpy(out[:end]), bool(bad)
    flags = torch.zeros(n, dtype=torch.uint8, device=ids.device)
    for gradient, width in zip(gradients, widths):
        if gradient is not None:
            flag_rows(gradient, width, flags)
    active = (flags & 1) != 0
    early = active if first is None else active & (first[ids.long()] != 0)
    order = torch.cat((early.nonzero().flatten(), (active & ~early).nonzero().flatten()))
    columns = [
        torch.zeros((order.shape[0], width), device=ids.device) if g is None else flat(g)[order, :width]
        for g, width in zip(gradients, widths)
    ]
    values = torch.cat(columns, dim=1) if columns else torch.zeros((order.shape[0], 0), device=ids.device)
    return ids[order], int(early.sum()), values, bool((flags >= 2).any())


def scatter_add(target: Tensor, ids: Tensor, rows: Tensor, offset: int, width: int, mask: Tensor | None) -> None:
    """target[ids[k]] += rows[k, offset : offset + width] on the first `width` columns, where the mask allows.

    target [N, ...], ids [n] int32 unique, rows [n, C] float32, mask [N] uint8 or None for all.
    """
    if on_cpu(target):
        args = (_np(flat(target)), _np(ids), _np(rows), offset, width)
        if mask is None:
            kernels.scatter_add(*args)
        else:
            kernels.scatter_add_masked(*args, _np(mask))
        return
    index, values = ids.long(), rows[:, offset : offset + width]
    if mask is not None:
        keep = mask[index] != 0
        index, values = index[keep], values[keep]
    table = flat(target)[:, :width]
    table[index] = table[index] + values


def clear(target: Tensor, ids: Tensor, width: int, mask: Tensor | None) -> None:
    """target[ids[k]] = 0 on the first `width` columns, where the mask allows."""
    if on_cpu(target):
        if mask is None:
            kernels.clear(_np(flat(target)), _np(ids), width)
        else:
            kernels.clear_masked(_np(flat(target)), _np(ids), width, _np(mask))
        return
    index = ids.long() if mask is None else ids.long()[mask[ids.long()] != 0]
    flat(target)[index, :width] = 0


def publishable(versions: Tensor, step: int, pending: Tensor, out: Tensor) -> int:
    """out[i] = versions[i] == step and pending[i] == 0; returns how many. All [N]; int32, uint8, uint8."""
    if on_cpu(versions):
        return int(kernels.publishable(_np(versions), step, _np(pending), _np(out)))
    out.copy_((versions == step) & (pending == 0))
    return int(out.sum())


def fill_at(target: Tensor, ids: Tensor, value: int) -> None:
    """target[ids[k]] = value. target [N], ids [n] int32."""
    if on_cpu(target):
        kernels.fill_at(_np(target), _np(ids), value)
    else:
        target[ids.long()] = value


def meet(first: Tensor, second: Tensor) -> bool:
    """Whether two ascending lists of ids share one. [n], [m] int32."""
    if first.shape[0] < second.shape[0]:
        first, second = second, first
    if not second.shape[0]:
        return False
    at = torch.searchsorted(first, second).clamp_(max=first.shape[0] - 1)
    return bool((first[at] == second).any())


def count_older(versions: Tensor, ids: Tensor, step: int) -> int:
    """Number of ids whose version is below `step`."""
    if on_cpu(versions):
        return int(kernels.count_older(_np(versions), _np(ids), step))
    return int((versions[ids.long()] < step).sum())


def count_newer(versions: Tensor, ids: Tensor, step: int) -> int:
    """Number of ids whose version is above `step`."""
    if on_cpu(versions):
        return int(kernels.count_newer(_np(versions), _np(ids), step))
    return int((versions[ids.long()] > step).sum())


def blocked(versions: Tensor, ids: Tensor, step: int, pending: Tensor) -> Tensor:
    """The ids whose update of `step` is neither applied nor free of pending contributors. [m] int32."""
    if on_cpu(versions):
        out = np.empty(ids.shape[0], np.int32)
        return torch.from_numpy(out[: kernels.blocked(_np(versions), _np(ids), step, _np(pending), out)].copy())
    index = ids.long()
    return ids[(versions[index] <= step) & (pending[index] != 0)]


def add_counts(pending: Tensor, ids: Tensor, amount: int) -> None:
    """pending[ids[k]] += amount, on uint8 counts. Ids are unique."""
    if on_cpu(pending):
        kernels.add_counts(_np(pending), _np(ids), amount)
    else:
        index = ids.long()
        pending[index] = (pending[index].int() + amount).to(torch.uint8)


def count_inside(mask: Tensor, ids: Tensor) -> int:
    """Number of ids whose mask byte is not zero."""
    return int(ids.shape[0]) - count_outside(mask, ids)


def count_outside(mask: Tensor, ids: Tensor) -> int:
    """Number of ids whose mask byte is zero."""
    if on_cpu(mask):
        return int(kernels.any_outside(_np(mask), _np(ids)))
    return int((mask[ids.long()] == 0).sum())


def adds_statistics(*tensors: Tensor) -> bool:
    """Whether `add_statistics` takes these tensors: contiguous float32 vectors on the CPU."""
    return all(on_cpu(t) and t.dtype == torch.float32 and t.dim() == 1 and t.is_contiguous() for t in tensors)


def add_statistics(
    gradients: Tensor, counts: Tensor, largest: Tensor | None, ids: Tensor, norms: Tensor, radii: Tensor
) -> None:
    """gradients[ids] += norms, counts[ids] += 1, largest[ids] = max(largest[ids], radii), of unique ids [n] int32."""
    kept = np.empty(0, np.float32) if largest is None else _np(largest)
    kernels.add_statistics(_np(gradients), _np(counts), kept, _np(ids), _np(norms), _np(radii))
