//! Fuzzes the decoders of `format::node`.

#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| hearth_fuzz::node(bytes));
