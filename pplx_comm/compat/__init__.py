"""Other libraries' MoE layers over this one: torchtitan's (compat.torchtitan) and Megatron-Core's (compat.megatron)."""
