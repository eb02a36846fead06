//! Decodes any bytes as data over TCP: headers of TCP frames, addresses, greetings.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| ferrite_fuzz::tcp_frame(bytes));
