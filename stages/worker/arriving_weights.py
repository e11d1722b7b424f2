"""The weights of a checkpoint that is still downloaded: how many of its layers can be computed now.

The `.bin` is in the order of use, and its bytes are verified from the start on (shm/arrival.py).  A layer can be
computed when its tensors are verified, and all that a step reads before its first layer: embeddings, RoPE tables.  What
is read after the last layer needs the whole file.
"""

from __future__ import annotations

import bisect
from pathlib import Path

from pipeline.errors import ModelUnavailable
from shm.arrival import ARRIVING, COMPLETE, Arrival, arrival_path
from shm.checkpoint import Checkpoint, CheckpointError, Index, load_index

SILENT_S = (
    30.0  # of a download that gives no sign of life: longer than any pause of its process that its lease survives
)
_AFTER_LAYERS = ("output.", "output_norm.", "cls.")


def layer_ends(index: Index) -> list[int]:
    """Bytes of the `.bin`, from its start, that each layer needs, and those before it. Raises `CheckpointError`."""
    numbers = {str(number): number for number in range(index.hyper.n_layers)}
    last = [0] * index.hyper.n_layers
    first = 0
    for tensor in index.tensors:
        end = tensor.offset + tensor.nbytes
        prefix, _, rest = tensor.name.partition(".")
        if prefix == "blk":
            number = numbers.get(rest.partition(".")[0])
            if number is None:
                raise CheckpointError(
                    f"index of {index.name}: tensor {tensor.name[:128]!r} is of no layer, the model has "
                    f"{index.hyper.n_layers} layers; publish the model again"
                )
            last[number] = max(last[number], end)
        elif not tensor.name.startswith(_AFTER_LAYERS):
            first = max(first, end)
    ends = []
    for end in last:
        first = max(first, end)
        ends.append(first)
    return ends


class ArrivingWeights:
    """Follows the record of a download."""

    def __init__(self, index: Index, arrival: Arrival) -> None:
        """Raises `CheckpointError` for an index with a tensor of no layer."""
        self._name = index.name
        self._arrival = arrival
        self._ends = layer_ends(index)
        self._nbytes = index.bin_bytes

    @property
    def is_complete(self) -> bool:
        """Whether all bytes are verified."""
        return self._arrival.state == COMPLETE and self._arrival.verified >= self._nbytes

    @property
    def n_layers(self) -> int:
        """Layers, from the first one on, that can be computed."""
        return bisect.bisect_right(self._ends, self._arrival.verified)

    def check(self) -> None:
        """Raise `ModelUnavailable` if no more bytes will come."""
        state = self._arrival.state  # loaded once: the download may complete at any time
        if state == COMPLETE and self._arrival.verified >= self._nbytes:
            return
        if state != ARRIVING:
            raise ModelUnavailable(f"the download of {self._name} has failed: load the model again", "model")
        if (silent_s := self._arrival.silent_s) > SILENT_S:
            raise ModelUnavailable(
                f"the download of {self._name} has given no sign of life for {silent_s:.0f} s, at most {SILENT_S:g} s "
                f"are waited for: load the model again",
                "model",
            )

    def close(self) -> None:
        """Unmap the record. Idempotent."""
        self._arrival.close()


def arriving_weights(index: Index, path: Path) -> ArrivingWeights | None:
    """The weights that belong to a `.bin` or `.idx`, if they are still downloaded.

    Raises `ModelUnavailable`, `CheckpointError`.
    """
    try:
        arrival = Arrival(arrival_path(path))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise ModelUnavailable(f"the record of a download cannot be read: {error}", "model") from None
    try:
        weights = ArrivingWeights(index, arrival)
    except CheckpointError:
        arrival.close()
        raise
    if weights.is_complete:
        weights.close()
        return None
    try:
        weights.check()
    except ModelUnavailable:
        weights.close()
        raise
    return weights


def open_arriving(index_path: Path) -> tuple[Checkpoint, ArrivingWeights] | None:
    """Map a checkpoint whose weights are still downloaded; None if they are all here. Raises `ModelUnavailable`."""
    try:
        index = load_index(index_path)
        weights = arriving_weights(index, index_path)
        if weights is None:
            return None
        try:
            return Checkpoint(index_path), weights
        except BaseException:
            weights.close()
            raise
    except (OSError, CheckpointError) as error:
        raise ModelUnavailable(str(error), "model") from None
