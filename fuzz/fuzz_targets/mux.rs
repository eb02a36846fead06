//! Passes any records and any actions of a driver to a multiplexer.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| ferrite_fuzz::mux(bytes));
