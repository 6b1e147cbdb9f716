//! Fuzzes the decoder of `format::mirror`: messages between a head and its copies.

#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| hearth_fuzz::mirror(bytes));
