//! The planner against numbers that others published: parameters, bytes of keys and values, cliffs, buffers of llama.cpp,
//! slots of vLLM, FlashAttention's table, ZeRO's figure; and properties of every plan.

#[path = "plan/goldens.rs"]
mod goldens;
