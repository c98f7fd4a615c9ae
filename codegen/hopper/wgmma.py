"""One wrapper for each shape of wgmma that a translation unit uses: the instruction names every accumulator register, so the text is
mechanical.

Fragments are arrays x[2][columns / 4], as those of mma16816.cuh: a warp of the warpgroup holds rows 16·(warp % 4) …."""

from __future__ import annotations

PTX = {"bf16": "bf16", "f16": "f16"}


def wrapper(dtype: str, columns: int, registers: bool) -> str:
    """`wgmma<…>(dtype{}, x, left, right, add)`: x (64 × columns) = left (64 × 16) · right (16 × columns), or += where `add`.

    registers: the left operand is a fragment in registers, else both are in shared memory.  Template arguments say which operands in
    shared memory have their rows or columns, not the summed index, along panels (MNMajor)."""
    slots = columns // 4
    order = [f"x[{i}][{2 * j + e}]" for j in range(slots // 2) for i in (0, 1) for e in (0, 1)]
    n = len(order)
    acc = ",".join(f"%{i}" for i in range(n))
    outs = ",".join(f'"+f"({o})' for o in order)
    kind = PTX[dtype]
    if registers:
        left, right, flag, imm = f"{{%{n},%{n + 1},%{n + 2},%{n + 3}}}", f"%{n + 4}", n + 5, f"%{n + 6}"
        ins = '"r"(a0),"r"(a1),"r"(a2),"r"(a3),"l"(b),"r"((u32)add),"n"(TB)'
        params, template = "u32 a0, u32 a1, u32 a2, u32 a3, u64 b, bool add", "int TB"
    else:
        left, right, flag, imm = f"%{n}", f"%{n + 1}", n + 2, f"%{n + 3}, %{n + 4}"
        ins = '"l"(a),"l"(b),"r"((u32)add),"n"(TA),"n"(TB)'
        params, template = "u64 a, u64 b, bool add", "int TA, int TB"
    return (
        f"template <{template}> DEV void wgmma({dtype}, float (&x)[2][{slots}], {params}) {{\n"
        f'    asm volatile("{{.reg .pred p; setp.ne.b32 p, %{flag}, 0;\\n"\n'
        f'        "wgmma.mma_async.sync.aligned.m64n{columns}k16.f32.{kind}.{kind} {{{acc}}}, {left}, {right}, p, 1, 1, {imm};}}\\n"\n'
        f"        : {outs} : {ins});\n}}\n"
    )
