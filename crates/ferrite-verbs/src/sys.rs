//! The C interface of rdma-core: generated types and function tables, private to this crate.
//!
//! `cargo xtask bindings` writes `bindings.rs` (types, layout assertions) and `functions.rs` (the
//! functions to look up in the libraries). Nothing here is linked.

#[expect(
    non_camel_case_types,
    non_snake_case,
    unreachable_pub,
    dead_code,
    clippy::undocumented_unsafe_blocks,
    reason = "generated code, as the C headers have it"
)]
mod bindings;
mod function_table;
mod functions;

pub(crate) use bindings::*;
pub(crate) use functions::{CmFunctions, IbvFunctions};

/// Flags of `ibv_query_device` for windows of type 2 (IBV_DEVICE_MEM_WINDOW_TYPE_2A and _2B).
pub(crate) const DEVICE_WINDOW_TYPE_2A: u32 = 1 << 23;
pub(crate) const DEVICE_WINDOW_TYPE_2B: u32 = 1 << 24;
