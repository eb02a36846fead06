//! Passes any bytes to the decoder of the multiplexer's records.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| ferrite_fuzz::mux_records(bytes));
