"""A pipeline of warpgroups as CUDA C++: the kernel around its producer (producer.py) and its consumers (consumer.py)."""

from __future__ import annotations

import re

from ..cuda.kernel import Function, Parameter
from ..cuda.text import Text
from .consumer import Consumer
from .maps import tensor_map
from .pipeline import READY, WORK_SLOTS
from .producer import Producer

# variables that the text below names itself
_LOCALS = set(
    "rank group work works coming next exact again failures fresh alone pending fits moves edge start at_edge at_start".split()
)


class Warpgroups(Producer, Consumer):
    """Prints one kernel."""

    def run(self) -> Function:
        p, pipe = self.p, self.pipe
        self.names.taken |= _LOCALS
        self.symbols()
        first: list[Parameter] = []
        for vid, box in pipe.boxes.items():
            load = self.s.tiles[vid].load
            name = self.map_names[vid] = self.names.new(f"{self.pointer[load.buffer]}_map")
            first.append(Parameter(tensor_map(p.buffer(load.buffer), box), "MAP", name))
        if pipe.dynamic:
            self.counter = self.names.new("counter")
            first.append(Parameter(f"{p.name}.counter", "u32*", self.counter))
        self.parameters[:0] = first
        body = Text()
        self.t = body
        body.depth = 1
        self.setup()
        with body.block("if (warp_index() < 4)"):
            few, many = pipe.registers
            if pipe.cluster == 1:
                body(f"named_arrive({READY}, {pipe.threads});  // who sets barriers up need not wait: copies start at once")
            if few:
                body(f"fewer_registers<{few}>();")
            with body.block("if (warp_index() == 0 && elect_one())"):
                outer, self.names = self.names, self.names.inner()
                self.produce()
                self.names = outer
        with body.block("else"):
            if pipe.cluster == 1:
                body(f"named_sync({READY}, {pipe.threads});")
            if few:
                body(f"more_registers<{many}>();")
            self.consume()
        if pipe.cluster > 1:
            body("cluster_sync();  // the others may still copy to this block, and arrive here")
        return self.finished(body)

    def finished(self, body: Text) -> Function:
        text = str(body)
        self.parameters = [x for x in self.parameters if x.type == "MAP" or self.used(text, x)]
        f = self.function_text(body, self.pipe.threads, self.pipe.together, self.pipe.shared)
        return Function(f.name, f.text, f.parameters, self.pipe.blocks, f.threads, f.shared, f.packed, self.pipe.cluster, self.pipe.together)

    def used(self, text: str, x: Parameter) -> bool:
        text = re.sub(r"//.*", "", text)
        names = [x.name, *(n for n, line in self.stride_lines.items() if x.name in line)]
        return any(re.search(rf"\b{n}\b", text) for n in names)

    def setup(self) -> None:
        t, pipe = self.t, self.pipe
        warps = 4 * pipe.consumers
        if pipe.cluster > 1:
            t("const int rank = cluster_rank();")
        with t.block("if (warp_index() == 0 && elect_one())"):
            for name in self.map_names.values():
                t(f"prefetch_map({name});")
            for vid, plan in self.led():
                n, readers = (plan.stages * pipe.consumers, 4) if vid in pipe.parted else (plan.stages, warps)
                readers *= pipe.cluster if pipe.common(vid) else 1
                loop = f"for (int n = 0; n < {n}; ++n) " if n > 1 else ""
                step = " + 8 * n" if n > 1 else ""
                t(f"{loop}{{ barrier_init({pipe.full[vid]}{step}, 1); barrier_init({pipe.empty[vid]}{step}, {readers}); }}")
            t(
                f"for (int n = 0; n < {WORK_SLOTS}; ++n) {{ barrier_init({pipe.work_full} + 8 * n, 1); "
                f"barrier_init({pipe.work_empty} + 8 * n, {warps}); }}"
            )
            if pipe.frozen:
                t(f"barrier_init({pipe.drained}, {warps});")
                t(f"store_shared<u32>({pipe.failed}, 0);")
            t("barrier_init_done();")
        self.order_kernels()
        if self.arch.overlap:
            t("async_fence_global();")
        if pipe.cluster > 1:  # others may not touch barriers that are not set up
            t("cluster_sync();")
