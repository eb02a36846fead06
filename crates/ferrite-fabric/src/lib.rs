//! The fabric: everything between raw verbs and a product.
//!
//! | module | what it is |
//! |---|---|
//! | [`mem`] | registered memory: pools, buffers, budgets, memory that a peer may touch |
//!
//! Safety in one paragraph: a buffer is a value. Whoever has it may use its memory; the device may use it only
//! while an operation owns the value. `unsafe` stands in `src/mem` alone (and later in the slots that own
//! buffers in flight).

pub mod mem;
