//! Parses any bytes as commands, in any pieces.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| ferrite_fuzz::resp_command(bytes));
