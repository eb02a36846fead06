//! What comes over TCP: the heads of TCP frames, addresses, greetings.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| ferrite_fuzz::tcp_frame(bytes));
