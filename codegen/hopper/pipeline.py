"""What the schedule of a pipeline of warpgroups is: all that planner.py decides, and all that is known when it is printed."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..cuda.schedule import Schedule, TilePlan
from ..tile import Carry, Loop
from .maps import Box
from .orders import Traversal
from .parts import Parts
from .pivots import Pivots

ROWS = 64  # of one warpgroup
MOST_CONSUMERS = 3
REGISTERS = {1: (0, 240), 2: (24, 240), 3: (32, 160)}  # of a thread: producer (0: they need not give any up), consumers
SHARING = (24, 232)  # where a multiprocessor holds two blocks of one consumer each
RESERVED = 1024  # bytes of shared memory that each block takes beside its own
WORK_SLOTS = 2
READY = 5  # named barrier: those in shared memory are there (1: consumers meet; 2 to 4: their turns)
MOST_FAILED = 256  # entries: one for each warp that found its tile to have failed


@dataclass
class Pipeline:
    """What the schedule decides beyond `Schedule`.  Places are bytes in shared memory."""

    schedule: Schedule
    loop: Loop
    parts: Parts
    carries: dict[int, Carry]  # late product → carry that it adds to
    boxes: dict[int, Box]
    consumers: int
    overlap: bool
    chain: bool
    order: str  # "dynamic", "static", "folded" or "grid": see choices.py
    tiles: int  # of work, in all
    blocks: int  # that are launched for them
    pivots: Pivots
    pivot: str  # "running", "lazy" or "frozen"
    traversal: Traversal
    sources: tuple[int, ...] = ()  # tiles that no product reads: late products' left operands are made of their elements
    parted: dict[int, str] = field(default_factory=dict)  # tiles of which each warpgroup has a part of its own, by this axis
    leader: dict[int, int] = field(default_factory=dict)  # tile → the one whose barriers and ring it shares
    together: int = 1  # blocks that a multiprocessor holds at the same time
    cluster: int = 1  # blocks that work on neighbouring tiles at the same time
    along: str = ""  # the grid axis on which they are neighbours
    spread: dict[int, str] = field(default_factory=dict)  # tiles that all need: each copies a part by this axis ("": panels)
    hold: bool = False  # results are rounded at the end of a tile of work, and stored beside the next one's first products
    turns: bool = False  # warpgroups take turns in issuing products
    peek: bool = False  # all elementwise work of an iteration, and the wait for the next tiles, go beside late products
    # so many steps of late products are issued first, the others behind some of the elementwise work (0: all at once)
    split: int = 0
    frozen: Parts | None = None  # of an iteration with pivots that stay
    drained: int = 0  # barrier: consumers have no tile left
    failed: int = 0  # tiles whose frozen pivots were too low: how many, and which
    full: dict[int, int] = field(default_factory=dict)  # tile → first of its barriers
    empty: dict[int, int] = field(default_factory=dict)
    work: int = 0
    work_full: int = 0
    work_empty: int = 0
    shared: int = 0

    @property
    def threads(self) -> int:
        return 128 * (self.consumers + 1)

    @property
    def dynamic(self) -> bool:
        return self.order == "dynamic"

    @property
    def works(self) -> int:
        """Tiles of work; those that a cluster's blocks work on at the same time count as one."""
        return self.tiles // self.cluster

    @property
    def workers(self) -> int:
        """Clusters (blocks, where there are none) that take one work after the other."""
        return self.blocks // self.cluster

    @property
    def registers(self) -> tuple[int, int]:
        """Of a thread: producer, consumers.  The producer has more where these do not need them."""
        if self.together > 1:
            return SHARING
        few, many = REGISTERS[self.consumers]
        spare = self.consumers == 2 and self.schedule.registers <= many - (8 if self.cluster > 1 else 60)
        return (few + 16, many - 8) if spare else (few, many)

    def common(self, vid: int) -> bool:
        """Does the cluster fill and release this tile's barriers together?"""
        return any(self.leader[v] == self.leader[vid] for v in self.spread)

    def arriving(self, vid: int) -> int:
        """Bytes of a tile (of one that is parted, of a part) for one block."""
        return self.boxes[vid].bytes * (self.cluster if self.spread.get(vid) else 1)


def stage_bytes(t: TilePlan) -> int:
    """Of shared memory, for one stage of a tile."""
    return -(-t.bytes // 1024) * 1024
