//! Fuzzes the decoder of `format::pass`.

#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| hearth_fuzz::pass(bytes));
