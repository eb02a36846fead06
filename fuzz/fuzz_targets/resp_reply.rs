//! Parses any bytes as replies, in any pieces, and compares with another decoder.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    ferrite_fuzz::resp_reply(bytes);
    ferrite_fuzz::oracle::replies(bytes);
});
