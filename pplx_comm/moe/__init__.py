"""A Mixture-of-Experts layer over dispatch and combine: dropless, in bfloat16, FP8 and MXFP8, for training and inference."""

from pplx_comm.moe.experts import expert_parameters
from pplx_comm.moe.layer import MoE
from pplx_comm.moe.router import RouterOptions
from pplx_comm.moe.schedule import one_forward_one_backward

__all__ = ["MoE", "RouterOptions", "expert_parameters", "one_forward_one_backward"]
