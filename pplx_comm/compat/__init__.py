"""Other libraries over this one: MoE layers of torchtitan and Megatron-Core, and packages in the place of DeepEP's (shadow/)."""
