"""How receive slots and their flags lie in one symmetric allocation, and what the flags mean.

Every rank has the same slots. There are two kinds of flags, of 32 bits:

ready     beside a slot, on the receiver: 1 when the bytes have arrived.
granted   on the sender, one for each receiver and slot: 1 when it may fill that slot.

    receiver    after its last use of the slot: granted = 1 (on the sender)
    sender      wait granted == 1; granted = 0; copy into the slot; ready = 1 (on the receiver)
    receiver    wait ready == 1; ready = 0; use the bytes

Both waits look at local memory and who waits for a flag undoes it, so the same operations can be repeated,
also by a CUDA graph, and memory full of zeros is the state to begin with. Who fills a slot may change from
one exchange to the next.
"""

from __future__ import annotations

from dataclasses import dataclass

ALIGNMENT = 256
_FLAG = 4
_STEPS_PER_OCTAVE = 8


def _round_up(number: int, step: int) -> int:
    return -(-number // step) * step


def grown(nbytes: int) -> int:
    """Size of a slot that had to grow: up to an eighth more, so that slow growth allocates seldom."""
    step = max(ALIGNMENT, 2 ** (max(nbytes, 1).bit_length() - 1) // _STEPS_PER_OCTAVE)
    return _round_up(nbytes, step)


@dataclass(frozen=True)
class SlotLayout:
    """Byte offsets in an allocation of ``slots`` slots of ``slot_bytes``, a multiple of ALIGNMENT, for a mesh
    of ``ranks``."""

    slots: int
    slot_bytes: int
    ranks: int

    @staticmethod
    def of(slots: int, nbytes: int, ranks: int) -> SlotLayout:
        """The smallest one that holds ``slots`` slots of ``nbytes``."""
        return SlotLayout(slots, _round_up(nbytes, ALIGNMENT), ranks)

    @property
    def nbytes(self) -> int:
        return self.slots * self.slot_bytes + _round_up((1 + self.ranks) * self.slots * _FLAG, ALIGNMENT)

    def data(self, slot: int) -> int:
        return slot * self.slot_bytes

    def ready(self, slot: int) -> int:
        return self.slots * self.slot_bytes + slot * _FLAG

    def granted(self, receiver: int, slot: int) -> int:
        return self.ready((1 + receiver) * self.slots + slot)

    def holds(self, slots: int, nbytes: int) -> bool:
        return slots <= self.slots and nbytes <= self.slot_bytes

    def grown_to(self, slots: int, nbytes: int) -> SlotLayout:
        """One that also holds ``slots`` slots of ``nbytes``."""
        slot_bytes = self.slot_bytes if nbytes <= self.slot_bytes else grown(nbytes)
        return SlotLayout(max(slots, self.slots), slot_bytes, self.ranks)
