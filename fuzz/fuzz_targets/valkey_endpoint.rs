//! Passes any sequence of events to an endpoint of Valkey Over RDMA.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| ferrite_fuzz::valkey_endpoint(bytes));
