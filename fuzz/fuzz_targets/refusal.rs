//! Decodes any bytes as the private data of a CM rejection.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| ferrite_fuzz::refusal(bytes));
