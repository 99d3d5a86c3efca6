"""What a trial left behind: tensors that were not there before it, and who holds them."""

from __future__ import annotations

import gc
import logging

import torch

from autofit.step.holders import holder_of
from autofit.units import format_bytes

logger = logging.getLogger(__name__)

# Less than this is a counter or a random state, and no leak that anybody would notice.
NEGLIGIBLE_BYTES = 4096


class Leftovers:
    """Looks after every trial at the tensors of `device` that Python knows of; `notes` say what stayed, once a holder.

    Nothing of autofit's own stays. What does is held by code of the user's, outside of the model: a global list of
    outputs, say, which would fill the device in training too.
    """

    def __init__(self, device: torch.device) -> None:
        self.notes: list[str] = []
        self._device = device
        self._known = {key for key, _ in self._tensors()}
        self._said: set[str] = set()

    def look(self, after: str) -> int:
        """Bytes that have stayed since the last look, after what is named; to be called when garbage was collected."""
        found = self._tensors()
        new = {key: tensor for key, tensor in found if key not in self._known}
        self._known = {key for key, _ in found}
        nbytes = sum(tensor.untyped_storage().nbytes() for tensor in new.values())
        if nbytes > NEGLIGIBLE_BYTES:
            self._say(after, nbytes, new, ignored=(found, new))
        return nbytes

    def _say(self, after: str, nbytes: int, new: dict[int, torch.Tensor], *, ignored: tuple[object, ...]) -> None:
        largest = max(new.values(), key=lambda tensor: tensor.untyped_storage().nbytes())
        holder = holder_of(largest, ignored=ignored) or "an autograd graph or code that Python cannot see"
        if holder in self._said:
            return
        self._said.add(holder)
        dtype = str(largest.dtype).removeprefix("torch.")
        note = (
            f"After {after}, {format_bytes(nbytes)} stayed in {len(new)} tensor(s), such as {dtype} "
            f"{list(largest.shape)}, held by {holder}. Training would hold more with every step."
        )
        self.notes.append(note)
        logger.warning("%s", note)

    def _tensors(self) -> list[tuple[int, torch.Tensor]]:
        """Plain tensors of the device by storage: not those without values, as predictions use."""
        return [
            (item.untyped_storage()._cdata, item)
            for item in gc.get_objects()
            if type(item) is torch.Tensor and item.layout is torch.strided and item.device == self._device
        ]
