//! Decodes any bytes as the payload of a control frame.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| ferrite_fuzz::control(bytes));
