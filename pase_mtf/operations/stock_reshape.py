"""What stock Mesh-TF does to the slices of a tensor that is reshaped, without lowering anything.

`mtf.ops.ReshapeOperation.lower` splits, exchanges and joins slices axis by axis. Where an axis splits a dim that
another axis has split already, and that other one is joined first, the shards come out in the wrong order and the
values are wrong, silently: x=4 on axis a renamed to y=4 on axis b. Here the same steps are followed, with the order of
the splits.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

__all__ = ["order_of_axes_tells", "reshape_problem"]

_Dims = Sequence[tuple[str, int]]


def _cumprods(dims: _Dims) -> list[int]:
    result, product = [], 1
    for _, size in dims:
        result.append(product)
        product *= size
    return result


def _dims_at(cumprods: list[int], cumprod: int) -> list[int]:
    """The dims at that place; mtf.Shape.cumprod_to_tensor_axis takes the last of them."""
    return [number for number, value in enumerate(cumprods) if value == cumprod]


def reshape_problem(old: _Dims, new: _Dims, axis_of: Mapping[str, int], sizes: Sequence[int]) -> tuple[str, bool]:
    """Why stock Mesh-TF cannot reshape under a layout.

    Args:
      old, new: (name, size) of the dims before and after; no two dims of either on one axis.
      axis_of: dim name -> index of its mesh axis.
      sizes: of the mesh axes.

    Returns:
      (reason, moved): the reason is "" where values come out right; moved: slices were split, exchanged or joined, so
      that a pending sum is reduced first.
    """
    before, after = _cumprods(old), _cumprods(new)
    place_old: dict[int, int] = {}  # axis -> the place of what it splits, before and after
    place_new: dict[int, int] = {}
    local = [size for _, size in old]  # sizes of the slices, before the reshape
    axes_of: list[list[int]] = [[] for _ in old]  # the axes that split each dim, outermost first
    for number, (name, size) in enumerate(old):
        if name in axis_of:
            axis = axis_of[name]
            if size % sizes[axis]:
                return f"{name}={size} does not divide by {sizes[axis]}", False
            place_old[axis] = before[number]
            local[number] //= sizes[axis]
            axes_of[number] += [axis] if sizes[axis] > 1 else []
    for number, (name, size) in enumerate(new):
        if name in axis_of:
            if size % sizes[axis_of[name]]:
                return f"{name}={size} does not divide by {sizes[axis_of[name]]}", False
            place_new[axis_of[name]] = after[number]
    moving = [axis for axis in range(len(sizes)) if place_old.get(axis) != place_new.get(axis)]
    added = [axis for axis in moving if axis not in place_old]
    joined = [axis for axis in moving if axis not in place_new]
    exchanged = [axis for axis in moving if axis in place_old and axis in place_new]

    def split(axis: int, place: int) -> bool:
        if local[place] % sizes[axis]:
            return False
        local[place] //= sizes[axis]
        axes_of[place] += [axis] if sizes[axis] > 1 else []
        return True

    def join(axis: int) -> bool:
        place = _dims_at(before, place_old[axis])[-1]
        # Without elements, dims behind an empty one begin at one place, and nothing is in a wrong order.
        right = sizes[axis] == 1 or 0 in local or axes_of[place][-1] == axis
        local[place] *= sizes[axis]
        if axis in axes_of[place]:
            axes_of[place].remove(axis)
        return right

    wrong = "a dim moves from one mesh axis to another, which gives wrong values"
    for axis in added:
        # Where there is none, it is split after the reshape, when every dim has the one axis that it ends with.
        for place in _dims_at(before, place_new[axis])[-1:]:
            if split(axis, place):
                continue
            return f"{_text(old[place])} does not divide where {_name_at(new, axis_of, axis)} is split", True
    for axis in exchanged:
        places = _dims_at(before, place_new[axis])
        if not places:
            return f"{_name_at(new, axis_of, axis)} begins inside a dim of the tensor before it", True
        place = places[-1]
        if not split(axis, place):
            return f"{_text(old[place])} does not divide where {_name_at(new, axis_of, axis)} is split", True
        if not join(axis):
            return wrong, True
    for axis in joined:
        if not join(axis):
            return wrong, True
    if any(len(axes) > 1 for axes in axes_of):
        return wrong, True
    return "", bool(moving)


def order_of_axes_tells(old: _Dims, new: _Dims, whole: Collection[str]) -> bool:
    """Whether it may count which of two mesh axes comes first: one leaves the place of a dim that the other takes.

    Args:
      old, new: of `reshape_problem`.
      whole: names of dims that are never split.
    """
    before, after = _cumprods(old), _cumprods(new)
    names_before, names_after = ({name for name, _ in dims} for dims in (old, new))
    moves = set()
    for (name, size), place in zip(old, before, strict=True):
        for (other, parts), target in zip(new, after, strict=True):
            alike = name == other or (name not in names_after and other not in names_before)
            if (alike and place != target and target in before and min(size, parts) > 1
                    and name not in whole and other not in whole):
                moves.add((place, target))
    return any(one[1] == other[0] and one[0] != other[1] for one in moves for other in moves)


def _text(dim: tuple[str, int]) -> str:
    return f"{dim[0]}={dim[1]}"


def _name_at(dims: _Dims, axis_of: Mapping[str, int], axis: int) -> str:
    return next(name for name, _ in dims if axis_of.get(name) == axis)
