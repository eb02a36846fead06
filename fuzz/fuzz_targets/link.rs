//! Connects a link to a peer with arbitrary behaviour.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| ferrite_fuzz::link(bytes));
