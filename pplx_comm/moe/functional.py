"""The pieces of a layer, for layers of one's own.

    ids, weights = choose(softmax_scores(logits), top_k)
    one = send(a2a, x, ids, weights)            # a2a: layout=Ragged(zero_pad=True)
    shared = ...                                # runs while the tokens travel
    y = receive(one, gate_up, down, Options(quantised=True)) + shared

or, over dispatch and combine themselves: grouped_mm, swiglu, quantise, swiglu_quantise, scaled_grouped_mm, scaled_experts. With
experts of another kind, Exchange has the tokens' way there and back, with gradients.
"""

from pplx_comm.moe.exchange import Exchange
from pplx_comm.moe.grouped.autograd import grouped_mm
from pplx_comm.moe.grouped.choose import choices
from pplx_comm.moe.grouped.scaled import scaled_experts, scaled_grouped_mm
from pplx_comm.moe.quantise import dequantise, dequantise_weights, quantise, quantise_weights, rescale_mx
from pplx_comm.moe.ran import Ran
from pplx_comm.moe.routed import Extras, Options, Pass, compute, finish, receive, send
from pplx_comm.moe.routing import (
    choose,
    expert_load,
    load_balance_loss,
    sigmoid_scores,
    softmax_scores,
    update_bias,
    z_loss,
)
from pplx_comm.moe.segments import Segments, segments
from pplx_comm.moe.swiglu import swiglu, swiglu_quantise

__all__ = [
    "Exchange",
    "Extras",
    "Options",
    "Pass",
    "Ran",
    "Segments",
    "choices",
    "choose",
    "compute",
    "dequantise",
    "dequantise_weights",
    "expert_load",
    "finish",
    "grouped_mm",
    "load_balance_loss",
    "quantise",
    "quantise_weights",
    "receive",
    "rescale_mx",
    "scaled_experts",
    "scaled_grouped_mm",
    "segments",
    "send",
    "sigmoid_scores",
    "softmax_scores",
    "swiglu",
    "swiglu_quantise",
    "update_bias",
    "z_loss",
]
