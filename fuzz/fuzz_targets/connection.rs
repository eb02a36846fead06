//! Any peer at the other end of a TCP connection.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| ferrite_fuzz::connection(bytes));
