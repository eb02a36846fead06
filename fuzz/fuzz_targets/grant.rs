//! Decodes any bytes as a grant.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| ferrite_fuzz::grant(bytes));
