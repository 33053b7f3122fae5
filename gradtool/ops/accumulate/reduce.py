"""Medians and trimmed means of the gradients, computed a window of a block at a time."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from gradtool import tuning
from gradtool.backends.protocol import Addend
from gradtool.errors import BadInputError, UsageError
from gradtool.ops.beside import read

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from gradtool.backends.protocol import Trim
    from gradtool.engines.worker import Worker
    from gradtool.ops.accumulate.match import Contribution
    from gradtool.store.format.gradset import Selected
    from gradtool.store.io.blocks import Block

# A window of fewer elements costs more to read than to sort.
_FEWEST = 512


def reduced(
    trim: Trim,
    contributions: Sequence[Contribution],
    targets: Sequence[Selected],
    block: Block,
    worker: Worker,
    *,
    fills: bool,
) -> Iterator[tuple[memoryview, list[Addend]]]:
    """The trimmed means of what the contributions have for a block, as float64 addends of weight 1.

    The more contributions there are, the fewer elements are in a window, so that memory does not grow. With `fills`,
    a contribution is zero where it lacks a target.
    """
    larger = worker.backend.block_bytes // tuning.BLOCK_BYTES
    most = max(_FEWEST, larger * tuning.WINDOW_BYTES // (8 * len(contributions)))
    at = 0
    for window, elements in _windows(block, most):
        # All contributions at once.
        for source, addends in read(contributions, targets, window, worker, sys.maxsize, fills=fills):
            means = worker.backend.trimmed_means(source, addends, trim, elements)
            yield means.data.cast("B"), [Addend("F64", 0, elements, at, 1.0)]
        at += elements


def _windows(block: Block, most: int) -> Iterator[tuple[Block, int]]:
    """The spans of a block in parts of at most so many elements, with their number."""
    spans, elements = [], 0
    for span in block.spans:
        done = 0
        while done < span.elements:
            count = min(span.elements - done, most - elements)
            # Their offsets in the block are not used.
            spans.append(span._replace(start=span.start + done, elements=count))
            done, elements = done + count, elements + count
            if elements == most:
                yield block._replace(spans=spans), elements
                spans, elements = [], 0
    if spans:
        yield block._replace(spans=spans), elements


def refuse_too_few(trim: Trim, given: int) -> None:
    """Raise `UsageError` if nothing is left of so many gradients."""
    if trim.dropped is not None and given <= 2 * trim.dropped:
        what = f"--reduce trimmed={trim.dropped} drops {2 * trim.dropped} gradients at each element"
        raise UsageError(f"{what}, and {given} {'is' if given == 1 else 'are'} given; give more, or use a smaller K")


def refuse_nothing_left(
    trim: Trim, targets: Sequence[Selected], contributions: Sequence[Contribution], *, fills: bool
) -> None:
    """Raise `BadInputError` for a tensor that too few of the gradients have which are left."""
    if trim.dropped is None:
        return
    for number, target in enumerate(targets):
        count = sum(fills or number in contribution.tensors for contribution in contributions)
        if 0 < count <= 2 * trim.dropped:
            message = f"trimmed={trim.dropped} needs {2 * trim.dropped + 1} gradients with this tensor, and {count} "
            message += f"{'is' if count == 1 else 'are'} left; nothing written. Use a smaller K, or --reduce median"
            raise BadInputError(message, file=target.shard.path, tensor=target.tensor.name, code="too-few")
