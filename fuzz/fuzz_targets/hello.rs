//! Decodes any bytes as the hello of a CM request.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| ferrite_fuzz::hello(bytes));
