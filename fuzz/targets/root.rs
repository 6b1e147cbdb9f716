//! Fuzzes the decoders of `format::root`.

#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| hearth_fuzz::root(bytes));
