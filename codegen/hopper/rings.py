"""Rings of stages in shared memory as text: cursors over them, and the barriers on which producer and consumers meet.

A tile has a barrier for each stage that says that it is full, and one that says that it is empty again; tiles that always come and
go together share those of one of them (their *leader*).  Of a tile that is *parted* each warpgroup has a part with barriers of its own."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ..cuda.schedule import TilePlan
from ..cuda.text import C_TYPES
from ..tile import Contract
from .pipeline import stage_bytes
from .works import Works


class Rings(Works):
    def tiles_of(self, products: Iterable[Contract]) -> set[int]:
        """Tiles that these products read from shared memory."""
        return {v for s in products for v in self.s.contracts[s.out.id].tiles}

    def led(self) -> list[tuple[int, TilePlan]]:
        """Tiles that have barriers of their own."""
        return [(v, t) for v, t in self.s.tiles.items() if self.pipe.leader[v] == v]

    def rings(self, tiles: Iterable[int], suffix: str = "") -> dict[int, str]:
        """Cursors over the stages of these tiles, declared; tiles that share barriers share one."""
        out: dict[int, str] = {}
        for v in tiles:
            leader = self.pipe.leader[v]
            out[v] = out[leader] if leader in out else self.ring(leader, suffix)
            out.setdefault(leader, out[v])
        return out

    def ring(self, vid: int, suffix: str = "") -> str:
        """Declares a cursor over a tile's stages."""
        plan = self.s.tiles[vid]
        name = self.names.new(f"{self.pointer[plan.load.buffer]}_ring{suffix}")
        self.t(f"Ring<{plan.stages}> {name};")
        return name

    def led_rings(self, rings: Mapping[int, str]) -> list[tuple[int, str]]:
        """Of these rings those that are a tile's own."""
        return [(v, ring) for v, ring in rings.items() if self.pipe.leader[v] == v]

    def place(self, vid: int, ring: str, part: str = "group") -> str:
        """Which of a tile's barriers."""
        if vid not in self.pipe.parted:
            return f"{ring}.slot()"
        return part if self.s.tiles[vid].stages == 1 else f"({ring}.slot() * {self.pipe.consumers} + {part})"

    def wait_full(self, vid: int, ring: str) -> None:
        self.t(f"barrier_wait({self.pipe.full[vid]} + 8 * {self.place(vid, ring)}, {ring}.parity());")

    def release(self, vid: int, ring: str) -> None:
        barrier = f"{self.pipe.empty[vid]} + 8 * {self.place(vid, ring)}"
        if self.pipe.common(vid):
            self.t(f"barrier_arrive_at_if(lane < {self.pipe.cluster}, {barrier}, lane);  // in each block of the cluster")
        else:
            self.t(f"barrier_arrive_if(lane == 0, {barrier});")

    @staticmethod
    def at_stage(plan: TilePlan, ring: str) -> list[str]:
        """Bytes from a tile's first stage to the one that the cursor is at, as a term of a sum."""
        return [f"{ring}.slot() * {stage_bytes(plan)}"] if plan.stages > 1 else []

    def panels(self, vid: int) -> str:
        """The first stage of a tile (of one that is parted, the first part)."""
        plan = self.s.tiles[vid]
        ctype = C_TYPES[self.p.buffer(plan.load.buffer).dtype]
        rows = plan.rows // (self.pipe.consumers if vid in self.pipe.parted else 1)
        return f"Panels<{ctype}, {rows}, {self.pipe.boxes[vid].panels * 64}>{{{plan.offset}}}"
