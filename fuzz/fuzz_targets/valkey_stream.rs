//! Connects a stream of Valkey's protocol to a peer with arbitrary behaviour.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| ferrite_fuzz::valkey_stream(bytes));
