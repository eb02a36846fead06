//! What comes over TCP: the heads of parcels, addresses, greetings.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| ferrite_fuzz::parcel(bytes));
