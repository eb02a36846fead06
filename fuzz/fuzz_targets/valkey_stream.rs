//! Any peer at the other end of a stream that speaks Valkey's protocol.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| ferrite_fuzz::valkey_stream(bytes));
