"""E-graphs stay small: an upper bound for every program, and for the largest thing that saturation holds meanwhile.

A rule that makes a graph grow beyond its bound is wrong, or needs a guard.  `python tests/test_sizes.py` prints the table anew.
"""

from __future__ import annotations

import sys

import pytest
from eqsat_neptune.cost_models import model_for

import eqsat_neptune as en
from eqsat_neptune.compiler import joins, splittable
from eqsat_neptune.egraph import Saturated, saturate
from eqsat_neptune.program import Program
from eqsat_neptune.programs import CASES, Case
from eqsat_neptune.targets import Target

MOST = 5000  # rows of any program, retired ones included

# program → e-nodes that its saturated graph may have: about 1.3 times what it had when this was written
BOUNDS = {
    "prefill_global": 102,
    "prefill_causal": 124,
    "prefill_gqa": 124,
    "prefill_alibi": 198,
    "prefill_softcap": 133,
    "prefill_windowed": 140,
    "decode_causal": 102,
    "decode_gqa": 102,
    "decode_alibi": 128,
    "decode_softcap": 111,
    "gqa_plain": 29,
    "qknorm": 120,
    "rmsnorm_linear": 32,
    "rmsnorm_gain_linear": 37,
    "lora": 27,
    "gated_mlp": 28,
    "gated_mlp_gelu": 51,
    "ntrans": 38,
    "layernorm_linear": 89,
    "swiglu_linear": 28,
    "matmul_chain": 22,
    "rmsnorm_diamond": 67,
    "rope_attention": 167,
    "attention_sugar": 102,
    "attention_dq": 242,
    "attention_dkv": 197,
    "attention_backward": 384,
    "layers1": 306,
    "layers2": 605,
    "softmax": 42,
    "softmax_sugar": 42,
    "log_softmax": 46,
    "logsumexp": 37,
    "logsumexp_sugar": 40,
    "cross_entropy": 44,
    "cross_entropy_linear": 58,
    "softmax_backward": 104,
    "variance": 33,
    "standard_deviation": 34,
    "layernorm": 53,
    "layernorm_sugar": 53,
    "l2_normalize": 12,
    "rmsnorm_quantize": 71,
    "performer": 300,
    "off_by_one_attention": 88,
    "sink_attention": 92,
    "differential_attention": 327,
    "attention_logsumexp": 42,
    "sigmoid_attention": 37,
    "linear_attention": 62,
    "retention": 44,
    "kmeans_assign": 27,
    "nearest_centre": 31,
    "nearest_neighbours": 423,
    "kernel_sum": 20,
    "kernel_regression": 101,
    "top2_gating": 41,
    "topk_gating": 187,
    "decision_trees": 23,
}


def saturated(case: Case) -> Saturated:
    """At the full size, with the splits and joins of a GPU: the largest graph that is searched."""
    program = en.trace(case.function("full"), *case.specs("full"))
    assert isinstance(program, Program)
    target = Target("cuda", "sm_90a")
    return saturate(program, splittable=splittable(program, target), joins=joins(program, model_for(str(target))))


@pytest.mark.parametrize("name", [n for n, c in CASES.items() if not c.needs_scan])
def test_size(name: str) -> None:
    assert name in BOUNDS, "a new program: add it to the table"
    s = saturated(CASES[name])
    assert s.stop == "fixpoint", f"saturation ended by its limit of {s.stop}"
    assert s.graph.size <= BOUNDS[name] and max(p.nodes for p in s.stats) <= min(MOST, 2 * BOUNDS[name] + 20)


def test_the_table_has_no_strangers() -> None:
    assert set(BOUNDS) <= set(CASES)


if __name__ == "__main__":
    for name, case in CASES.items():
        if not case.needs_scan:
            s = saturated(case)
            print(
                f'    "{name}": {round(1.3 * s.graph.size + 2)},  # {s.graph.size}, at most {max(p.nodes for p in s.stats)}',
                file=sys.stdout,
            )
