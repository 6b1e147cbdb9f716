//! Fuzzes the decoders of `format::map`.

#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| hearth_fuzz::map(bytes));
