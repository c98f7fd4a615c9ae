"""Tile programs → CUDA C++ (and, over other device headers, HIP C++).

    emit.emit            tile programs → one translation unit and its launches
    planner.plan         decides: warps.py, sides.py, placement.py, planner.py, each on top of the one before; `schedule.Schedule`
    fragments.Fragments  prints: kernel.py, registers.py, elementwise.py, copies.py, reductions.py, contractions.py, loops.py, likewise
    simple               another pair of both, for what fits no fragment layout: one element a thread
    simplify             the only change to a tile program's arithmetic: constants move into exponentials
    arch, ../device      all that is known of a machine
    emulate              runs emitted text on the CPU

Text calls named primitives only; device/sm80.cuh spells them in PTX, device/emulator.h on the CPU.
"""
