//! Reassembles any frames into messages.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| ferrite_fuzz::inbox(bytes));
